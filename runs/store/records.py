"""`records.jsonl`, the checkpoint of a run: one finished trajectory per line, only appended.

Beside it lies `records.idx` (see `runs.store.index`), derived and never trusted beyond what it
covers: it is read where it fits the records, extended where it is behind, and rebuilt where it is
missing or wrong. The last record of a task counts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import orjson

from runs.errors import EnvironmentStop, RunDirError
from runs.store.checksum import DamagedLine, read_object
from runs.store.files import (
    AppendFile,
    repair_tail,
    set_aside,
    storage_error,
    sync_directory,
    temporary_for,
)
from runs.store.index import MARK, ROW_BYTES, Index, RowMaker, mark_for, right_rows
from runs.store.index import IndexEntry as IndexEntry
from runs.store.index import index_fields as index_fields

_READ_AHEAD = 1 << 20
_WRITE_BEHIND = 1 << 16


HEAD = b'{"id":'
"""How a record begins, see `runs/record.py`: its id can be read without the rest."""
AFTER_ID = b'","status":'


class UnreadableRecord(EnvironmentStop):
    """In the place of a record lies something else."""


class RecordFile:
    """The records of one run, open for appending. One process at a time."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        """Open both files, after repairing what a crash left of them. Raises `StorageError`."""
        records, index = run_dir / "records.jsonl", run_dir / "records.idx"
        repair_tail(records, quarantine)
        self.unreadable = _bring_index_up_to_date(records, index, quarantine)
        """The lines that were set aside, as `records.jsonl:7`."""
        rows = index.read_bytes()
        self._found: Index | None = Index(rows)
        self._maker = RowMaker(rows)
        self._records = AppendFile(records)
        self._index = _IndexFile(index, rows)
        self._rows = bytearray()

    def take_found(self) -> Index:
        """The records that were there. Once: a million of them take some 70 MB."""
        found, self._found = self._found, None
        assert found is not None
        return found

    def append(self, record: bytes, fields: list[Any]) -> None:
        """Append one record line; `sync` makes it survive a power loss.

        `fields` are the `index_fields` of the record. Raises `StorageError`.
        """
        offset = self._records.size
        self._records.append(record)
        self._rows += self._maker.rows(fields, offset, len(record))
        if len(self._rows) >= _WRITE_BEHIND:
            self._write_rows()

    def sync(self) -> None:
        """Make all appended records survive a power loss. The index can be derived again."""
        self._records.check_is_there()
        self._records.sync()
        self._write_rows()

    def close(self) -> None:
        """Close both files."""
        self._records.close()
        self._index.close()

    def _write_rows(self) -> None:
        rows, self._rows = bytes(self._rows), bytearray()
        self._index.append(rows)


class _IndexFile:
    """An index, open for appending, whose row 0 tells the checksum of all before."""

    def __init__(self, path: Path, rows: bytes) -> None:
        """`rows` are what the file holds."""
        self._file = AppendFile(path)
        self._checksum = crc32(memoryview(rows)[ROW_BYTES:])
        try:
            # What is open for appending can be written at its end alone.
            self._mark_fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            raise storage_error(path, error) from error
        self._write_mark()

    def append(self, rows: bytes) -> None:
        """Append rows. Raises `StorageError`."""
        if rows:
            self._file.append(rows)
            self._checksum = crc32(rows, self._checksum)
            # After the rows: those that it does not speak of yet are made from the records again.
            self._write_mark()

    def close(self) -> None:
        """Close the file."""
        os.close(self._mark_fd)
        self._file.close()

    def _write_mark(self) -> None:
        try:
            os.pwrite(self._mark_fd, mark_for(self._file.size, self._checksum), 0)
        except OSError as error:
            raise storage_error(self._file.path, error) from error


def unreadable_record(
    records: BinaryIO, offset: int, line: bytes, error: Exception | None = None
) -> UnreadableRecord:
    """What to say of the line at a place in the records, and what to do next.

    `error` is what the caller met when it read the line.
    """
    try:
        read_line(line)
    except DamagedLine as damage:
        error = damage
    why = str(error) if isinstance(error, DamagedLine) else "it does not hold what a record holds"
    named = id_in(line)
    of_id = f" ({named!r})" if named else ""
    return UnreadableRecord(
        f"{records.name}:{_line_number(records, offset)}: the record{of_id} is unreadable: {why}. "
        "`verify --repair` sets it aside, and the next start of the run does its task again."
    )


def id_in(line: bytes) -> str:
    """The id of a record that may be damaged, as far as it can be told; else ""."""
    end = line.find(AFTER_ID, len(HEAD))
    try:
        return str(orjson.loads(line[len(HEAD) : end + 1])) if end >= 0 else ""
    except orjson.JSONDecodeError:
        return ""


def _line_number(records: BinaryIO, offset: int) -> int:
    """Which line begins at `offset`, from 1."""
    number, place = 1, 0
    while place < offset:
        block = os.pread(records.fileno(), min(_READ_AHEAD, offset - place), place)
        if not block:
            break
        number += block.count(b"\n")
        place += len(block)
    return number


def refuse_lost_records(run_dir: Path) -> None:
    """Raise `RunDirError` if all records are gone that the index tells of.

    The run would ask, and pay, for all of it again, and an export would empty the training file.
    """
    records, index = run_dir / "records.jsonl", run_dir / "records.idx"
    # In this order: a run that works beside us writes the record first, and then its row.
    if _size(index) > ROW_BYTES and _size(records) == 0:
        msg = (
            f"{records}: {'empty' if records.exists() else 'missing'}, but {index.name} tells of "
            "records that it held; put the file of this run back in its place, or remove "
            f"{index.name} to go on without them"
        )
        raise RunDirError(msg)


def load_index(run_dir: Path, *, lenient: bool = True) -> Index:
    """All records of a run by task key, the last one of each task; writes nothing.

    What the index does not cover yet is read from the records themselves. Raises
    `UnreadableRecord` where that cannot be done; `lenient` leaves such a record out.
    """
    records = run_dir / "records.jsonl"
    rows, covered = _read_rows(run_dir / "records.idx", records)
    behind = bytearray()
    maker = RowMaker(rows)
    for offset, line in lines_from(records, covered):
        if (record := parse_record(line)) is not None:
            behind += maker.rows(index_fields(record), offset, len(line))
        elif not lenient:
            with records.open("rb") as file:
                raise unreadable_record(file, offset, line)
    return Index(rows + behind if behind else rows)


def _read_rows(index: Path, records: Path) -> tuple[bytes, int]:
    """The rows of the index as far as they are right, and how much of the records they cover."""
    try:
        content = index.read_bytes()
    except FileNotFoundError:
        return MARK, 0
    right, covered = right_rows(content, _size(records))
    rows = content if right == len(content) else content[:right]
    return (rows, covered) if right and _speaks_of(records, rows, covered) else (MARK, 0)


def _speaks_of(records: Path, rows: bytes, covered: int) -> bool:
    """Whether the last row says what its record does: the records may be others than they were."""
    if len(rows) == ROW_BYTES:
        return covered == 0
    last = Index(rows).entry(len(rows) // ROW_BYTES - 1)
    with records.open("rb") as file:
        file.seek(last.offset)
        line = file.read(last.length)
    record = parse_record(line)
    return (
        record is not None
        and line.endswith(b"\n")
        and rows.endswith(RowMaker(rows).rows(index_fields(record), last.offset, last.length))
    )


def _bring_index_up_to_date(records: Path, index: Path, quarantine: Path) -> list[str]:
    """Cut the index to what is right and append what it lacks; name the unreadable records.

    Unreadable lines of the records are set aside, named by line, and left out of the file.
    """
    rows, covered = _read_rows(index, records)
    if covered:
        os.truncate(index, len(rows))
    else:
        index.unlink(missing_ok=True)
    unreadable = set()
    file = AppendFile(index)
    try:
        behind = bytearray(b"" if covered else MARK)
        maker = RowMaker(rows)
        for offset, line in lines_from(records, covered):
            record = parse_record(line)
            if record is None:
                unreadable.add(offset)
                continue
            behind += maker.rows(index_fields(record), offset, len(line))
            if len(behind) >= _WRITE_BEHIND:
                file.append(bytes(behind))
                behind.clear()
        file.append(bytes(behind))
    finally:
        file.close()
    if unreadable:
        index.unlink()  # first, for it would speak of other bytes
        named = take_out(records, unreadable, quarantine)
        _bring_index_up_to_date(records, index, quarantine)
        return named
    return []


def take_out(records: Path, offsets: Collection[int], quarantine: Path) -> list[str]:
    """Rewrite the records without the lines at these offsets, each kept in the quarantine.

    Gives their names, as `records.jsonl:7`.
    """
    named = []
    replacement = temporary_for(records)
    replacement.unlink(missing_ok=True)
    kept = AppendFile(replacement)
    for number, (offset, line) in enumerate(lines_from(records, 0), start=1):
        if offset in offsets:
            set_aside(quarantine, f"{records.name}.line{number}", line)
            named.append(f"{records.name}:{number}")
        else:
            kept.append(line)
    kept.sync()
    kept.close()
    replacement.replace(records)
    sync_directory(records.parent)
    return named


def lines_from(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from `offset` on; a torn last line is left out."""
    try:
        file = path.open("rb", buffering=_READ_AHEAD)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def read_line(line: bytes) -> dict[str, Any]:
    """The record of one line. Raises `DamagedLine` where it is not what was written."""
    return read_object(line)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of one line, None where it is not whole."""
    try:
        record = read_line(line)
        RowMaker().rows(index_fields(record), 0, len(line))
        texts = isinstance(record["id"], str) and isinstance(record["input_digest"], str)
        whole = texts and isinstance(record["messages"], list) and isinstance(record["tools"], list)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
