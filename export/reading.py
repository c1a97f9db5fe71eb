"""The records of a run, read one by one from where the index says they lie."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from batch.errors import EnvironmentStop


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


def read_record(records: BinaryIO | None, offset: int, length: int, task_id: str) -> Stored:
    """The record of a task. Raises `EnvironmentStop` where it has become unreadable."""
    return _read(records, offset, length, lambda record: record["id"] == task_id)


def read_any_record(records: BinaryIO | None, offset: int, length: int) -> Stored:
    """The record that lies at a place. Raises `EnvironmentStop` too."""
    return _read(records, offset, length, lambda record: "id" in record)


def _read(
    records: BinaryIO | None, offset: int, length: int, is_it: Callable[[Any], bool]
) -> Stored:
    if records is None:
        msg = "records.jsonl vanished while it was read"
        raise OSError(msg)
    line = os.pread(records.fileno(), length, offset)
    try:
        record: dict[str, Any] = orjson.loads(line)
        if not is_it(record):
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
