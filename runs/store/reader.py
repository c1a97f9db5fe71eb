"""The records of a run, read one by one from where the index says they lie; writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from runs.store.checksum import DamagedLine
from runs.store.files import refuse_strange_files
from runs.store.index import Index
from runs.store.records import AFTER_ID, HEAD, load_index, read_line, unreadable_record
from runs.tasks import task_key

_DIGEST = b',"input_digest":"'
_HEAD_BYTES = 512


class Stored(NamedTuple):
    """A record, and the line that it was read from."""

    record: dict[str, Any]
    line: bytes


@contextmanager
def open_records(run_dir: Path) -> Iterator[BinaryIO]:
    """The file of records; where there is none yet, one that holds nothing."""
    path = run_dir / "records.jsonl"
    with (path if path.exists() else Path(os.devnull)).open("rb") as records:
        yield records


def read_record(records: BinaryIO, offset: int, length: int, key: bytes) -> Stored:
    """The record of the task with this key, which lies at this place.

    Raises `UnreadableRecord`.
    """
    line = os.pread(records.fileno(), length, offset)
    try:
        record = read_line(line)
        if task_key(record["id"], record["input_digest"]) != key:
            msg = "the index says that another record lies here"
            raise DamagedLine(msg)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable_record(records, offset, line, error) from error
    return Stored(record, line)


def read_id(records: BinaryIO, offset: int, length: int, key: bytes) -> str:
    """The id of the record of a task, from its first bytes where these prove it.

    Raises `UnreadableRecord`.
    """
    head = os.pread(records.fileno(), min(_HEAD_BYTES, length), offset)
    digest = head.find(_DIGEST)
    try:
        found = str(orjson.loads(head[len(HEAD) : head.index(AFTER_ID, len(HEAD)) + 1]))
        first = digest + len(_DIGEST)
        if digest > 0 and task_key(found, head[first : head.index(b'"', first)].decode()) == key:
            return found
    except ValueError:
        pass  # the id itself holds what looks like its end, or the head is too short
    return str(read_record(records, offset, length, key).record["id"])


@contextmanager
def looking_at(run_dir: Path, *, lenient: bool = False) -> Iterator[tuple[Index, BinaryIO]]:
    """The index of a run, which may go on meanwhile, and the file of the records that it names.

    Raises `RunDirError` where a file of the run is no plain one, and what `load_index` raises.
    """
    refuse_strange_files(run_dir)
    index = load_index(run_dir, lenient=lenient)
    with open_records(run_dir) as records:
        yield index, records


def stored_records(run_dir: Path) -> Iterator[Stored]:
    """The records that count, in the order in which they were written, one in memory at a time.

    Raises `UnreadableRecord`, and `RunDirError` as `looking_at` does.
    """
    with looking_at(run_dir) as (index, records):
        for key, entry in index.counting():
            yield read_record(records, entry.offset, entry.length, key)
