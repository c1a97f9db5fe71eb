"""Rows of JSON, CSV and TSV files, compressed or not, one at a time.

A row is the text of a line of JSON as it is in the file, or a dict where the file is not JSON. CSV
knows only text: `007` stays `007`; an empty cell is an absent column.

A few kilobytes of a compressed file can be gigabytes of text, so nothing is read in larger pieces
than `_BLOCK`, and no row is held beyond its limit.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.lines import MAX_LINE_BYTES, TOO_LONG, refuse_other_kinds
from batch_trajectories.dataset.source import Compression, SourceFile

Row = bytes | dict[str, Any]

_BOM = b"\xef\xbb\xbf"
_PEEK_BYTES = 1 << 12
_BLOCK = 1 << 16

_DELIMITERS = ";\t|,"

_MAX_CSV_CHARS = 64 << 20
"""Limit of a line or a cell. The reader of CSV takes four bytes for each character."""


def rows_of_file(file: SourceFile, left_out: Omissions) -> Iterator[Row]:
    """Read the rows of a file; columns with values that JSON cannot hold are added to `left_out`.

    Raises `DatasetError`, which names the file and, if known, the line.
    """
    if file.kind == "parquet":
        from batch_trajectories.dataset.arrow_rows import parquet_rows

        yield from parquet_rows(file.path, left_out)
        return
    try:
        with _open(file.path, file.compression) as stream:
            refuse_other_kinds(file.path, stream.peek(8)[:8])
            match file.kind:
                case "lines":
                    yield from _lines(stream)
                case "list":
                    yield from _array_rows(file.path, stream)
                case "csv":
                    yield from _csv_rows(file.path, stream, ",")
                case "tsv":
                    yield from _csv_rows(file.path, stream, "\t")
    except UnicodeDecodeError as error:
        line = _first_undecodable_line(file)
        raise DatasetError(
            f"{file.path}:{line}: not UTF-8: {error.reason}; convert it first (iconv -t UTF-8)"
        ) from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DatasetError(f"{file.path}: cannot read the dataset: {reason}") from error


@contextmanager
def _open(path: Path, compression: Compression | None) -> Iterator[BufferedReader[Any]]:
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


def _first_undecodable_line(file: SourceFile) -> int:
    """The number of the first line that is not UTF-8.

    Text is decoded in blocks, so the error itself has no line number.
    """
    number, decoder = 1, codecs.getincrementaldecoder("utf-8")()
    with _open(file.path, file.compression) as stream:
        while block := stream.read(_BLOCK):
            try:
                number += decoder.decode(block).count("\n")
            except UnicodeDecodeError as error:
                return number + error.object[: error.start].count(b"\n")
    return number


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines without their ends; `TOO_LONG` in place of a line that is too long."""
    first = True
    while line := _line(stream):
        yield line.removeprefix(_BOM).rstrip(b"\r\n") if first else line.rstrip(b"\r\n")
        first = False


def _line(stream: BinaryIO) -> bytes:
    line = stream.readline(_BLOCK)
    if line.endswith(b"\n") or len(line) < _BLOCK:
        return line
    whole = bytearray(line)
    while more := stream.readline(_BLOCK):
        if len(whole) + len(more) >= MAX_LINE_BYTES:
            while more and not more.endswith(b"\n"):
                more = stream.readline(_BLOCK)
            return TOO_LONG
        whole += more
        if more.endswith(b"\n"):
            break
    return bytes(whole)


def _array_rows(path: Path, stream: BufferedReader[Any]) -> Iterator[bytes]:
    if stream.peek(_PEEK_BYTES).removeprefix(_BOM).lstrip()[:1] not in (b"[", b""):
        yield from _lines(stream)  # JSONL under the name .json.gz
        return
    mark = len(_BOM) if stream.peek(len(_BOM)).startswith(_BOM) else 0
    stream.read(mark)
    # A character for each byte: others would take up to four bytes for each.
    with TextIOWrapper(stream, encoding="latin-1", newline="") as text:
        yield from read_elements(path, text)


def _csv_rows(path: Path, stream: BufferedReader[Any], delimiter: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(_MAX_CSV_CHARS)
    with TextIOWrapper(stream, encoding="utf-8-sig", newline="") as text:
        reader = csv.reader(_check_line_lengths(path, text), delimiter=delimiter, strict=True)
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


def _check_line_lengths(path: Path, text: TextIO) -> Iterator[str]:
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


_MAX_READ_MORE = 8 << 20
"""The most bytes that are read beyond the end of a large element."""

_BLANKS = re.compile(r"[ \t\r\n]*")

_MARGIN = 16
"""An error within so many characters of the end may only mean that more has to be read."""

_decoder = json.JSONDecoder(parse_int=str, parse_float=str)
"""Finds the end of a value. Only the text of the value is used, so numbers are not parsed."""


def read_elements(path: Path, text: TextIO) -> Iterator[bytes]:
    """Read the elements of a list whose bytes are the characters of `text`.

    Raises `DatasetError`, which names the file and the line, and `UnicodeDecodeError` for an
    element that is not UTF-8.
    """
    buffer, position, line = "", 0, 1
    begun = False
    while True:
        position = _skip_blanks(buffer, position)
        if not begun and buffer[position : position + 1] == "[":
            begun = True
            position += 1
            continue
        if begun and buffer[position : position + 1] == "]":
            rest = buffer[position + 1 :]
            while not rest.strip() and (rest := text.read(_BLOCK)):
                pass
            if rest.strip():
                raise _array_error(
                    path, line + buffer.count("\n", 0, position), "more follows its end"
                )
            return
        try:
            end = _end_of_element(buffer, position)
        except _Unreadable as error:
            wrong = error.with_traceback(None)
            wrong.__context__ = None  # both hold the buffer, which could not grow where it is
        else:
            element = buffer[position:end].replace("\r", " ").replace("\n", " ").encode("latin-1")
            element.decode()  # raises
            yield element
            position = _skip_blanks(buffer, end)
            if buffer[position] == ",":
                position += 1
            continue
        line += buffer.count("\n", 0, position)
        buffer = buffer[position:]
        position = 0
        more = ""
        if wrong.is_final:
            pass
        elif len(buffer) >= MAX_LINE_BYTES:
            wrong = _Unreadable(f"an element is longer than {MAX_LINE_BYTES >> 20} MiB")
        else:
            # As much again each time: what is incomplete is read again from its beginning.
            more = text.read(max(_BLOCK, min(len(buffer), _MAX_READ_MORE)))
        if not more and not begun and not buffer:
            return  # an empty file
        if not more:
            raise _array_error(path, line + buffer.count("\n", 0, wrong.at), wrong.reason)
        buffer += more


class _Unreadable(Exception):
    """An element cannot be read; `at` is the offset of the mistake in the element."""

    def __init__(self, reason: str, at: int = 0, *, is_final: bool = True) -> None:
        self.reason = reason
        self.at = at
        self.is_final = is_final
        """Whether the element stays wrong, whatever follows."""


def _end_of_element(buffer: str, position: int) -> int:
    """The end of the element at `position`. Raises `_Unreadable`, also if more must be read."""
    near = len(buffer) - _MARGIN
    try:
        _, end = _decoder.raw_decode(buffer, position)
    except RecursionError:
        raise _Unreadable("an element is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _Unreadable(
            error.msg,
            error.pos - position,
            is_final=error.pos < near and not error.msg.startswith("Unterminated"),
        ) from None
    after = _skip_blanks(buffer, end)
    if buffer[after : after + 1] in (",", "]"):
        return end
    raise _Unreadable("Expecting ',' delimiter", after - position, is_final=after < near)


def _skip_blanks(buffer: str, position: int) -> int:
    match = _BLANKS.match(buffer, position)
    return position if match is None else match.end()


def _array_error(path: Path, line: int, reason: str) -> DatasetError:
    return DatasetError(f"{path}:{line}: not a JSON array of rows: {reason}")
