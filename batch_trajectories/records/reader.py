"""Read the records of a run one by one, at their places in the index; writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple, TypeVar

import orjson

from batch_trajectories.basics.console import track_progress
from batch_trajectories.records.files import DamagedLine, refuse_strange_files
from batch_trajectories.records.index import Index
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.records.record_types import Record, decode_record
from batch_trajectories.records.records import AFTER_ID, HEAD, load_index, unreadable_record
from batch_trajectories.records.scores import Scores, apply_later_checks
from batch_trajectories.records.tasks import task_key

if TYPE_CHECKING:
    from batch_trajectories.basics.parts import Advance

_DIGEST = b',"input_digest":"'
_HEAD_BYTES = 512

ENOUGH_BYTES = 20 << 20
"""A process with less of the records takes as long to start as it saves."""

_BATCH_BYTES = 1 << 20
"""Bytes of a batch of records. Measured: the fastest of 32 KiB to 2 MiB."""

R = TypeVar("R")
T = TypeVar("T")


@contextmanager
def open_records(run_dir: Path) -> Iterator[BinaryIO]:
    """Open records.jsonl; an empty file if it does not exist yet."""
    path = run_dir / RECORDS_FILE
    with (path if path.exists() else Path(os.devnull)).open("rb") as records:
        yield records


def read_record(records: BinaryIO, offset: int, length: int, key: bytes) -> Record:
    """Read the record of the task with this key at this place. Raises `UnreadableRecord`."""
    line = os.pread(records.fileno(), length, offset)
    try:
        record = decode_record(line)
        if task_key(record.id, record.input_digest) != key:
            raise DamagedLine("the index names another record for this place")
    except DamagedLine as error:
        raise unreadable_record(records, offset, line, error) from error
    return record


def read_id(records: BinaryIO, offset: int, length: int, key: bytes) -> str:
    """Read only the id of a record, from its first bytes if they match the key.

    Raises `UnreadableRecord`.
    """
    head = os.pread(records.fileno(), min(_HEAD_BYTES, length), offset)
    digest = head.find(_DIGEST)
    try:
        id = str(orjson.loads(head[len(HEAD) : head.index(AFTER_ID, len(HEAD)) + 1]))
        first = digest + len(_DIGEST)
        if digest > 0 and task_key(id, head[first : head.index(b'"', first)].decode()) == key:
            return id
    except ValueError:
        pass  # the id contains what looks like its end, or is longer than the head
    return read_record(records, offset, length, key).id


@contextmanager
def open_index(run_dir: Path, *, lenient: bool = False) -> Iterator[tuple[Index, BinaryIO]]:
    """Open the index and the records of a run, even during the run.

    Raises `RunDirError` if a file of the run is not a plain file, and what `load_index` raises.
    """
    refuse_strange_files(run_dir)
    index = apply_later_checks(run_dir, load_index(run_dir, lenient=lenient))
    with open_records(run_dir) as records:
        yield index, records


def stored_records(run_dir: Path, *, doing: str | None = None) -> Iterator[Record]:
    """The records that count, in the order written, one in memory at a time.

    `doing` names the work for its progress; None shows none.

    Their `scores` include those of scores.jsonl. Raises `UnreadableRecord`, and `RunDirError` as
    `open_index` and `Scores` do.
    """
    scores = Scores(run_dir)
    with open_index(run_dir) as (index, records):
        counting = index.current_entries()
        if doing is not None:
            counting = track_progress(counting, doing, total=index.written())
        for key, entry in counting:
            yield scores.extend_record(read_record(records, entry.offset, entry.length, key))


class RecordPart(NamedTuple):
    """A part of the records of a run, or all of them."""

    first: int
    """The number of the first record, from 0."""
    are_all: bool
    few: Iterable[Sequence[Record]]
    """The records in batches; see `split_by_size`."""


def split_by_size(items: Iterable[T], length_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split items that stand for records into batches; `length_of` gives the bytes of a record.

    Do each step for a whole batch before the next step: that keeps the code of a step in the
    processor's caches. Record by record, an export takes a third longer.
    """
    few: list[T] = []
    size = 0
    for item in items:
        few.append(item)
        size += length_of(item)
        if size >= _BATCH_BYTES:
            yield few
            few, size = [], 0
    if few:
        yield few


def process_records(
    run_dir: Path,
    do: Callable[[RecordPart], R],
    *,
    doing: str,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[R]:
    """Call `do` with the records of `stored_records`, in one or several parts, in order.

    Returns the results. Large runs are divided among processes; this one then only calls
    `meanwhile`. `doing` names the work for its progress.
    """
    from batch_trajectories.basics.parts import run_in_processes

    scores = Scores(run_dir)
    with open_index(run_dir) as (index, records):
        rows = index.current_rows()
        offsets, lengths = index.places(rows[:])
        numbers = range(len(lengths))

        def do_part(part: Sequence[int], advance: Advance) -> R:
            return do(
                RecordPart(part[0] if part else 0, len(part) == len(lengths), read(part, advance))
            )

        def read_one(number: int) -> Record:
            record = read_record(records, offsets[number], lengths[number], index.key(rows[number]))
            return scores.extend_record(record)

        def read(part: Sequence[int], advance: Advance) -> Iterator[Sequence[Record]]:
            for few in split_by_size(part, lengths.__getitem__):
                yield [*map(read_one, few)]
                advance(len(few))

        size = sum(lengths)
        return run_in_processes(
            numbers, do_part, doing=doing, enough=ENOUGH_BYTES, amount=size, meanwhile=meanwhile
        )
