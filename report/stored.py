"""The records of a run for reading: one at a time, or one of them by its id; writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from batch.errors import EnvironmentStop, RunDirError
from batch.files import refuse_strange_files
from batch.records import Entry, load_index

_HEAD = b'{"id":'
"""How a record begins, see `batch/record.py`: its id can be read without the rest."""

_HEAD_BYTES = 512
_IDS_SHOWN = 10
_LAST_BYTES = 32 << 20


def stored_records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The records that count, in the order in which they were written, one in memory at a time.

    Also while the run goes on: those that end meanwhile are left out. Raises `EnvironmentStop`
    where one has become unreadable.
    """
    with _opened(run_dir) as file:
        for entry in _entries(run_dir):
            yield _read(file, entry)


def last_records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The records that were written last, as many of them as fit into 32 MB.

    One that has become unreadable is left out: the next start of the run deals with it.
    """
    room = _LAST_BYTES
    with _opened(run_dir) as file:
        for entry in load_index(run_dir).latest():
            room -= entry.length
            if room < 0:
                return
            try:
                yield _read(file, entry)
            except EnvironmentStop:
                continue


def stored_entries(run_dir: Path) -> Iterator[tuple[str, Entry]]:
    """The id and the index entry of each record that counts, without reading the record."""
    with _opened(run_dir) as file:
        for entry in _entries(run_dir):
            yield _read_id(file, entry), entry


def find_record(run_dir: Path, wanted: str) -> dict[str, Any]:
    """The record with id `wanted`, or the only one whose id begins with it.

    Of several inputs under one id it is the last. Raises `RunDirError` where there is none.
    """
    exact: Entry | None = None
    longer: dict[str, Entry] = {}
    for record_id, entry in stored_entries(run_dir):
        if record_id == wanted:
            exact = entry
        elif record_id.startswith(wanted):
            longer[record_id] = entry
    if exact is None:
        if len(longer) != 1:
            raise RunDirError(_not_found(run_dir, wanted, longer))
        (exact,) = longer.values()
    with _opened(run_dir) as file:
        return _read(file, exact)


def _not_found(run_dir: Path, wanted: str, longer: dict[str, Entry]) -> str:
    if not longer:
        return (
            f"{run_dir}: no record has the id {wanted!r}, or one that begins so. Ids stand in the "
            "training file and in the report; a conversation has a record once it has ended."
        )
    shown = ", ".join(list(longer)[:_IDS_SHOWN])
    more = f" and {len(longer) - _IDS_SHOWN:,} more" if len(longer) > _IDS_SHOWN else ""
    return f"{run_dir}: {wanted!r} is the beginning of several ids: {shown}{more}; give one whole"


def _entries(run_dir: Path) -> list[Entry]:
    return sorted(load_index(run_dir).values(), key=attrgetter("offset"))


def _opened(run_dir: Path) -> BinaryIO:
    refuse_strange_files(run_dir)
    try:
        return (run_dir / "records.jsonl").open("rb")
    except FileNotFoundError:
        return Path(os.devnull).open("rb")  # the run has not begun; its index is empty too


def _read(file: BinaryIO, entry: Entry) -> dict[str, Any]:
    file.seek(entry.offset)
    try:
        record: dict[str, Any] = orjson.loads(file.read(entry.length))
    except orjson.JSONDecodeError as error:
        raise _unreadable(file, entry) from error
    return record


def _read_id(file: BinaryIO, entry: Entry) -> str:
    """The id alone, from the first bytes where it fits in there."""
    head = os.pread(file.fileno(), min(_HEAD_BYTES, entry.length), entry.offset)
    end = head.find(b'","status":', len(_HEAD))
    if head.startswith(_HEAD + b'"') and end >= 0:
        try:
            return str(orjson.loads(head[len(_HEAD) : end + 1]))
        except orjson.JSONDecodeError:
            pass  # the id itself holds what looks like its end
    return str(_read(file, entry)["id"])


def _unreadable(file: BinaryIO, entry: Entry) -> EnvironmentStop:
    return EnvironmentStop(
        f"{file.name}: the record at byte {entry.offset} is unreadable. Run the command of the run "
        "again: it sets the record aside and runs its task again."
    )
