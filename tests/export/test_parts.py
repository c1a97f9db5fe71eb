"""What several processes read of a run is what one reads."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import threading
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.basics.parts import run_in_processes
from batch_trajectories.dataset.scan import scan
from batch_trajectories.export import training_files
from batch_trajectories.export.conversation.row_json import SharedText, dumps_row
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.statistics.run import compute_statistics
from batch_trajectories.maintenance import verify
from batch_trajectories.records import reader
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.reader import open_index
from batch_trajectories.records.records import UnreadableRecord
from batch_trajectories.report.page.writer import write_report
from tests.export.test_export import BROKEN, EARLY, FAILED, INLINE, PLAIN, THOUGHT, export
from tests.helpers.builders import assistant, record_of, user
from tests.helpers.exporting import call_record, make_run
from tests.helpers.running import SCRIPTED, run, write_rows


def use_processes(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(count)))
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # those of pytest do not matter
    for module in (reader, training_files):
        monkeypatch.setattr(module, "ENOUGH_BYTES", 1)
    monkeypatch.setattr(verify, "_ENOUGH_BYTES", 1)


def groups(folder: Path) -> Path:
    """Samples of prompts with rewards by name, failed scores and checks."""
    records = []
    for n, reward in enumerate([0.25, 1.0, 0.5, 0.75, 1.0, 0.0, 0.125, 0.5]):
        failed = {"source": "m:f", "version": "1", "rewards": None, "error": f"ValueError: {n}"}
        given = {"source": "m:g", "version": "1", "rewards": {"style": reward}, "error": None}
        turns = {**given, "source": "m:h", "turn_rewards": {"t": [reward]}}
        check = {"passed": reward > 0.4, "reward": reward}
        usage = {"input_tokens": n, "output_tokens": 2}
        scores = [failed, given, turns]
        records.append(call_record(check=check, scores=scores, cost_usd=0.5, usage=usage))
    return make_run(folder, *records, samples=2).run_dir


@pytest.mark.parametrize("samples", [1, 2])
def test_statistics_are_the_same_in_parts(
    tmp_path: Path, samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = groups(tmp_path)
    whole = compute_statistics(path, style=Style(), samples=samples)
    assert whole["failed_scores"] == 8
    use_processes(monkeypatch, 3)
    assert compute_statistics(path, style=Style(), samples=samples) == whole


def test_training_files_are_the_same_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(folder: Path) -> dict[str, bytes]:
        folder.mkdir()
        path = export(folder, PLAIN, EARLY, FAILED, BROKEN, THOUGHT, INLINE, PLAIN)
        names = ("partial.jsonl", "rejects.jsonl", "manifest.json")
        files = [path.with_suffix(".jsonl"), path / "statistics.json"]
        files += [path / "exports" / name for name in names]
        assert not [*folder.rglob("*.tmp")]
        return {file.name: file.read_bytes() for file in files}

    whole = written(tmp_path / "whole")
    use_processes(monkeypatch, 3)
    assert written(tmp_path / "parts") == whole


def test_texts_of_many_rows_pass_between_processes() -> None:
    text = SharedText("<tools>")
    dumps_row({"text": text})
    assert pickle.loads(pickle.dumps(text)) == text


def test_a_part_without_room_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = export(tmp_path, PLAIN, record_of(user(), assistant("x" * 30_000)))
    found = scan(tmp_path / "p.jsonl", max_samples=None)
    use_processes(monkeypatch, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(StorageError, match="raise the limit of file sizes"):
            training_files.export_run(path, found, num_samples=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.rglob("*.tmp")]


def test_a_report_in_parts_has_the_same_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        {"id": f"p{n}", "prompt": f"x{n}", "script": [{"content": "<b>" * n or "y"}]}
        for n in range(7)
    ]
    write_rows(tmp_path / "p.jsonl", *rows)
    assert run(tmp_path, **SCRIPTED).returncode == 0
    path = tmp_path / "trajectories" / "r"
    whole = data_of(path)
    use_processes(monkeypatch, 3)
    assert data_of(path) == whole
    assert sorted(file.name for file in (path / "report_files").iterdir()) == [
        "chunk-0.js",
        "chunk-3.js",
        "chunk-6.js",
        "rows.js",
    ]


def data_of(run_dir: Path) -> list[Any]:
    """The rewards in a report, and its rows and records in order, each with what it refers to."""
    written = write_report(StoredRun(run_dir), inline_bytes=0)
    page = re.search(r'id="meta-data">(.*?)</script>', written.path.read_text())
    assert page
    assert written.files
    meta = json.loads(page[1])
    calls = {
        file.name: [json.loads(line.split("`")[1]) for line in file.read_text().split("\n")[:-1]]
        for file in written.files.iterdir()
    }
    assert len(calls["rows.js"]) == meta["row_pieces"]
    found: list[Any] = [meta["rewards"]]
    for *row, chunk, place in chain.from_iterable(calls["rows.js"]):
        (records,) = calls[f"chunk-{chunk}.js"]
        record = records[place]
        record["tools"] = [meta["tools"][key] for key in record["tools"]]
        form = record["training_form"]
        form["system"] = meta["systems"].get(form["system"])
        found.append((row, record))
    assert len(found) == written.rows + 1
    return found


def test_damage_is_found_in_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = groups(tmp_path)
    use_processes(monkeypatch, 2)
    with open_index(path) as (index, _):
        places = [entry.offset for _, entry in index.current_entries()]
    with (path / "records.jsonl").open("r+b") as records:
        records.seek(places[6] + 10)
        records.write(b"!")
    with pytest.raises(UnreadableRecord, match="the record"):
        compute_statistics(path, style=Style())
    report = verify.Report()
    index, counted = verify._check_records(path, report, len)
    assert report.records == len(index) == counted == 7
    assert [problem.line for problem in report.problems if problem.kind == "unreadable"] == [7]


def test_parts_are_in_order_and_in_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_processes(monkeypatch, 3)

    def work(items: Any, advance: Callable[[int], object]) -> tuple[int, list[int]]:
        for _ in items:
            advance(1)
        return os.getpid(), list(items)

    found = run_in_processes(range(1000), work, doing="count", enough=10)
    assert [n for _, part in found for n in part] == [*range(1000)]
    assert len({pid for pid, _ in found} | {os.getpid()}) == 4
    assert run_in_processes(range(9), work, doing="count", enough=10) == [
        (os.getpid(), [*range(9)])
    ]
    found = run_in_processes(range(9), work, doing="count", enough=10, amount=29)  # few, but large
    assert [part for _, part in found] == [[0, 1, 2, 3, 4], [5, 6, 7, 8]]


@pytest.mark.parametrize("enough", [1, 100])
def test_this_process_does_its_own_work_meanwhile(
    enough: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_processes(monkeypatch, 2)
    reads, writes = os.pipe()

    def wait(items: Any, advance: Callable[[int], object]) -> bytes:
        return os.read(reads, 1)

    def begin() -> None:
        os.write(writes, b"ab")

    found = run_in_processes(range(9), wait, doing="wait", enough=enough, meanwhile=begin)
    assert sorted(found) == ([b"a", b"b"] if enough == 1 else [b"a"])

    def fail() -> None:
        begin()
        raise LookupError

    with pytest.raises(LookupError):
        run_in_processes(range(9), wait, doing="wait", enough=enough, meanwhile=fail)


def test_a_part_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    use_processes(monkeypatch, 2)
    parent = os.getpid()

    def die(items: Any, advance: Callable[[int], object]) -> None:
        assert os.getpid() != parent
        os._exit(9)

    with pytest.raises(EnvironmentStop, match="has ended"):
        run_in_processes(range(9), die, doing="die", enough=1)


def test_verify_trusts_the_kept_scan_unless_it_reads_the_data(tmp_path: Path) -> None:
    """The scan has a digest of itself and of the dataset: a changed dataset is scanned again."""
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x", "script": [{"content": "y"}]})
    assert run(tmp_path, **SCRIPTED).returncode == 0
    for args in ((), ("--read_data",)):
        done = run(tmp_path, "verify", "r", *args)
        assert (done.returncode, done.stdout) == (
            0,
            "trajectories/r: 1 record, no problems found\n",
        )
    write_rows(tmp_path / "p.jsonl", {"id": "b", "prompt": "x", "script": [{"content": "y"}]})
    assert run(tmp_path, "verify", "r").returncode == 6
