"""The index of the records: damaged or lost, it still says what the records say."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import orjson
import pytest

from agent.state.trajectory import Status
from batch_trajectories.records.index import (
    MARK,
    ROW_BYTES,
    Ending,
    Index,
    IndexEntry,
    IndexFields,
    RowMaker,
    index_fields,
    valid_rows,
)
from batch_trajectories.records.records import RecordFile, load_index, parse_record
from batch_trajectories.records.tasks import task_key
from tests.helpers.exporting import bare
from tests.helpers.stored import to_record

ENDINGS = [
    ("completed", None),
    ("max_turns", None),
    ("failed", "context_exceeded"),
    ("failed", "worker_died"),
]


CHECKS = [{"passed": True, "reward": 0.25}, {"passed": False, "reward": 0.0}]


def some_record(draw: random.Random, task: int) -> dict[str, Any]:
    status, error_class = draw.choice(ENDINGS)
    usage = {"input_tokens": draw.choice([None, 0, 2**40]), "output_tokens": draw.randrange(99)}
    turn = {"finish_reason": "stop", "started_at": 1.0, "duration_s": 0.5, "usage": None}
    place = {"turn": 1, "call": 0, "started_at": 1.5, "duration_s": 0.25}
    return bare(
        f"p{task}",
        status=status,
        error=error_class and {"class": error_class, "message": "m"},
        attempt=draw.randrange(1, 4),
        turns=[turn] * draw.randrange(4),
        tool_calls=[{**place, "name": "a", "is_error": False}] * draw.randrange(9),
        usage=draw.choice([None, usage]),
        cost_usd=draw.choice([None, 0.25, 0, 1e-9]),
        check=draw.choice([None, *CHECKS]),
        text="x" * draw.randrange(300),
    )


def write(run_dir: Path, seed: int, count: int) -> list[dict[str, Any]]:
    """Write records, some tasks more than once, as a run does."""
    draw = random.Random(seed)
    records = [some_record(draw, draw.randrange(count)) for _ in range(count)]
    file = RecordFile(run_dir, run_dir / "quarantine")
    for number, record in enumerate(records):
        file.append(orjson.dumps(record) + b"\n", index_fields(to_record(record)))
        if number % 7 == 0:
            file.sync()
    file.sync()
    file.close()
    return records


def from_records(run_dir: Path) -> dict[bytes, IndexEntry]:
    """What an index has to say, read from the records alone."""
    collected = {}
    offset = 0
    for line in (run_dir / "records.jsonl").read_bytes().splitlines(keepends=True):
        record = orjson.loads(line)
        usage, error = record["usage"] or {}, record["error"] or {}
        collected[task_key(record["id"], record["input_digest"])] = IndexEntry(
            offset=offset,
            length=len(line),
            status=record["status"],
            attempt=record["attempt"],
            turns=len(record["turns"]),
            tool_calls=len(record["tool_calls"]),
            input_tokens=usage.get("input_tokens"),
            output_tokens=usage.get("output_tokens"),
            cost_usd=record["cost_usd"],
            error_class=error.get("class"),
            verdict=None if record["check"] is None else record["check"]["passed"],
            reward=None if record["check"] is None else record["check"]["reward"],
        )
        offset += len(line)
    return collected


def cut_index(at: int) -> Callable[[bytes], bytes]:
    return lambda index: index[:at]


def zeros(start: int, end: int) -> Callable[[bytes], bytes]:
    """What a power loss can leave where blocks were not written yet."""
    return lambda index: index[:start] + bytes(len(index[start:end])) + index[end:]


def put(at: int, content: bytes) -> Callable[[bytes], bytes]:
    return lambda index: index[:at] + content + index[at + len(content) :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda index: None,
    "of an older form": lambda index: b'["7cea7e2e2b418070cf8398093a6dfb0f",0,1410]\n' * 40,
    "of the format before": lambda index: index.replace(b"records index 3", b"records index 2"),
    "garbage": lambda index: b"\xff" * 5000,
    "half a mark": cut_index(ROW_BYTES // 2),
    "a mark alone": cut_index(ROW_BYTES),
    "an ending that nobody has": cut_index(2 * ROW_BYTES),
    "a torn row": cut_index(20 * ROW_BYTES + 17),
    "rows behind": cut_index(50 * ROW_BYTES),
    "all zeros": zeros(0, 1 << 20),
    "zeros after the mark": zeros(ROW_BYTES, 1 << 20),
    "zeros from a block on": zeros(4096, 1 << 20),
    "a block of zeros": zeros(512, 1024),
    "a longer record": put(30 * ROW_BYTES + 24, b"\xff\xff\xff\x7f"),
    "another place": put(30 * ROW_BYTES + 16, b"\x01"),
    "an ending that was not told": put(30 * ROW_BYTES + 28, b"\xff\x00"),
    "an ending told twice": lambda index: index[: 2 * ROW_BYTES] + index[ROW_BYTES:],
    "too many rows": lambda index: index + index[-ROW_BYTES:],
    "rows twice": lambda index: index + index[ROW_BYTES:],
    "another last task": lambda index: index[:-ROW_BYTES] + b"k" * 16 + index[16 - ROW_BYTES :],
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_repaired_from_the_records(tmp_path: Path, name: str) -> None:
    write(tmp_path, seed=1, count=100)
    index = tmp_path / "records.idx"
    right, expected = index.read_bytes(), from_records(tmp_path)
    damaged = DAMAGES[name](right)
    assert damaged != right
    index.unlink()
    if damaged is not None:
        index.write_bytes(damaged)
    assert dict(load_index(tmp_path)) == expected
    assert (index.read_bytes() if index.exists() else None) == damaged, "reading writes nothing"
    RecordFile(tmp_path, tmp_path / "quarantine").close()
    assert index.read_bytes() == right


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_an_index_cut_anywhere_is_completed(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    write(tmp_path, seed, count=60)
    index = tmp_path / "records.idx"
    right, expected = index.read_bytes(), from_records(tmp_path)
    for at in draw.sample(range(len(right)), 40):
        os.truncate(index, at)
        assert dict(load_index(tmp_path)) == expected
        RecordFile(tmp_path, tmp_path / "quarantine").close()
        assert index.read_bytes() == right


@pytest.mark.parametrize("lost", [1, 30, 99, 100])
def test_an_index_that_is_ahead_of_the_records_is_cut(tmp_path: Path, lost: int) -> None:
    """The index may survive a power loss that took the records it speaks of."""
    write(tmp_path, seed=2, count=100)
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-lost]))
    expected = from_records(tmp_path)
    assert dict(load_index(tmp_path)) == expected
    RecordFile(tmp_path, tmp_path / "quarantine").close()
    mended = (tmp_path / "records.idx").read_bytes()
    (tmp_path / "records.idx").unlink()
    RecordFile(tmp_path, tmp_path / "quarantine").close()
    assert (tmp_path / "records.idx").read_bytes() == mended
    assert dict(load_index(tmp_path)) == expected


def test_an_index_of_other_records_is_not_used(tmp_path: Path) -> None:
    """Somebody puts the records of another run, or older ones, in their place."""
    for name, count in (("a", 50), ("b", 200)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, seed=count, count=count)
    (tmp_path / "b" / "records.jsonl").replace(tmp_path / "a" / "records.jsonl")
    assert dict(load_index(tmp_path / "a")) == from_records(tmp_path / "a")


def test_starts_one_after_the_other_make_the_index_that_one_would(tmp_path: Path) -> None:
    for seed in range(4):
        write(tmp_path, seed, count=30)
    grown = (tmp_path / "records.idx").read_bytes()
    (tmp_path / "records.idx").unlink()
    RecordFile(tmp_path, tmp_path / "quarantine").close()
    assert (tmp_path / "records.idx").read_bytes() == grown


def test_a_reader_beside_the_run_sees_records_that_have_no_row_yet(tmp_path: Path) -> None:
    write(tmp_path, seed=3, count=20)
    file = RecordFile(tmp_path, tmp_path / "quarantine")
    draw = random.Random(0)
    for task in range(100, 105):
        record = some_record(draw, task)
        file.append(orjson.dumps(record) + b"\n", index_fields(to_record(record)))
    assert dict(load_index(tmp_path)) == from_records(tmp_path)
    file.close()


@pytest.mark.parametrize("seed", range(5))
def test_tasks_are_matched_with_their_records(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    write(tmp_path, seed, count=300)
    index, expected = load_index(tmp_path), from_records(tmp_path)
    known = draw.sample(sorted(expected), 100)
    keys = [*known, *(task_key(f"new{n}", "d") for n in range(50))]
    draw.shuffle(keys)
    rows, others = index.match(b"".join(keys))
    found = [index.entry(row) if row else None for row in rows]
    assert found == [expected.get(key) for key in keys]
    assert [index.get(key) for key in keys] == found
    assert list(index.endings(rows)) == [
        entry and Ending(entry.status, entry.verdict, entry.error_class) for entry in found
    ]
    assert list(index.passed(rows)) == [entry and entry.passed for entry in found]
    assert others == len(expected) - len(known)
    assert len(index) == len(expected)
    assert sorted(entry.offset for _, entry in index.records())[0] == 0
    counting = sorted(expected.items(), key=lambda found: found[1].offset)
    assert list(index.current_entries()) == counting
    assert list(index.latest()) == counting[::-1]
    costs = [entry.cost_usd for _, entry in index.records() if entry.cost_usd is not None]
    unknown = [
        entry for _, entry in index.records() if entry.has_replies and entry.cost_usd is None
    ]
    total, records = index.costs()
    assert total == pytest.approx(sum(costs))
    assert records == len(unknown) > 0


def test_sums_over_records_are_those_of_their_entries(tmp_path: Path) -> None:
    write(tmp_path, seed=1, count=300)
    index, expected = load_index(tmp_path), from_records(tmp_path)
    keys = sorted(expected)[:100]
    rows, _ = index.match(b"".join(keys))
    sums, entries = index.sums(rows), [expected[key] for key in keys]
    assert sums.endings == Counter(
        Ending(entry.status, entry.verdict, entry.error_class) for entry in entries
    )
    paid = [entry for entry in entries if entry.has_replies]
    assert (sums.turns, sums.tool_calls) == (
        sum(entry.turns for entry in entries),
        sum(entry.tool_calls for entry in entries),
    )
    assert (sums.input_tokens, sums.output_tokens, sums.tokens_unknown) == (
        sum(entry.input_tokens or 0 for entry in entries),
        sum(entry.output_tokens or 0 for entry in entries),
        sum(None in (entry.input_tokens, entry.output_tokens) for entry in paid),
    )
    assert sums.cost_usd == pytest.approx(sum(entry.cost_usd or 0 for entry in entries))
    assert sums.cost_unknown == sum(entry.cost_usd is None for entry in paid)
    assert 0 < sums.tokens_unknown < len(paid)
    assert 0 < sums.cost_unknown < len(paid)


def ending_fields(status: str, error_class: str | None, verdict: bool | None) -> IndexFields:
    """The facts of a record with this ending."""
    return IndexFields(
        id="a",
        input_digest="d",
        status=status,
        attempt=1,
        turns=1,
        tool_calls=0,
        input_tokens=1,
        output_tokens=1,
        cost_usd=0.0,
        error_class=error_class,
        verdict=verdict,
        reward=None,
    )


ERROR_CLASSES = ["user_context_exceeded", "setup_failed", "worker_died", "a_class_of_24_characters"]


@pytest.mark.parametrize("status", [status for status in get_args(Status) if status != "failed"])
@pytest.mark.parametrize("verdict", [None, True, False])
@pytest.mark.parametrize("failed", [True, False])
def test_an_ending_is_whole_however_long_its_words_are(
    status: str, verdict: bool | None, failed: bool
) -> None:
    """A row has 34 bytes for it."""
    error_class = "check_failed" if failed else None
    fields = ending_fields(status, error_class, verdict)
    rows = MARK + RowMaker().rows(fields, 0, 10)
    assert next(Index(rows).endings([2])) == Ending(status, verdict, error_class)
    assert valid_rows(rows, 10) == (len(rows), 10)


@pytest.mark.parametrize("error_class", ERROR_CLASSES)
@pytest.mark.parametrize("verdict", [None, True, False])
def test_the_class_of_a_failure_is_whole(error_class: str, verdict: bool | None) -> None:
    fields = ending_fields("failed", error_class, verdict)
    rows = MARK + RowMaker().rows(fields, 0, 10)
    assert next(Index(rows).endings([2])) == Ending("failed", verdict, error_class)


def test_an_index_with_an_ending_that_was_cut_is_made_again(tmp_path: Path) -> None:
    """Earlier versions cut `check_failed` to `check_faile`, which no count contains."""
    records = [
        bare(f"p{n}", status="user_context_exceeded", check={"error": "the sandbox is gone"})
        for n in range(3)
    ]
    (tmp_path / "records.jsonl").write_bytes(b"".join(b"%b\n" % orjson.dumps(r) for r in records))
    right = load_index(tmp_path).rows
    assert Index(right).sums(Index(right).current_rows()).endings == {
        Ending("user_context_exceeded", None, "check_failed"): 3
    }
    ending = b"user_context_exceeded\0\0check_faile"
    made = bytearray(right)
    made[ROW_BYTES + 30 : 2 * ROW_BYTES] = ending
    (tmp_path / "records.idx").write_bytes(made)
    assert load_index(tmp_path).rows == right
    RecordFile(tmp_path, tmp_path / "quarantine").close()
    stored_rows = (tmp_path / "records.idx").read_bytes()
    assert stored_rows[ROW_BYTES:] == right[ROW_BYTES:]


def test_an_empty_index_has_nothing(tmp_path: Path) -> None:
    index = Index(MARK)
    assert (dict(index), len(index), index.has_turns()) == ({}, 0, False)
    assert index.costs() == (0.0, 0)
    assert index.get(MARK[:16]) is None
    assert index.get(bytes(16)) is None
    assert index.match(MARK[:16] + bytes(16)) == (index.match(bytes(32))[0], 0)


@pytest.mark.parametrize(
    "odd", [{"attempt": "1"}, {"attempt": -1}, {"cost_usd": "free"}, {"turns": None}]
)
def test_a_record_with_unusable_fields_is_not_parsed(odd: dict[str, Any]) -> None:
    record = some_record(random.Random(0), 1)
    assert parse_record(orjson.dumps(record)) is not None
    assert parse_record(orjson.dumps({**record, **odd})) is None


def test_a_huge_attempt_number_is_capped(tmp_path: Path) -> None:
    record = some_record(random.Random(0), 1) | {"attempt": 10**9}
    rows = RowMaker().rows(index_fields(to_record(record)), 0, 10)
    assert Index(MARK + rows).entry(2).attempt == 2**16 - 1
