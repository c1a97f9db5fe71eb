"""What lies on disk: appended lines, repaired tails, the index, the turn journal, the lock."""

from __future__ import annotations

import os
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.messages.message import OUT_OF_PLACE, Event
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.batch_api.batch_log import BatchLog
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.supervisor.budget import BudgetLog, set_aside_damaged
from batch_trajectories.records.failures import (
    Failure,
    FailureFile,
    load_failed_attempts,
    why_tasks_failed,
)
from batch_trajectories.records.files import (
    AppendFile,
    StorageError,
    add_checksum,
    read_json,
    repair_tail,
    replace_file,
)
from batch_trajectories.records.index import index_fields
from batch_trajectories.records.journal import (
    Inflight,
    JournalWriter,
    journal_line,
    next_worker_number,
    read_journaled_replies,
    usable_prefix,
)
from batch_trajectories.records.records import RecordFile, load_index, refuse_lost_records
from batch_trajectories.records.tasks import BadRow, task_key
from tests.helpers.exporting import bare
from tests.helpers.stored import to_record


def record(task: str, status: str = "completed", attempt: int = 1) -> dict[str, Any]:
    return bare(task, status=status, attempt=attempt, text="x" * 50)


def append(file: RecordFile, *records: dict[str, Any]) -> None:
    for one in records:
        file.append(orjson.dumps(one) + b"\n", index_fields(to_record(one)))
    file.sync()


def open_records(path: Path) -> RecordFile:
    return RecordFile(path, path / "quarantine")


def statuses(path: Path) -> dict[str, str]:
    """What the index says, by the ids a, b, c, d."""
    index = load_index(path)
    found = {name: index.get(task_key(name, "d")) for name in "abcd"}
    return {name: entry.status for name, entry in found.items() if entry is not None}


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A directory with three records and their index."""
    file = open_records(tmp_path)
    append(file, record("a"), record("b"), record("c", "max_turns"))
    file.close()
    return tmp_path


def test_records_that_are_removed_before_their_first_sync_are_missed(tmp_path: Path) -> None:
    file = open_records(tmp_path)
    file.append(orjson.dumps(record("a")) + b"\n", index_fields(to_record(record("a"))))
    (tmp_path / "records.jsonl").unlink()
    with pytest.raises(StorageError, match="removed or replaced"):
        file.sync()
    file.close()
    with pytest.raises(RunDirError, match=r"missing, but records\.idx names records"):
        refuse_lost_records(tmp_path)


@contextmanager
def no_room() -> Iterator[None]:
    """Files of this process can grow no further than 1,000 bytes.

    Not a fixture: the test runner writes its own output between the phases of a test.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_are_found_by_task(records: Path) -> None:
    assert statuses(records) == {"a": "completed", "b": "completed", "c": "max_turns"}


def test_the_last_record_of_a_task_counts(records: Path) -> None:
    file = open_records(records)
    append(file, record("a", "failed", attempt=2))
    file.close()
    assert statuses(records)["a"] == "failed"


@pytest.mark.parametrize("cut", range(2, 60))
def test_a_torn_last_record_is_quarantined_and_nothing_is_appended_to_it(
    records: Path, cut: int
) -> None:
    """However many bytes of the last record are missing, its task alone is to be done again."""
    path = records / "records.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    file = open_records(records)
    append(file, record("d"))
    file.close()
    assert statuses(records) == {"a": "completed", "b": "completed", "d": "completed"}
    assert [orjson.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", "b", "d"]
    assert len(list((records / "quarantine").iterdir())) == 1


def test_a_last_record_without_its_newline_counts(records: Path) -> None:
    """It was paid for, and nothing of what it says is missing."""
    path = records / "records.jsonl"
    before = path.read_bytes()
    for sealed in (before, add_checksum(before.splitlines()[0]) * 3):
        path.write_bytes(sealed[:-1])
        file = open_records(records)
        append(file, record("d"))
        file.close()
        assert path.read_bytes().startswith(sealed)
        assert "d" in statuses(records)
    assert not (records / "quarantine").exists()


def test_damaged_lines_of_journals_and_ledgers_are_set_aside_and_named(tmp_path: Path) -> None:
    """What can be read of them stays, and a whole last line gets its newline."""
    inflight = tmp_path / "inflight"
    inflight.mkdir()
    journal(inflight, 0, ("a", reply(1)), ("b", reply(1)), ("a", reply(2)))
    segment = inflight / "worker-0-0.jsonl"
    first, second, third = segment.read_bytes().splitlines(keepends=True)
    changed = second.replace(b'"task":"b"', b'"task":"c"')
    segment.write_bytes(first + changed + third[:-1])
    ledger = BudgetLog(tmp_path, tmp_path / "quarantine")
    ledger.append("lent", Cost(1.5, 10))
    ledger.append("returned", Cost(0.5, 5))
    ledger.close()
    budget = tmp_path / "budget.jsonl"
    budget.write_bytes(budget.read_bytes().replace(b"0.5", b"0.7"))
    assert set_aside_damaged(tmp_path) == ["budget.jsonl:2", "worker-0-0.jsonl:2"]
    assert segment.read_bytes() == first + third
    assert (tmp_path / "quarantine" / "worker-0-0.jsonl.line2").read_bytes() == changed
    assert BudgetLog(tmp_path, tmp_path / "quarantine").balance == Cost(1.5, 10)
    assert read_back(inflight, "a") == [reply(1), reply(2)]
    assert set_aside_damaged(tmp_path) == []


ODD_RECORDS = [
    {**record("x"), **odd}
    for odd in ({"status": 3}, {"cost_usd": "free"}, {"messages": None}, {"error": 1}, {"id": 1})
]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 500,
        b"not json\n",
        b"[]\n",
        b'{"id": "a"}\n',
        *[orjson.dumps(odd) + b"\n" for odd in ODD_RECORDS],
    ],
)
def test_unreadable_records_are_quarantined_and_the_rest_stays(
    records: Path, garbage: bytes
) -> None:
    path = records / "records.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    whole_garbage = garbage if garbage.endswith(b"\n") else garbage + b"\n"
    path.write_bytes(lines[0] + whole_garbage + lines[2])
    (records / "records.idx").unlink()
    file = open_records(records)
    file.close()
    assert file.unreadable == ["records.jsonl:2"]
    assert statuses(records) == {"a": "completed", "c": "max_turns"}
    assert (records / "quarantine" / "records.jsonl.line2").read_bytes() == whole_garbage


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path: Path) -> None:
    file = AppendFile(tmp_path / "f")
    file.append(b"x" * 899 + b"\n")
    with no_room(), pytest.raises(StorageError, match="run the same command again"):
        file.append(b"y" * 899 + b"\n")
    with pytest.raises(StorageError):
        file.append(b"z\n")
    with pytest.raises(StorageError):
        file.sync()
    file.close()
    assert (tmp_path / "f").stat().st_size == 900


def test_a_file_is_synced_only_where_lines_were_appended_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also lines that another thread appends while a sync runs, which may not be part of it."""
    file = AppendFile(tmp_path / "f")
    synced: list[int] = []
    sync = os.fdatasync

    def counted(fd: int) -> None:
        sync(fd)
        synced.append(os.fstat(fd).st_size)
        if len(synced) == 1:
            file.append(b"b\n")

    monkeypatch.setattr(os, "fdatasync", counted)
    file.append(b"a\n")
    for _ in range(3):
        file.sync()
    assert synced == [2, 4]
    file.close()


def test_a_file_that_cannot_be_replaced_stays_as_it_was(tmp_path: Path) -> None:
    replace_file(tmp_path / "f", b"old")
    with no_room(), pytest.raises(StorageError):
        replace_file(tmp_path / "f", b"n" * 2000)
    assert (tmp_path / "f").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_repairing_a_whole_file_or_none_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"a\nb\n")
    assert repair_tail(tmp_path / "f", tmp_path / "q") == 0
    assert repair_tail(tmp_path / "absent", tmp_path / "q") == 0
    assert not (tmp_path / "q").exists()


def reply(turn: int, calls: int = 0) -> Any:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    if calls:
        message["tool_calls"] = [{"id": f"{turn}{n}"} for n in range(calls)]
    return {"kind": "reply", "turn": turn, "message": message}


def paid(lost: Any, turn: int) -> Any:
    """A reply that is held for what it cost alone."""
    return {**lost, "turn": turn, "discarded": OUT_OF_PLACE}


def result(turn: int, call: int) -> Any:
    return {"kind": "result", "turn": turn, "call": call}


def fail(error: StorageError) -> None:
    raise error


def journal(
    path: Path, worker: int, *entries: tuple[str, Any], assignment: int = 1, first: int = 0
) -> None:
    """Write the segment of a worker: (task, event) pairs of an assignment, from `first` on."""
    writer = JournalWriter(path, worker, on_storage_error=fail)
    positions: dict[str, int] = {}
    for task, event in entries:
        position = positions.setdefault(task, first)
        writer.append(task, "d", event, assignment=assignment, position=position)
        positions[task] += 1
    writer.close()


def read_back(path: Path, task: str) -> list[Event]:
    inflight = Inflight(path)
    inflight.read(settled=())
    return inflight.events(task_key(task, "d"))


def turns_of(events: list[Event]) -> list[int]:
    return [event["turn"] for event in events if event["kind"] in ("reply", "result")]


def test_a_reply_that_was_asked_for_again_leaves_no_hole(tmp_path: Path) -> None:
    discarded: Any = {**reply(1), "discarded": "blank"}
    events: list[Event] = [discarded, discarded, reply(1), reply(2)]
    journal(tmp_path, 0, *(("a", event) for event in events))
    assert read_back(tmp_path, "a") == events


def test_journaled_events_are_read_back_by_task(tmp_path: Path) -> None:
    journal(tmp_path, 0, ("a", reply(1, calls=1)), ("b", reply(1)), ("a", result(1, 0)))
    assert read_back(tmp_path, "a") == [reply(1, calls=1), result(1, 0)]
    assert read_back(tmp_path, "b") == [reply(1)]
    assert read_back(tmp_path, "c") == []
    assert next_worker_number(tmp_path) == 1


def test_events_are_in_order_whichever_worker_wrote_them(tmp_path: Path) -> None:
    """A task of a worker that died may go on in one that was started before it."""
    journal(tmp_path, 7, ("a", reply(1, calls=1)), ("a", result(1, 0)))
    journal(tmp_path, 2, ("a", reply(2)), ("a", reply(3)), assignment=2, first=2)
    journal(tmp_path, 5, ("a", reply(4)), assignment=3, first=4)
    turns = turns_of(read_back(tmp_path, "a"))
    assert turns == [1, 1, 2, 3, 4]
    inflight = Inflight(tmp_path)
    inflight.read(settled=())
    assert inflight.next_assignment(task_key("a", "d")) == 4
    assert inflight.next_assignment(task_key("b", "d")) == 1


def test_a_later_assignment_counts_from_where_it_went_on(tmp_path: Path) -> None:
    """What an older assignment left beyond a hole is not used later either, but was paid for."""
    old, new = reply(2), {**reply(2), "model": "new"}
    journal(tmp_path, 0, ("a", reply(1)), ("a", old), ("a", reply(3)))
    journal(tmp_path, 1, ("a", new), assignment=2, first=1)
    assert read_back(tmp_path, "a") == [reply(1), new, paid(old, 3), paid(reply(3), 3)]


def knows_begun(path: Path, task: str, **given: Any) -> bool:
    inflight = Inflight(path, **given)
    inflight.read(settled=())
    return inflight.has_start_events(task_key(task, "d"))


def test_a_journal_tells_which_calls_began_until_the_machine_starts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill leaves what was written, a loss of power may not."""
    journal(tmp_path, 0, ("a", reply(1, calls=1)), ("b", reply(1, calls=1)))
    journal(tmp_path, 1, ("a", result(1, 0)), assignment=2, first=1)
    assert knows_begun(tmp_path, "a")
    other = "batch_trajectories.records.journal.boot_id"
    with monkeypatch.context() as patched:
        patched.setattr(other, lambda: "another")
        assert not knows_begun(tmp_path, "a")
        patched.setattr(other, lambda: "")
        assert not knows_begun(tmp_path, "a"), "it is not known which start this is"
    first = tmp_path / "worker-0-0.jsonl"
    first.write_bytes(b"".join(first.read_bytes().splitlines(keepends=True)[1:]))
    assert not knows_begun(tmp_path, "b"), "as in a journal of an earlier version"


def test_a_journal_that_lost_a_line_does_not_tell_which_calls_began(tmp_path: Path) -> None:
    (tmp_path / "inflight").mkdir()
    for worker in range(2):
        journal(tmp_path / "inflight", worker, (str(worker), reply(1, calls=1)))
        segment = tmp_path / "inflight" / f"worker-{worker}-0.jsonl"
        segment.write_bytes(segment.read_bytes() + (b"no event\n" if worker else b"torn"))
    damaged = set_aside_damaged(tmp_path)
    assert knows_begun(tmp_path / "inflight", "0", damaged=damaged), "a torn line was never used"
    assert not knows_begun(tmp_path / "inflight", "1", damaged=damaged)
    segment.write_bytes(segment.read_bytes() + b"no event\n")
    assert not knows_begun(tmp_path / "inflight", "1"), "the journal of a worker that just died"


def test_lines_of_workers_elsewhere_do_not_tell_which_calls_began(tmp_path: Path) -> None:
    """They arrive in their own time."""
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    line = journal_line("a", "d", reply(1, calls=1), assignment=1, position=0)
    writer.append_lines([task_key("a", "d")], line)
    writer.close()
    assert not knows_begun(tmp_path, "a")


def test_a_segment_is_deleted_when_all_its_tasks_have_records(tmp_path: Path) -> None:
    journal(tmp_path, 3, ("a", reply(1)), ("b", reply(1)))
    inflight = Inflight(tmp_path)
    inflight.read(settled=())
    inflight.finish(task_key("a", "d"))
    assert len(list(tmp_path.iterdir())) == 1
    inflight.finish(task_key("b", "d"))
    assert not list(tmp_path.iterdir())


def test_a_worker_deletes_its_own_segments_as_its_tasks_finish(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    writer.append("a", "d", reply(1), assignment=1, position=0)
    writer.finish(task_key("a", "d"))
    writer.close()
    assert not list(tmp_path.iterdir())


def test_segments_of_settled_tasks_are_deleted(tmp_path: Path) -> None:
    journal(tmp_path, 0, ("a", reply(1)))
    journal(tmp_path, 1, ("b", reply(1)))
    inflight = Inflight(tmp_path)
    inflight.read(settled={task_key("a", "d")})
    assert [path.name for path in tmp_path.iterdir()] == ["worker-1-0.jsonl"]
    tasks = read_journaled_replies(tmp_path, settled=()).tasks
    assert {key: replies.turns for key, replies in tasks.items()} == {task_key("b", "d"): 1}


def test_the_segments_of_one_dead_worker_are_read_for_the_tasks_it_held(tmp_path: Path) -> None:
    journal(tmp_path, 0, ("living", reply(1)))
    journal(tmp_path, 1, ("held", reply(1)), ("finished", reply(1)))
    inflight = Inflight(tmp_path)
    inflight.add_worker(1, wanted=task_key("held", "d").__eq__)
    assert inflight.events(task_key("held", "d")) == [reply(1)]
    assert inflight.events(task_key("finished", "d")) == []
    assert inflight.events(task_key("living", "d")) == []
    inflight.finish(task_key("held", "d"))
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0-0.jsonl"]


def test_a_hole_in_an_older_assignment_does_not_hide_what_later_ones_did(tmp_path: Path) -> None:
    """reply 2 was lost to a power cut; the assignments after it continued from reply 1."""
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    writer.append("a", "d", reply(1), assignment=1, position=0)
    writer.append("a", "d", reply(3), assignment=1, position=2)
    writer.append("a", "d", reply(4), assignment=1, position=3)
    writer.close()
    journal(tmp_path, 1, ("a", reply(2)), ("a", reply(3)), assignment=2, first=1)
    journal(tmp_path, 2, ("a", reply(4)), assignment=3, first=3)
    lost = [paid(reply(3), 5), paid(reply(4), 5)]
    assert read_back(tmp_path, "a") == [*map(reply, range(1, 5)), *lost]


def test_replies_behind_a_hole_are_paid_for_and_stay_so_in_all_later_assignments(
    tmp_path: Path,
) -> None:
    """Also those of inner conversations; results and notes cost nothing."""
    inner: Any = {"kind": "sub", "key": "k", "name": "n", "event": reply(1)}
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    for position, event in ((0, reply(1, calls=1)), (2, result(1, 0)), (3, reply(2)), (4, inner)):
        writer.append("a", "d", event, assignment=1, position=position)
    writer.close()
    lost = [paid(reply(2), 2), paid(reply(1), 2)]
    given = [reply(1, calls=1), *lost]
    assert read_back(tmp_path, "a") == given
    # The next assignment begins behind them, and the one after it finds all where it was.
    journal(tmp_path, 1, ("a", result(1, 0)), ("a", reply(2)), assignment=2, first=len(given))
    assert read_back(tmp_path, "a") == [*given, result(1, 0), reply(2)]
    journal(tmp_path, 2, ("a", reply(3)), assignment=3, first=len(given) + 2)
    assert read_back(tmp_path, "a") == [*given, result(1, 0), reply(2), reply(3)]
    trajectory = Trajectory([])
    for event in (*given, reply(2)):
        times = {"started_at": 0.0, "duration_s": 0.0}
        priced: Any = {**event, "cost_usd": 0.25, "usage": None, **times}
        trajectory.apply(priced)
    assert (trajectory.cost_usd(), trajectory.reasks, len(trajectory.messages)) == (1.0, 0, 2)


def test_a_reply_that_a_batch_can_bring_again_is_not_paid_twice(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    brought: Any = {**reply(2), "batch_item": "i"}
    writer.append("a", "d", brought, assignment=1, position=1)
    writer.close()
    assert read_back(tmp_path, "a") == []


def test_full_segments_are_followed_by_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a task whose events lie in several segments is read back whole and deleted whole."""
    monkeypatch.setattr("batch_trajectories.records.journal._SEGMENT_BYTES", 300)
    writer = JournalWriter(tmp_path, 0, on_storage_error=fail)
    for turn in range(1, 21):
        writer.append("a", "d", reply(turn), assignment=1, position=turn - 1)
    assert len(list(tmp_path.iterdir())) > 5
    assert len(read_back(tmp_path, "a")) == 20
    writer.finish(task_key("a", "d"))
    writer.close()
    assert not list(tmp_path.iterdir())


def test_segments_removed_during_a_run_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full ones too, by the next event or, where none comes, at the end; the run is stopped."""
    monkeypatch.setattr("batch_trajectories.records.journal._SEGMENT_BYTES", 300)
    inflight = tmp_path / "inflight"
    inflight.mkdir()
    errors: list[StorageError] = []
    writer = JournalWriter(inflight, 0, on_storage_error=errors.append)
    for turn in range(1, 10):
        writer.append("a", "d", reply(turn), assignment=1, position=turn - 1)
    assert len(list(inflight.iterdir())) > 2
    shutil.rmtree(inflight)
    writer.append("a", "d", reply(10), assignment=1, position=9)
    assert ["worker-0-" in str(error) for error in errors] == [True]
    assert turns_of(read_back(inflight, "a")) == [*range(1, 11)]
    shutil.rmtree(inflight)
    writer.close()
    assert turns_of(read_back(inflight, "a")) == [*range(1, 11)]


def test_a_writer_whose_run_was_removed_closes_its_files_and_raises(tmp_path: Path) -> None:
    inflight = tmp_path / "run" / "inflight"
    inflight.mkdir(parents=True)
    errors: list[StorageError] = []
    writer = JournalWriter(inflight, 0, on_storage_error=errors.append)
    writer.append("a", "d", reply(1), assignment=1, position=0)
    shutil.rmtree(tmp_path / "run")
    writer.close()
    assert ["cannot write" in str(error) for error in errors] == [True]
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [link for link in links if str(inflight) in str(link.readlink())]


def test_a_journal_of_an_earlier_start_that_is_removed_is_named(tmp_path: Path) -> None:
    journal(tmp_path, 0, ("a", reply(1)))
    inflight = Inflight(tmp_path)
    inflight.read(settled=())
    (tmp_path / "worker-0-0.jsonl").unlink()
    with pytest.raises(StorageError, match="it was removed or changed"):
        inflight.events(task_key("a", "d"))


def test_failures_and_ledgers_that_are_removed_are_noticed(tmp_path: Path) -> None:
    failures = FailureFile(tmp_path, tmp_path / "quarantine")
    failures.append_bad_row(tmp_path, BadRow(1, "empty"))
    failures.sync()
    budget = BudgetLog(tmp_path, tmp_path / "quarantine")
    budget.append("lent", Cost(1.0, 1))
    batches = BatchLog(tmp_path, tmp_path / "quarantine")
    batches.note_live(1)
    for name in ("failures.jsonl", "budget.jsonl", "batches.jsonl"):
        (tmp_path / name).unlink()
    writes: list[Callable[[], None]] = [
        failures.sync,
        lambda: budget.append("lent", Cost(1.0, 1)),
        lambda: batches.note_live(1),
    ]
    for write in writes:
        with pytest.raises(StorageError, match="it was removed or replaced"):
            write()
    for file in (failures, budget, batches):
        file.close()


def test_a_journal_whose_run_was_removed_is_not_made_elsewhere(tmp_path: Path) -> None:
    inflight = tmp_path / "r" / "inflight"
    inflight.mkdir(parents=True)
    writer = JournalWriter(inflight, 0, on_storage_error=fail)
    shutil.rmtree(tmp_path / "r")
    with pytest.raises(StorageError, match="inflight: cannot write: No such file or directory"):
        writer.append("a", "d", reply(1), assignment=1, position=0)
    writer.close()
    assert not list(tmp_path.iterdir())


def test_a_torn_journal_line_was_never_used(tmp_path: Path) -> None:
    journal(tmp_path, 0, ("a", reply(1, calls=1)), ("a", result(1, 0)))
    segment = tmp_path / "worker-0-0.jsonl"
    os.truncate(segment, segment.stat().st_size - 3)
    assert read_back(tmp_path, "a") == [reply(1, calls=1)]


@pytest.mark.parametrize(
    ("events", "usable"),
    [
        ([reply(1, 2), result(1, 1), result(1, 0), reply(2)], 4),
        ([reply(1, 2), result(1, 0), reply(2)], 2),
        ([reply(1), reply(3)], 1),
        ([result(1, 0)], 0),
        ([reply(1, 1), result(2, 0)], 1),
        ([reply(1, 1), result(1, 0), result(1, 0)], 2),
        ([reply(1, 1), result(1, 1)], 1),
    ],
)
def test_what_follows_a_hole_in_the_journal_is_not_used(events: list[Event], usable: int) -> None:
    assert usable_prefix(events) == events[:usable]


def test_failures_are_counted_over_all_starts(tmp_path: Path) -> None:
    for _ in range(2):
        file = FailureFile(tmp_path, tmp_path / "q")
        file.append(
            Failure(id="a", input_digest="d", attempt=1, error_class="timeout", message="slow")
        )
        file.append(
            Failure(id="a", input_digest="d", attempt=1, error_class="worker_died", message="dead")
        )
        file.append_bad_row(Path("p.jsonl"), BadRow(3, "not JSON"))
        file.close()
    file = FailureFile(tmp_path, tmp_path / "q")
    file.close()
    key = task_key("a", "d")
    assert (file.attempts[key], file.deaths[key]) == (2, 2)
    assert load_failed_attempts(tmp_path) == {key: "timeout"}
    text = (tmp_path / "failures.jsonl").read_text()
    assert text.count("bad_row") == 1, "a bad row is named once"


def test_unreadable_failures_are_passed_over(tmp_path: Path) -> None:
    odd = ['{"kind": "attempt"}', '{"kind": "bad_row", "file": [1]}', "[]", "x", '{"kind": 1}']
    (tmp_path / "failures.jsonl").write_text("\n".join(odd) + "\n")
    FailureFile(tmp_path, tmp_path / "q").close()
    assert load_failed_attempts(tmp_path) == {}


def test_replaced_files_are_their_owners_alone_or_keep_their_mode(tmp_path: Path) -> None:
    """A finished row is appended to `records.jsonl` and synced; mode 0600 or as given."""
    path = tmp_path / "f"
    replace_file(path, b"1")
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    replace_file(path, b"2")
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_file_that_was_removed_under_its_writer_is_noticed(tmp_path: Path) -> None:
    """Also one that another took the place of, as editors do."""
    for change in (Path.unlink, lambda path: replace_file(path, b"edited\n")):
        file = open_records(tmp_path)
        append(file, record("a"))
        change(tmp_path / "records.jsonl")
        with pytest.raises(StorageError, match="removed or replaced"):
            append(file, record("b"))
        file.close()


TOOLS = [{"type": "function", "function": {"name": "a", "parameters": {"options": {"tools": []}}}}]


def test_tools_that_many_records_offer_are_one_object() -> None:
    first, *others = [to_record({"id": str(n), "tools": TOOLS}) for n in range(3)]
    assert first.tools == TOOLS
    assert all(other.tools is first.tools for other in others)
    long = [{"type": "function", "function": {"name": "a", "parameters": {"n": 2**70}}}]
    assert to_record({"tools": long}).tools == long


def test_a_pipe_in_place_of_a_json_file_is_not_read(tmp_path: Path) -> None:
    """Reading it waits for a writer: one such progress.json held up the list of all runs."""
    os.mkfifo(tmp_path / "progress.json")
    writer = os.open(tmp_path / "progress.json", os.O_RDWR)  # so that a failure ends, too
    os.write(writer, b"{}")
    threading.Timer(2, os.close, [writer]).start()
    assert read_json(tmp_path / "progress.json") is None


@pytest.mark.parametrize(
    ("messages", "counts"),
    [
        (
            [
                "ClientError: 400, message='Can not decode content-encoding: brotli'",
                "ClientError: 400, message='Can not decode content-encoding: brotli'",
                "ClientError: 400, message='Not enough data for the length 12'",
                "ClientError: 400, message='Not enough data for the length 345'",
                'ClientError: 400, message="Bad status line"',
            ],
            [2, 2, 1],
        ),
        (["no tool 'a'", "no tool 'b'", "no tool 'New York'"], [3]),
        (["id 0badcafe12 of 7", "id deadbeef99 of 8"], [2]),
        ([f"not JSON: {'page ' * 30 + name!r}" for name in ("a", "b")], [2]),
    ],
    ids=["sentences", "names", "ids and numbers", "quotes of a page"],
)
def test_unlike_reasons_are_not_counted_as_one(
    tmp_path: Path, messages: list[str], counts: list[int]
) -> None:
    """A summary shows the words of one of them; quoted names, ids and numbers make none unlike."""
    file = FailureFile(tmp_path, tmp_path / "q")
    for n, message in enumerate(messages):
        file.append(Failure(f"t{n}", "d", 1, "connection", message))
    file.close()
    tasks = {task_key(f"t{n}", "d") for n in range(len(messages))}
    reasons = why_tasks_failed(tmp_path, tasks)
    assert [reason["count"] for reason in reasons] == counts
    assert all(reason["message"] in messages for reason in reasons)
