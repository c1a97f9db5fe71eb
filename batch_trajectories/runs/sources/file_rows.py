"""Rows of JSON, CSV and TSV files, compressed or not, one at a time.

A row is the text of a line of JSON as it is in the file, or a dict where the file is not JSON. CSV
knows only text: `007` stays `007`; an empty cell is an absent column.
"""

from __future__ import annotations

import csv
import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.runs.dataset.lines import MAX_LINE_BYTES, refuse_other_kinds
from batch_trajectories.runs.sources.json_list import elements
from batch_trajectories.runs.sources.source import Compression, SourceFile

Row = bytes | dict[str, Any]

_BOM = b"\xef\xbb\xbf"
_PEEKED = 1 << 12

_DELIMITERS = ";\t|,"

_MAX_CSV_CHARS = 64 << 20
"""In a line or a cell. The reader of CSV takes four bytes for each."""


def rows_of_file(file: SourceFile, left_out: set[str]) -> Iterator[Row]:
    """Read the rows of a file; columns that cannot be read as JSON are added to `left_out`.

    Raises `DatasetError`, which names the file and, if known, the line.
    """
    if file.kind == "parquet":
        from batch_trajectories.runs.sources.arrow_rows import parquet_rows

        yield from parquet_rows(file.path, left_out)
        return
    try:
        with _opened(file.path, file.compression) as stream:
            refuse_other_kinds(file.path, stream.peek(8)[:8])
            match file.kind:
                case "lines":
                    yield from _lines(stream)
                case "list":
                    yield from _listed(file.path, stream)
                case "csv":
                    yield from _table(file.path, stream, ",")
                case "tsv":
                    yield from _table(file.path, stream, "\t")
    except UnicodeDecodeError as error:
        line = _line_that_is_not_utf8(file)
        raise DatasetError(
            f"{file.path}:{line}: not UTF-8: {error.reason}; convert it first (iconv -t UTF-8)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{file.path}: cannot read the dataset: {reason}") from error


@contextmanager
def _opened(path: Path, compression: Compression | None) -> Iterator[BufferedReader[Any]]:
    match compression:
        case None:
            with BufferedReader(FileIO(path), 1 << 20) as file:
                yield file
        case "gzip":
            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]  # it reads as one does
        case "zstd":
            import pyarrow as pa

            with pa.input_stream(str(path), compression="zstd") as stream:
                yield BufferedReader(stream, 1 << 20)


def _line_that_is_not_utf8(file: SourceFile) -> int:
    """The number of the first such line. Text is decoded in blocks, so the error has no line."""
    number = 1
    with _opened(file.path, file.compression) as stream:
        while line := stream.readline(MAX_LINE_BYTES):
            try:
                line.decode()
            except UnicodeDecodeError:
                break
            number += line.endswith(b"\n")
    return number


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    first = True
    while line := stream.readline(MAX_LINE_BYTES):
        yield line.removeprefix(_BOM).rstrip(b"\r\n") if first else line.rstrip(b"\r\n")
        first = False
        while not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
            line = stream.readline(MAX_LINE_BYTES)  # the rest of a line that is too long


def _listed(path: Path, stream: BufferedReader[Any]) -> Iterator[bytes]:
    if stream.peek(_PEEKED).removeprefix(_BOM).lstrip()[:1] not in (b"[", b""):
        yield from _lines(stream)  # JSONL under the name .json.gz
        return
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        yield from elements(path, text)


def _table(path: Path, stream: BufferedReader[Any], delimiter: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(_MAX_CSV_CHARS)
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(_short_lines(path, text), delimiter=delimiter, strict=True)
        first = 1
        names: list[str] = []
        try:
            for cells in reader:
                if not names:
                    names = cells
                    _check_header(f"{path}:{first}", names, delimiter)
                elif len(cells) > len(names):
                    raise DatasetError(
                        f"{path}:{first}: {len(cells)} cells, but the header names "
                        f"{len(names)} columns; is a quote or a delimiter wrong?"
                    )
                else:
                    row = {name: cell for name, cell in zip(names, cells, strict=False) if cell}
                    if row:
                        yield row
                first = reader.line_num + 1
        except csv.Error as error:
            raise DatasetError(
                f"{path}:{first}: not CSV: {error}; the row begins in this line"
            ) from error


def _short_lines(path: Path, text: TextIO) -> Iterator[str]:
    number = 0
    while line := text.readline(_MAX_CSV_CHARS):
        number += 1
        if len(line) == _MAX_CSV_CHARS:
            raise DatasetError(
                f"{path}:{number}: longer than {_MAX_CSV_CHARS >> 20} million characters"
            )
        yield line


def _check_header(place: str, names: list[str], delimiter: str) -> None:
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise DatasetError(f"{place}: two columns have the name {repeated[0]!r}")
    other = next((sign for sign in _DELIMITERS if len(names) == 1 and sign in names[0]), None)
    if other is not None:
        raise DatasetError(
            f"{place}: the header is one column, {names[0]!r}: its cells seem to be separated by "
            f"{other!r}, not {delimiter!r}; save it with commas as .csv, or with tabs as .tsv"
        )
