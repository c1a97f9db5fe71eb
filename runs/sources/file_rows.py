"""Rows of JSON, CSV and TSV files, compressed or not, one at a time.

A row is the text of a line of JSON as it is in the file, or a dict where the file is not JSON. CSV
knows only text: `007` stays `007`; an empty cell is an absent column.
"""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

from runs.dataset.lines import MAX_LINE_BYTES
from runs.errors import DatasetError
from runs.sources.source import Compression, SourceFile

Row = bytes | dict[str, Any]

_BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 16

_decoder = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds where a value ends. Its text is taken, so numbers need not be read."""


def rows_of_file(file: SourceFile) -> Iterator[Row]:
    """Read the rows of a file. Raises `DatasetError`, which names the file and, if known, the
    line."""
    if file.kind == "parquet":
        from runs.sources.arrow_rows import parquet_rows

        yield from parquet_rows(file.path)
        return
    try:
        with _opened(file.path, file.compression) as stream:
            match file.kind:
                case "lines":
                    yield from _lines(stream)
                case "list":
                    yield from _elements(file.path, stream)
                case "csv":
                    yield from _table(file.path, stream, ",")
                case "tsv":
                    yield from _table(file.path, stream, "\t")
    except UnicodeDecodeError as error:
        msg = f"{file.path}: not UTF-8: {error.reason} at byte {error.start}; convert it first"
        raise DatasetError(msg) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"{file.path}: cannot read the dataset: {reason}"
        raise DatasetError(msg) from error


@contextmanager
def _opened(path: Path, compression: Compression | None) -> Iterator[BinaryIO]:
    match compression:
        case None:
            with path.open("rb", buffering=1 << 20) as file:
                yield file
        case "gzip":
            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]  # a GzipFile reads as a BinaryIO does
        case "zstd":
            import io

            import pyarrow as pa

            with pa.input_stream(str(path), compression="zstd") as stream:
                yield io.BufferedReader(stream, 1 << 20)


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    first = True
    while line := stream.readline(MAX_LINE_BYTES):
        yield line.removeprefix(_BOM).rstrip(b"\r\n") if first else line.rstrip(b"\r\n")
        first = False
        while not line.endswith(b"\n") and len(line) == MAX_LINE_BYTES:
            line = stream.readline(MAX_LINE_BYTES)  # the rest of a line that is too long


def _elements(path: Path, stream: BinaryIO) -> Iterator[bytes]:
    """The elements of a JSON array, each as a line of JSON."""
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        buffer = text.read(_BLOCK).lstrip()
        if not buffer.startswith("["):
            # JSONL under the name .json.gz.
            stream.seek(0)
            yield from _lines(stream)
            return
        position, number = 1, 0
        while True:
            position = _after_blanks(buffer, position)
            if buffer[position : position + 1] == "]":
                if (buffer[position + 1 :] + text.read(_BLOCK)).strip():
                    msg = f"{path}: not a JSON array of rows: there is more after its end"
                    raise DatasetError(msg)
                return
            end = _end_of_element(buffer, position)
            if end is not None:
                number += 1
                yield buffer[position:end].replace("\r", " ").replace("\n", " ").encode()
                position = _after_blanks(buffer, end)
                position += buffer[position] == ","
                continue
            rest = buffer[position:]
            # Twice as much each time: what is incomplete is read again from its beginning.
            more = text.read(max(_BLOCK, 2 * len(rest))) if len(rest) < MAX_LINE_BYTES else ""
            if not more:
                msg = f"{path}: not a JSON array of rows: cannot read element {number + 1}"
                raise DatasetError(msg)
            buffer, position = rest + more, 0


def _end_of_element(buffer: str, position: int) -> int | None:
    """Where an element ends that is in `buffer` together with what follows it, else None."""
    try:
        _, end = _decoder.raw_decode(buffer, position)
    except (ValueError, RecursionError):
        return None
    after = _after_blanks(buffer, end)
    return end if buffer[after : after + 1] in (",", "]") else None


def _after_blanks(buffer: str, position: int) -> int:
    while position < len(buffer) and buffer[position] in " \t\r\n":
        position += 1
    return position


def _table(path: Path, stream: BinaryIO, delimiter: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if repeated := [name for name, count in Counter(names).items() if count > 1]:
                msg = f"{path}:1: two columns have the name {repeated[0]!r}"
                raise DatasetError(msg)
            for cells in reader:
                if len(cells) > len(names):
                    msg = (
                        f"{path}:{reader.line_num}: {len(cells)} cells, but the header names "
                        f"{len(names)} columns; is a quote or a delimiter wrong?"
                    )
                    raise DatasetError(msg)
                row = {name: cell for name, cell in zip(names, cells, strict=False) if cell}
                if row:
                    yield row
        except csv.Error as error:
            msg = f"{path}:{reader.line_num}: not CSV: {error}"
            raise DatasetError(msg) from error
