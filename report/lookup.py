"""The records of a run for looking at: those that were written last, or one of them by its id."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from runs.errors import RunDirError
from runs.store.index import IndexEntry
from runs.store.reader import looking_at, read_id, read_record
from runs.store.records import UnreadableRecord

_IDS_SHOWN = 10
_LAST_BYTES = 32 << 20


def last_records(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The records that were written last, as many of them as fit into 32 MB.

    One that has become unreadable is left out: the next start of the run deals with it.
    """
    room = _LAST_BYTES
    with looking_at(run_dir, lenient=True) as (index, records):
        for key, entry in index.latest():
            room -= entry.length
            if room < 0:
                return
            try:
                yield read_record(records, entry.offset, entry.length, key).record
            except UnreadableRecord:
                continue


def stored_entries(run_dir: Path) -> Iterator[tuple[str, IndexEntry]]:
    """The id and the index entry of each record that counts, without reading the record.

    Raises `UnreadableRecord` where no such record lies in its place.
    """
    with looking_at(run_dir) as (index, records):
        for key, entry in index.counting():
            yield read_id(records, entry.offset, entry.length, key), entry


def last_entries(run_dir: Path, most: int | None) -> tuple[list[tuple[str, IndexEntry]], int]:
    """The id and the index entry of `most` records, or of all, those that were written last first.

    Then how many there are. Of a record that has become unreadable the id is "".
    """
    found: list[tuple[str, IndexEntry]] = []
    with looking_at(run_dir) as (index, records):
        for key, entry in islice(index.latest(), most):
            try:
                found.append((read_id(records, entry.offset, entry.length, key), entry))
            except UnreadableRecord:
                found.append(("", entry))
        return found, len(index)


def find_record(run_dir: Path, wanted: str) -> dict[str, Any]:
    """The record with id `wanted`, or the only one whose id begins with it.

    Of several inputs under one id it is the last. Raises `RunDirError` where there is none.
    """
    exact: tuple[bytes, IndexEntry] | None = None
    longer: dict[str, tuple[bytes, IndexEntry]] = {}
    with looking_at(run_dir) as (index, records):
        for key, entry in index.counting():
            record_id = read_id(records, entry.offset, entry.length, key)
            if record_id == wanted:
                exact = key, entry
            elif record_id.startswith(wanted):
                longer[record_id] = key, entry
        if exact is None:
            if len(longer) != 1:
                raise RunDirError(_not_found(run_dir, wanted, list(longer)))
            (exact,) = longer.values()
        key, entry = exact
        return read_record(records, entry.offset, entry.length, key).record


def _not_found(run_dir: Path, wanted: str, longer: list[str]) -> str:
    if not longer:
        return (
            f"{run_dir}: no record has the id {wanted!r}, or one that begins so. Ids stand in the "
            "training file and in the report; a conversation has a record once it has ended."
        )
    shown = ", ".join(longer[:_IDS_SHOWN])
    more = f" and {len(longer) - _IDS_SHOWN:,} more" if len(longer) > _IDS_SHOWN else ""
    return f"{run_dir}: {wanted!r} is the beginning of several ids: {shown}{more}; give one whole"
