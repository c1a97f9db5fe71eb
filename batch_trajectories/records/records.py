"""`records.jsonl`, the checkpoint of a run: one finished trajectory per line, only appended.

`records.idx` (see `records.index`) is derived from it: used as far as it matches the records,
extended if it is behind, and rebuilt if it is missing or wrong. The last record of a task counts.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import EnvironmentStop, RunDirError
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    StorageError,
    open_no_follow,
    repair_command,
    repair_tail,
    set_aside,
    storage_error,
    sync_directory,
    temporary_path,
)
from batch_trajectories.records.index import (
    MARK,
    ROW_BYTES,
    Index,
    IndexFields,
    RowMaker,
    index_fields,
    make_mark,
    valid_rows,
)
from batch_trajectories.records.names import RECORDS_FILE, RECORDS_INDEX
from batch_trajectories.records.record_types import Record, decode_record

_READ_AHEAD = 1 << 20
_WRITE_BEHIND = 1 << 16
"""Bytes of rows that are held in memory before they are written; the records can restore them."""

HEAD = b'{"id":'
"""The beginning of a record (`engine/record.py`): its id can be read without the rest."""
AFTER_ID = b'","status":'
"""The text that follows the id in a record."""


class UnreadableRecord(EnvironmentStop):
    """A record is damaged, or another line is at its offset."""


class RecordFile:
    """The records of one run, open for appending. One process at a time."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        """Open both files, after repairing damage by a crash. Raises `StorageError`."""
        records, index = run_dir / RECORDS_FILE, run_dir / RECORDS_INDEX
        repair_tail(records, quarantine)
        self.unreadable = _update_index(records, index, quarantine)
        """Lines that were set aside, as `records.jsonl:7`."""
        rows = index.read_bytes()
        self._earlier: Index | None = Index(rows)
        self._maker = RowMaker(rows)
        self._records = AppendFile(records)
        try:
            self._index = _IndexFile(index, rows)
        except BaseException:
            self._records.close()
            raise
        self._rows = bytearray()

    def take_index(self) -> Index:
        """The records of earlier starts. Call it once: a million records take some 70 MB."""
        entries, self._earlier = self._earlier, None
        assert entries is not None
        return entries

    def add(self, record: Record) -> None:
        """Append a record, as `append` does."""
        self.append(record.line, index_fields(record))

    def append(self, line: bytes, fields: IndexFields) -> None:
        """Append the line of a record; `fields` are its facts for the index.

        The line survives a kill of this process, and after `sync` also a power loss. Raises
        `StorageError`.
        """
        offset = self._records.size
        self._records.append(line)
        self._rows += self._maker.rows(fields, offset, len(line))
        if len(self._rows) >= _WRITE_BEHIND:
            self._write_rows()

    def sync(self) -> None:
        """Make all appended records survive a power loss. The index can be rebuilt."""
        try:
            self._records.check_exists()
        except StorageError:
            # The rows name the lost records, so the next start refuses instead of paying again.
            self._write_rows()
            raise
        self._records.sync()
        self._write_rows()

    def close(self) -> None:
        """Close both files."""
        try:
            self._records.close()
        finally:
            self._index.close()

    def _write_rows(self) -> None:
        rows, self._rows = bytes(self._rows), bytearray()
        self._index.append(rows)


class _IndexFile:
    """An index, open for appending; row 0 has the checksum of the rows."""

    def __init__(self, path: Path, rows: bytes) -> None:
        """`rows` are the content of the file."""
        self._checksum = crc32(memoryview(rows)[ROW_BYTES:])
        with ExitStack() as stack:
            self._file = stack.enter_context(closing(AppendFile(path)))
            try:
                # A descriptor for appending cannot write at the beginning.
                self._mark_fd = open_no_follow(path, os.O_WRONLY)
            except OSError as error:
                raise storage_error(path, error) from error
            stack.callback(os.close, self._mark_fd)
            self._write_mark()
            stack.pop_all()

    def append(self, rows: bytes) -> None:
        """Append rows. Raises `StorageError`."""
        if rows:
            self._file.append(rows)
            self._checksum = crc32(rows, self._checksum)
            # After the rows: rows beyond the size in row 0 are made again from the records.
            self._write_mark()

    def close(self) -> None:
        """Close the file."""
        os.close(self._mark_fd)
        self._file.close()

    def _write_mark(self) -> None:
        try:
            os.pwrite(self._mark_fd, make_mark(self._file.size, self._checksum), 0)
        except OSError as error:
            raise storage_error(self._file.path, error) from error


def unreadable_record(
    records: BinaryIO, offset: int, line: bytes, error: Exception | None = None
) -> UnreadableRecord:
    """The error for a line of the records, with what to do next.

    `error` is what reading it as a record raised.
    """
    try:
        decode_record(line)
    except DamagedLine as damage:
        error = damage
    why = str(error) if isinstance(error, DamagedLine) else "it lacks fields of a record"
    record_id = read_id(line)
    of_id = f" ({record_id!r})" if record_id else ""
    return UnreadableRecord(
        f"{records.name}:{_line_number(records, offset)}: the record{of_id} is unreadable: {why}. "
        f"{repair_command(records.name)} sets it aside, and the next start runs its task again."
    )


def read_id(line: bytes) -> str:
    """The id of a record that may be damaged; "" if it is unreadable."""
    end = line.find(AFTER_ID, len(HEAD))
    try:
        return str(orjson.loads(line[len(HEAD) : end + 1])) if end >= 0 else ""
    except orjson.JSONDecodeError:
        return ""


def _line_number(records: BinaryIO, offset: int) -> int:
    """The number, from 1, of the line that begins at `offset`."""
    number, place = 1, 0
    while place < offset:
        block = os.pread(records.fileno(), min(_READ_AHEAD, offset - place), place)
        if not block:
            break
        number += block.count(b"\n")
        place += len(block)
    return number


def refuse_lost_records(run_dir: Path) -> None:
    """Raise `RunDirError` if the index has records but records.jsonl is empty or missing.

    The run would do, and pay for, all work again, and an export would empty the training file.
    """
    records, index = run_dir / RECORDS_FILE, run_dir / RECORDS_INDEX
    # In this order: a run in progress writes the record first, then its row.
    if _size(index) > ROW_BYTES and _size(records) == 0:
        raise RunDirError(
            f"{records}: {'empty' if records.exists() else 'missing'}, but {index.name} names "
            "records that it held; put the file of this run back, or remove "
            f"{index.name} to continue without them"
        )


def load_index(run_dir: Path, *, lenient: bool = True) -> Index:
    """All records of a run by task key, the last one of each task; writes nothing.

    Reads records that the index does not cover from records.jsonl. Raises `UnreadableRecord`
    for damaged ones; if `lenient`, skips them.
    """
    records = run_dir / RECORDS_FILE
    rows, covered = _read_rows(run_dir / RECORDS_INDEX, records)
    missing_rows = bytearray()
    maker = RowMaker(rows)
    for offset, line in track_lines(records, covered):
        if (record := parse_record(line)) is not None:
            missing_rows += maker.rows(index_fields(record), offset, len(line))
        elif not lenient:
            with records.open("rb") as file:
                raise unreadable_record(file, offset, line)
    return Index(rows + missing_rows if missing_rows else rows)


def _read_rows(index: Path, records: Path) -> tuple[bytes, int]:
    """The valid rows of the index, and how many bytes of the records they cover."""
    try:
        content = index.read_bytes()
    except FileNotFoundError:
        return MARK, 0
    size, covered = valid_rows(content, _size(records))
    rows = content if size == len(content) else content[:size]
    return (rows, covered) if size and _matches_last_record(rows, records, covered) else (MARK, 0)


def _matches_last_record(rows: bytes, records: Path, covered: int) -> bool:
    """Whether the last row matches its record: records.jsonl may have been replaced."""
    if len(rows) == ROW_BYTES:
        return covered == 0
    last = Index(rows).entry(len(rows) // ROW_BYTES - 1)
    with records.open("rb") as file:
        file.seek(last.offset)
        line = file.read(last.length)
    try:
        row = RowMaker(rows).rows(index_fields(decode_record(line)), last.offset, last.length)
    except ValueError:  # damaged, or a number is out of the index's range
        return False
    return line.endswith(b"\n") and rows.endswith(row)


def _update_index(records: Path, index: Path, quarantine: Path) -> list[str]:
    """Cut the index to its valid rows and append missing ones.

    Moves unreadable records to the quarantine, and returns their names.
    """
    rows, covered = _read_rows(index, records)
    if covered:
        os.truncate(index, len(rows))
    else:
        index.unlink(missing_ok=True)
    unreadable = set()
    file = AppendFile(index)
    try:
        missing_rows = bytearray(b"" if covered else MARK)
        maker = RowMaker(rows)
        for offset, line in track_lines(records, covered):
            record = parse_record(line)
            if record is None:
                unreadable.add(offset)
                continue
            missing_rows += maker.rows(index_fields(record), offset, len(line))
            if len(missing_rows) >= _WRITE_BEHIND:
                file.append(bytes(missing_rows))
                missing_rows.clear()
        file.append(bytes(missing_rows))
    finally:
        file.close()
    if unreadable:
        index.unlink()  # first: its offsets will be wrong
        names = quarantine_lines(records, unreadable, quarantine)
        _update_index(records, index, quarantine)
        return names
    return []


def quarantine_lines(records: Path, offsets: Collection[int], quarantine: Path) -> list[str]:
    """Move the lines at these offsets to the quarantine; return their names, as
    `records.jsonl:7`."""
    names = []
    replacement = temporary_path(records)
    replacement.unlink(missing_ok=True)
    with closing(AppendFile(replacement)) as replacement_file:
        for number, (offset, line) in enumerate(read_lines(records, 0), start=1):
            if offset in offsets:
                set_aside(quarantine, f"{records.name}.line{number}", line)
                names.append(f"{records.name}:{number}")
            else:
                replacement_file.append(line)
        replacement_file.sync()
    replacement.replace(records)
    sync_directory(records.parent)
    return names


def read_lines(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Yield offset and content of each whole line from `offset` on; skip a torn last line."""
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


def track_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of `read_lines`, and show progress."""
    with LongWork(f"reading {path.name}", total=_size(path) - offset, unit="B") as work:
        for place, line in read_lines(path, offset):
            yield place, line
            work.advance(len(line))


def parse_record(line: bytes) -> Record | None:
    """The record of one line, None if it is not whole or a field has another type."""
    try:
        record = decode_record(line)
        RowMaker().rows(index_fields(record), 0, len(line))
    except ValueError:
        return None
    return record


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
