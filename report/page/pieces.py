"""The data of a report: inside the page if it is small, else in files beside it.

    report_files/rows.js       the rows of the table, some thousand per line
    report_files/chunk-0.js    whole records, loaded when one of them is opened
    report_files/chunk-1.js …

A page that was opened from disk may not fetch files but may load scripts. So each file is a script
that passes its data to the page: `reportData(report, kind, number, json)`.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import orjson

from runs.store.files import make_directory, open_temporary
from toolsets import exact_json

INLINE_BYTES = 4 << 20
"""The maximum of data inside the page itself."""

_CHUNK_BYTES = 512 << 10
_ROWS_BYTES = 1 << 20


class Pieces:
    """Collects the rows and records of a report; keeps at most one piece in memory."""

    def __init__(self, directory: Path, report_id: str, *, inline_bytes: int) -> None:
        """`finish` puts the files into `directory`."""
        self._directory = directory
        self._temporary = directory.with_name(f"{directory.name}.part")
        self._report_id = report_id
        self._inline_bytes = inline_bytes
        self._is_inline = True
        self._rows: list[bytes] = []
        self._records: list[bytes] = []
        self._rows_size = self._records_size = 0
        self._row_pieces = 0
        self._chunks = 0

    def add(self, row: dict[str, Any], record: bytes) -> None:
        """Add a trajectory; `record` is its JSON. Adds the place of its record to the row."""
        line = exact_json.dumps([*row.values(), self._chunks, len(self._records)])
        self._rows.append(line)
        self._records.append(record)
        self._rows_size += len(line)
        self._records_size += len(record)
        if self._is_inline and self._rows_size + self._records_size > self._inline_bytes:
            self._is_inline = False
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary.mkdir(mode=0o700)
        if not self._is_inline:
            if self._records_size >= _CHUNK_BYTES:
                self._write_records()
            if self._rows_size >= _ROWS_BYTES:
                self._write_rows()

    def finish(self) -> tuple[bytes, bytes, int]:
        """Put the files in place; return rows and records for the page, and the pieces of rows.

        Rows and records are `[]` if they are in files; else the number of pieces is 0.
        """
        if self._is_inline:
            remove_files(self._directory)
            return _listed(self._rows), _listed(self._records), 0
        self._write_records()
        self._write_rows()
        remove_files(self._directory)
        make_directory(self._directory)
        for path in self._temporary.iterdir():
            path.replace(self._directory / path.name)
        return b"[]", b"[]", self._row_pieces

    def discard(self) -> None:
        """Remove temporary files, if `finish` was not reached."""
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _write_records(self) -> None:
        if self._records:
            self._write(f"chunk-{self._chunks}.js", "chunk", self._chunks, self._records)
            self._chunks += 1
            self._records, self._records_size = [], 0

    def _write_rows(self) -> None:
        if self._rows:
            self._write("rows.js", "rows", self._row_pieces, self._rows)
            self._row_pieces += 1
            self._rows, self._rows_size = [], 0

    def _write(self, name: str, kind: str, number: int, items: list[bytes]) -> None:
        # As a string to parse: in a JavaScript literal, a key __proto__ would not be data.
        text = orjson.dumps(_listed(items).decode()).decode()
        call = f'reportData("{self._report_id}", "{kind}", {number}, {text});\n'
        path = self._temporary / name
        if path.exists():
            with path.open("ab") as file:
                file.write(call.encode())
            return
        with open_temporary(path, self._directory / name) as file:
            file.write(call.encode())


def remove_files(directory: Path) -> None:
    """Remove the files of an earlier report; other files stay."""
    for pattern in ("rows.js", "chunk-*.js"):
        for path in directory.glob(pattern):
            path.unlink()
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()


def _listed(items: list[bytes]) -> bytes:
    return b"[" + b",".join(items) + b"]"
