"""The index of a run that grows, is made again, damaged or gone, and of what is no run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import orjson
import pyarrow as pa
import pytest
from multidict import MultiDict

from batch_trajectories.records.files import add_checksum
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.scores import score_key
from batch_trajectories.view.conversation import _opening
from batch_trajectories.view.index import parts, run_index
from batch_trajectories.view.index.filters import in_offsets, read_filters
from batch_trajectories.view.index.parts import (
    extend,
    find_first_merged,
    find_origin,
    merge,
    open_part,
    parts_in,
)
from batch_trajectories.view.index.table import Table
from batch_trajectories.view.runs import RunPlace
from batch_trajectories.view.state import OpenRun
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import wait_until
from tests.view.conftest import ROWS
from tests.view.serving import Viewer, viewing

ALL = 2 * len(ROWS)


@pytest.fixture
def copied(runs: Path, tmp_path: Path) -> Path:
    """The run, to be changed."""
    return Path(shutil.copytree(runs / "r", tmp_path / "runs" / "r"))


@pytest.fixture
def looking(copied: Path) -> Iterator[Viewer]:
    with viewing(copied.parent) as viewer:
        yield viewer


def rows_of(viewer: Viewer, **query: Any) -> dict[str, Any]:
    answer: dict[str, Any] = viewer.get("/runs/r/rows", limit=500, **query)
    return answer


def change_record(line: bytes, **values: Any) -> bytes:
    """A record with other values."""
    content = orjson.loads(line)
    del content["crc32"]
    return add_checksum(orjson.dumps(content | values))


def test_rows_come_as_records_are_appended(copied: Path, looking: Viewer) -> None:
    records = copied / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join(lines[:10]) + lines[10][:50])  # a line that is being written
    assert rows_of(looking)["matching"] == 10
    for count in (11, 12, 20, ALL):
        with records.open("ab") as file:
            file.write(b"".join(lines[:count])[records.stat().st_size :])
        answer = rows_of(looking)
        assert answer["matching"] == count
        assert answer["index"]["is_complete"]
    with viewing(copied.parent) as again:
        assert rows_of(again)["rows"] == rows_of(looking)["rows"]


def test_the_first_rows_of_a_large_run_are_there_at_once(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is made by another process meanwhile."""
    monkeypatch.setattr(run_index, "_HERE_BYTES", 1)
    index = run_index.RunIndex(copied)
    try:
        assert index.refresh().parts
        assert not index.is_complete
        wait_until(lambda: bool(index.refresh().parts) and index.is_complete)
        assert index.to_json()["rows"] == ALL
    finally:
        index.close()


def test_a_request_gets_the_rows_of_its_own_table(copied: Path) -> None:
    """Another one may have brought the index, or the words of conversations, up to date."""
    records = copied / "records.jsonl"
    whole = records.read_bytes()
    first = whole.splitlines(keepends=True)[0]
    records.write_bytes(first)
    run = OpenRun(RunPlace("r", copied, str(copied.parent)))
    try:
        before = run.index.refresh()
        with records.open("ab") as file:
            file.write(whole[len(first) :])
        after = run.index.refresh()
        everything = read_filters(MultiDict())
        for table, count in ((before, 1), (after, ALL), (before, 1)):
            masks = run.select(table, everything)
            assert len(run.order(table, masks, None, down=False)) == count
    finally:
        run.close()


def test_a_record_that_is_made_again_replaces_the_earlier_one(
    copied: Path, looking: Viewer
) -> None:
    before = rows_of(looking)["rows"][3]
    records = copied / "records.jsonl"
    line = records.read_bytes().splitlines(keepends=True)[3]
    with records.open("ab") as file:
        file.write(change_record(line, finished_at=before["finished_at"] + 9, attempt=2))
    answer = rows_of(looking)
    assert answer["matching"] == answer["total"] == ALL
    assert answer["rows"][-1]["id"] == before["id"]
    found = looking.get("/runs/r/record", id=before["id"])
    assert found["record"]["attempt"] == 2
    label = {"id": before["id"], "record": before["record"], "verdict": "keep"}
    refused = looking.ask("/api/runs/r/labels", label)
    assert refused.status == 409
    assert "made again" in refused.body["error"]


def test_records_that_are_replaced_as_a_file_are_indexed_again(
    copied: Path, looking: Viewer
) -> None:
    assert rows_of(looking)["matching"] == ALL
    records = copied / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    shorter = records.with_name("new")
    shorter.write_bytes(b"".join(lines[5:]))
    shorter.replace(records)  # as `verify --repair` does
    answer = rows_of(looking)
    assert answer["matching"] == ALL - 5
    id = answer["rows"][0]["id"]
    assert looking.get("/runs/r/record", id=id)["record"]["id"] == id


def test_later_scores_are_shown(copied: Path, looking: Viewer) -> None:
    assert rows_of(looking, passed="true")["matching"] == 0
    record = next(iter(stored_records(copied)))
    score = {
        "source": "judge",
        "version": "1",
        "error": None,
        "rewards": {"reward": 1.0},
        "record": score_key(record),
        "id": record.id,
        "at": 1.0,
    }
    (copied / "scores.jsonl").write_bytes(add_checksum(orjson.dumps(score)))
    answer = rows_of(looking, reward_min=1)
    assert [row["id"] for row in answer["rows"]] == [record.id]
    assert looking.get("/runs/r/record", id=record.id)["record"]["scores"][0]["source"] == "judge"


def test_damaged_records_are_counted_and_named(copied: Path, looking: Viewer) -> None:
    records = copied / "records.jsonl"
    content = bytearray(records.read_bytes())
    second = content.index(b"\n") + 1
    content[second + 40] ^= 1
    records.write_bytes(content)
    answer = rows_of(looking)
    assert (answer["matching"], answer["index"]["unreadable"]) == (ALL - 1, 1)
    first = answer["rows"][0]["id"]
    content[40] ^= 1
    with records.open("r+b") as file:  # while it is looked at
        file.write(content)
    refused = looking.ask("/api/runs/r/record", id=first)
    assert refused.status == 409
    assert "--repair` sets it aside" in refused.body["error"]
    assert looking.get("/runs")["runs"]


def test_a_number_that_no_column_can_hold_is_left_out(copied: Path, looking: Viewer) -> None:
    records = copied / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    usage = {"input_tokens": 2**70, "output_tokens": 1}
    records.write_bytes(b"".join([change_record(lines[0], usage={}), *lines[1:]]))
    content = orjson.loads(lines[1])
    del content["crc32"]
    huge = orjson.dumps(content | {"id": "huge", "usage": usage | {"input_tokens": 7777}})
    with records.open("ab") as file:
        file.write(add_checksum(huge.replace(b"7777", str(2**70).encode())))
    answer = rows_of(looking)
    assert (answer["matching"], answer["index"]["unreadable"]) == (ALL, 1)


def test_a_run_that_is_gone_is_gone(copied: Path, looking: Viewer) -> None:
    assert rows_of(looking)["matching"] == ALL
    shutil.rmtree(copied)
    for path in ("", "/rows", "/charts", "/record?id=missing", "/in_flight", "/labels"):
        assert looking.ask(f"/api/runs/r{path}").status == 404
    assert looking.get("/runs")["runs"] == []


def test_garbage_is_an_error_and_nothing_else(copied: Path, looking: Viewer) -> None:
    place = copied.parent
    for name, content in (("empty", b""), ("text", b"hello"), ("list", b"[]"), ("old", b"{}")):
        (place / name).mkdir()
        (place / name / "run.json").write_bytes(content)
    pipe = Path(shutil.copytree(copied, place / "pipe"))
    (pipe / "records.jsonl").unlink()
    os.mkfifo(pipe / "records.jsonl")
    head = Path(shutil.copytree(copied, place / "head"))
    (head / "run.json").unlink()
    os.mkfifo(head / "run.json")
    flight = Path(shutil.copytree(copied, place / "flight"))
    (flight / "inflight").mkdir(exist_ok=True)
    os.mkfifo(flight / "inflight" / "worker-0-1.jsonl")
    noise = Path(shutil.copytree(copied, place / "noise"))
    for name in ("records.jsonl", "labels.jsonl", "progress.json", "summary.json", "records.idx"):
        (noise / name).write_bytes(os.urandom(2000) + b"\n{}\n[]\nnull\n")
    for name in ("statistics.json", "failures.jsonl"):
        (noise / name).write_bytes(b'{"health": 3, "checks": [], "total": null}\n')
    runs = {run["key"]: run for run in looking.get("/runs")["runs"]}
    assert {key for key, run in runs.items() if run["state"] == "unreadable"} == {
        "empty",
        "text",
        "list",
        "old",
        "pipe",
        "head",
    }
    assert all(run["error"] for run in runs.values() if run["state"] == "unreadable")
    paths = ("", "/rows", "/charts", "/record?id=x", "/siblings?id=x", "/in_flight", "/labels")
    for key in ("empty", "text", "list", "old", "pipe", "head", "flight", "noise"):
        for path in (*paths, "/live?id=x"):
            answer = looking.ask(f"/api/runs/{key}{path}")
            assert answer.status in (200, 404, 409), (key, path, answer.body)
    assert rows_of(looking)["matching"] == ALL


def test_an_index_of_many_parts_is_that_of_one(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin = find_origin(copied)
    assert origin is not None
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for cache in (whole, cut):
        cache.mkdir()
    extend(copied, whole, origin)
    monkeypatch.setattr(parts, "RANGE_BYTES", 1)
    monkeypatch.setattr(parts, "merge", lambda directory: None)
    ranges = parts.split_ranges
    monkeypatch.setattr(parts, "split_ranges", lambda path, gaps: ranges(path, gaps, 1))
    extend(copied, cut, origin)
    assert len(parts_in(cut / origin.name)) == ALL
    expected = Table(parts_in(whole / origin.name))
    numbers = range(ALL)
    assert Table(parts_in(cut / origin.name)).rows(numbers) == expected.rows(numbers)
    merge(cut / origin.name)
    merged = parts_in(cut / origin.name)
    assert len(merged) == 1
    assert open_part(merged[0].path)[0][0].num_rows == ALL
    assert Table(merged).rows(numbers) == expected.rows(numbers)


@pytest.mark.parametrize(
    ("megabytes", "first"),
    [
        ([1, 1, 1, 1], 0),
        ([1, 1, 1, 1, 0.3], 0),
        ([500, 1, 1, 0.3], 1),
        ([500, 200, 0.1], 2),
        ([500, 3, 0.1, 0.1], 2),
        ([7], 1),
        ([], 0),
    ],
)
def test_few_parts_are_left_whatever_the_size_of_the_last_one(
    megabytes: list[float], first: int
) -> None:
    """A new index has equal parts, and in its last one what they left over."""
    assert find_first_merged([int(size * 10**6) for size in megabytes]) == first


def test_a_long_selection_is_answered(looking: Viewer) -> None:
    """As of hundreds of ids; the server of aiohttp takes 8 KB by default."""
    answer = looking.ask("/api/runs/r/rows", query="x" * 20_000)
    assert answer.headers.get_content_type() == "application/json"  # type: ignore[attr-defined]


def test_a_dataset_that_is_a_pipe_or_a_device_is_not_opened(tmp_path: Path) -> None:
    """Reading either would not end."""

    class Received:
        identity: ClassVar[Any] = {"dataset": {"path": "/dev/zero"}}

        @property
        def scan(self) -> Any:
            raise AssertionError("it was opened")

    run: Any = SimpleNamespace(stored=Received)
    assert _opening(run, b"k" * 16) == []
    os.mkfifo(tmp_path / "pipe")
    Received.identity = {"dataset": {"path": str(tmp_path / "pipe")}}
    assert _opening(run, b"k" * 16) == []


def test_the_next_undecided_row_is_found_without_a_look_at_each(
    copied: Path, looking: Viewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of the list, from the record on and then from its beginning."""
    query: dict[str, Any] = {"order": "id", "down": 1}
    ids = [row["id"] for row in looking.get("/runs/r/rows", limit=500, **query)["rows"]]
    first, last = ids[1], ids[-2]
    for id in ids:
        if id not in (first, last):
            looking.post("/runs/r/labels", {"id": id, "verdict": "keep", "who": "ann"})
    looks = 0

    def value(self: Table, *given: Any) -> Any:
        nonlocal looks
        looks += 1
        return original(self, *given)

    original = Table.value
    monkeypatch.setattr(Table, "value", value)

    def undecided(id: str, who: str = "ann") -> str | None:
        around = looking.get("/runs/r/record", id=id, who=who, **query)["around"]
        found: str | None = around["undecided"]
        return found

    assert undecided(ids[2]) == last
    assert undecided(last) == first
    assert undecided(ids[0]) == first
    assert undecided(ids[2], who="ben") == ids[3]
    assert looks <= 4 * 7, "its own values, and the ids around it"
    for id in (first, last):
        looking.post("/runs/r/labels", {"id": id, "verdict": "reject", "who": "ann"})
    assert undecided(ids[2]) is None


def test_runs_are_compared_in_a_process_of_its_own(tmp_path: Path) -> None:
    first, second = (
        make_run(tmp_path, call_record(), last, name=name).run_dir
        for name, last in (("a", call_record()), ("b", call_record("No.")))
    )
    compared = orjson.loads(run_index.run_maker("compare", first, second))
    assert [run["records"] for run in compared["runs"]] == [2, 2]
    assert compared["more"]["changed"] == 0


@pytest.mark.parametrize("wanted", [[], [0], [5, 14, 15], [29], [*range(30)], [3, 40]])
def test_each_batch_chooses_its_records_by_their_places(wanted: list[int]) -> None:
    """Whatever part of all that was found is in it, and whatever the order of its rows."""
    places = [[*range(10)], [], [19, *range(10, 19)], [*range(20, 30)]]
    chooses = in_offsets(pa.array(wanted, pa.int64()))
    for some in places:
        batch = pa.record_batch([pa.array(some, pa.int64())], names=["offset"])
        assert chooses(batch).to_pylist() == [place in wanted for place in some]
