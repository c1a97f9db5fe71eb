"""The records of a run, read one by one from where the index says they lie; writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from batch.errors import EnvironmentStop
from batch.files import refuse_strange_files
from batch.index import Index
from batch.prompts import task_key
from batch.records import load_index


class Stored(NamedTuple):
    """A record, and the line that it was read from."""

    record: dict[str, Any]
    line: bytes


class UnreadableRecord(EnvironmentStop):
    """In the place of a record lies something else."""


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
        record: dict[str, Any] = orjson.loads(line)
        if task_key(record["id"], record["input_digest"]) != key:
            raise ValueError(offset)
    except (ValueError, TypeError, KeyError) as error:
        msg = (
            f"{records.name}: the record at byte {offset} is unreadable. `verify --repair` sets "
            "it aside, and the next start of the run does its task again."
        )
        raise UnreadableRecord(msg) from error
    return Stored(record, line)


@contextmanager
def looking_at(run_dir: Path) -> Iterator[tuple[Index, BinaryIO]]:
    """The index of a run, which may go on meanwhile, and the file of the records that it names.

    Raises `RunDirError` where a file of the run is no plain one.
    """
    refuse_strange_files(run_dir)
    index = load_index(run_dir)
    with open_records(run_dir) as records:
        yield index, records


def stored_records(run_dir: Path) -> Iterator[Stored]:
    """The records that count, in the order in which they were written, one in memory at a time.

    Raises `UnreadableRecord`, and `RunDirError` as `looking_at` does.
    """
    with looking_at(run_dir) as (index, records):
        for key, entry in index.counting():
            yield read_record(records, entry.offset, entry.length, key)
