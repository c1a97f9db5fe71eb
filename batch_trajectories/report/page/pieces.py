"""The data of a report: inside the page if it is small, else in files beside it.

    report_files/rows.js       the rows of the table, some thousand per line
    report_files/chunk-0.js    whole records, loaded when one of them is opened
    report_files/chunk-1.js …

Several processes can each collect a part; the number of the first record of a part is that of its
first chunk, so all chunks have different numbers.

A page that was opened from disk may not fetch files but may load scripts. So each file is a script
that passes its data to the page: reportData(report, kind, number, String.raw`JSON`).
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics import exact_json
from batch_trajectories.runs.store.files import make_directory, open_temporary

INLINE_BYTES = 4 << 20
"""The maximum of data inside the page itself."""

_CHUNK_BYTES = 512 << 10
_ROWS_BYTES = 1 << 20


class Collected(NamedTuple):
    """What `Pieces` has collected."""

    rows: bytes
    records: bytes
    """Both as JSON lists for the page; empty lists if they are in files."""
    row_pieces: int
    """0 if they are in the page."""
    rows_file: Path


class Pieces:
    """Collects rows and records of a report; keeps at most one piece in memory."""

    def __init__(self, directory: Path, report_id: str, *, inline_bytes: int, first: int) -> None:
        """`put_in_place` will put the files into `directory`.

        `first` is the number of the first record; more than `inline_bytes` goes to files.
        """
        self._directory = directory
        self._temporary = temporary_of(directory)
        self._report_id = report_id
        self._inline_bytes = inline_bytes
        self._is_inline = True
        self._rows_file = self._temporary / f"rows-{first}.js"
        self._rows: list[bytes] = []
        self._records: list[bytes] = []
        self._rows_size = self._records_size = 0
        self._row_pieces = 0
        self._chunk = first

    def add(self, row: dict[str, Any], record: bytes) -> None:
        """Add a trajectory; `record` is its JSON. Adds the place of its record to the row."""
        line = exact_json.dumps([*row.values(), self._chunk, len(self._records)])
        self._rows.append(line)
        self._records.append(record)
        self._rows_size += len(line)
        self._records_size += len(record)
        if self._is_inline and self._rows_size + self._records_size > self._inline_bytes:
            self._is_inline = False
            self._temporary.mkdir(mode=0o700, exist_ok=True)
        if not self._is_inline:
            if self._records_size >= _CHUNK_BYTES:
                self._write_records()
            if self._rows_size >= _ROWS_BYTES:
                self._write_rows()

    def finish(self) -> Collected:
        """Write what is left; the files are still temporary."""
        if not self._is_inline:
            self._write_records()
            self._write_rows()
        rows, records = _listed(self._rows), _listed(self._records)
        return Collected(rows, records, self._row_pieces, self._rows_file)

    def _write_records(self) -> None:
        if self._records:
            path = self._temporary / f"chunk-{self._chunk}.js"
            self._write(path, "chunk", self._chunk, self._records)
            self._chunk += 1
            self._records, self._records_size = [], 0

    def _write_rows(self) -> None:
        if self._rows:
            self._write(self._rows_file, "rows", self._row_pieces, self._rows)
            self._row_pieces += 1
            self._rows, self._rows_size = [], 0

    def _write(self, path: Path, kind: str, number: int, items: list[bytes]) -> None:
        # As a string to parse: in a JavaScript literal, a key __proto__ would not be data. A raw
        # string ends at a backtick and begins a value at ${, which JSON has only inside strings.
        json = _listed(items).replace(b"`", b"\\u0060").replace(b"$", b"\\u0024")
        head = f'reportData("{self._report_id}", "{kind}", {number}, String.raw`'
        call = b"".join((head.encode(), json, b"`);\n"))
        if path.exists():
            with path.open("ab") as file:
                file.write(call)
            return
        with open_temporary(path, self._directory / path.name) as file:
            file.write(call)


def temporary_of(directory: Path) -> Path:
    """Where files are until they are put into `directory`."""
    return directory.with_name(f"{directory.name}.part")


def put_in_place(directory: Path, parts: Sequence[Collected]) -> None:
    """Replace the files in `directory` by those of all parts, in order; only remove them if there
    are no new ones."""
    remove_files(directory)
    written = [part.rows_file for part in parts if part.row_pieces]
    if not written:
        return
    first, *others = written
    with first.open("ab") as rows:
        for other in others:
            with other.open("rb") as file:
                shutil.copyfileobj(file, rows)
            other.unlink()
    make_directory(directory)
    first.rename(first.with_name("rows.js"))
    for path in temporary_of(directory).iterdir():
        path.replace(directory / path.name)


def remove_files(directory: Path) -> None:
    """Remove the files of an earlier report; other files stay."""
    for pattern in ("rows.js", "chunk-*.js"):
        for path in directory.glob(pattern):
            path.unlink()
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _listed(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"
