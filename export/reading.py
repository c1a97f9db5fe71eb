"""The records of a run, read one by one from where the index says they lie."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from batch.errors import EnvironmentStop
from batch.prompts import task_key


class Stored(NamedTuple):
    """A record, and the line that it was read from."""

    record: dict[str, Any]
    line: bytes


@contextmanager
def open_records(run_dir: Path) -> Iterator[BinaryIO | None]:
    """The file of records, None where there is none yet."""
    try:
        file = (run_dir / "records.jsonl").open("rb")
    except FileNotFoundError:
        yield None
        return
    with file:
        yield file


def read_record(records: BinaryIO | None, offset: int, length: int, key: bytes) -> Stored:
    """The record of the task with this key, which lies at this place.

    Raises `EnvironmentStop` where it has become unreadable.
    """
    if records is None:
        msg = "records.jsonl vanished while it was read"
        raise OSError(msg)
    line = os.pread(records.fileno(), length, offset)
    try:
        record: dict[str, Any] = orjson.loads(line)
        if task_key(record["id"], record["input_digest"]) != key:
            raise ValueError(offset)
    except (ValueError, TypeError, KeyError) as error:
        # Without its index the file is read whole at the next start, and what is unreadable in
        # it is set aside.
        Path(records.name).with_suffix(".idx").unlink(missing_ok=True)
        msg = (
            f"{records.name}: the record at byte {offset} is unreadable. Run the same "
            "command again: it sets the record aside and runs its task again."
        )
        raise EnvironmentStop(msg) from error
    return Stored(record, line)
