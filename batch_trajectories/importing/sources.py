"""Files, rows and readers of sources."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import ConfigError, DatasetError
from batch_trajectories.dataset.kept_dataset import rows_of_source
from batch_trajectories.dataset.lines import DAMAGED, MAX_LINE_BYTES, TOO_LONG
from batch_trajectories.dataset.source import DataSource, SourceFile, source_of
from batch_trajectories.importing.conversation import (
    Foreign,
    Reader,
    SourceRow,
    Unreadable,
    is_blank,
)
from batch_trajectories.importing.row_columns import columns_of, kind_of_media

FORMATS = ("atif", "openai", "sharegpt", "claude_code", "codex")
"""The modules of readers; in this order they are asked whether a file is theirs."""

_LOOKED_AT = 50
"""Rows of a file by which its format is recognized."""


Unit = Literal["line", "element", "row"]
"""What the rows of a source are: lines, elements of a JSON list, or rows of a table."""


class Place(NamedTuple):
    """Where a conversation, or what stands in its place, was read."""

    format: str
    source: str
    line: int | None
    """Or its number among the rows; None for the whole source."""
    at: float
    """When the source was written, epoch seconds."""
    unit: Unit = "line"

    def __str__(self) -> str:
        if self.line is None:
            return self.source
        if self.unit == "line":
            return f"{self.source}:{self.line}"
        return f"{self.source}, {self.unit} {self.line}"

    def names(self) -> tuple[str, str]:
        """How it is named, and how earlier versions named it in the rows of an import."""
        return str(self), str(self._replace(unit="line"))


Read = Foreign | Unreadable

_BYTES = "bytes"
"""Stands for a value of bytes, which rows do not hold."""

_BOM = b"\xef\xbb\xbf"


def conversations_in(
    name: Path, format: str | None, metadata: Collection[str] = ()
) -> Iterator[tuple[Place, Read]]:
    """All that a file, a directory or a hub's dataset (`hf:`) holds, in order.

    `format` is one of `FORMATS`, or None to recognize that of each file; `metadata` are columns of
    rows that are no part of a conversation. Raises `DatasetError` for
    a source that cannot be one, `ConfigError` for a directory without any conversation.
    """
    source = source_of(name)
    if not source.files:
        for place, read in _read_rows(_rows_of(source), str(name), name, format, metadata):
            yield place._replace(unit="row"), read
        return
    is_directory = name.is_dir()
    is_known = False
    for file in source.files:
        rows = _rows_of_file(file)
        for place, read in _read_rows(
            rows, str(file.path), file.path, format, metadata, is_one_of_many=is_directory
        ):
            place = place._replace(unit=_unit_of(file))
            is_damaged = isinstance(read, Unreadable) and read.is_damaged
            if place.format or is_damaged or not is_directory:  # directories hold other files, too
                is_known = True
                yield place, read
    if not is_known:
        known = ", ".join(FORMATS)
        raise ConfigError(f"{name}: no file here is of a known format ({known}); see --format")


def _read_rows(
    rows: Iterator[SourceRow | Unreadable],
    source: str,
    path: Path,
    format: str | None,
    metadata: Collection[str],
    *,
    is_one_of_many: bool = False,
) -> Iterator[tuple[Place, Read]]:
    at = path.stat().st_mtime if path.exists() else time.time()
    head = list(islice(rows, _LOOKED_AT))
    name, reader = _reader_of(head, format)
    if reader is None:
        known = ", ".join(FORMATS)
        wrong = next((one for one in head if isinstance(one, Unreadable)), None)
        if wrong is None:
            reason = f"its format is none of {known}; see --format" if head else "it is empty"
            wrong = Unreadable(reason)
        yield Place("", source, wrong.line, at), wrong
        return
    first = [row for row in head if isinstance(row, SourceRow)]
    if is_one_of_many and reader.is_part is not None and reader.is_part(path, first):
        return
    whole: list[SourceRow] = []
    for row in chain(head, rows):
        if isinstance(row, Unreadable):
            if reader.session is None:
                yield Place(name, source, row.line, at), row
                continue
            # Without one of its lines a session would be another conversation.
            wrong = Unreadable(f"{row}; its whole session is left out", row.line)
            yield Place(name, source, row.line, at), wrong
            return
        elif reader.row is None:
            whole.append(row)
        else:
            of_row, own = name, reader.row
            content = {key: one for key, one in row.content.items() if key not in metadata}
            try:
                if format is None and (other := _other_format(content, name)):
                    if reader.recognizes(content):
                        reason = f"it is also a row of {other}; --format says which is read"
                        raise Unreadable(reason)
                    of_row, own = other, _reader_named(other).row or own
                found = own(content)
                if len(content) < len(row.content):
                    named = {key: one for key, one in row.content.items() if key in metadata}
                    found.columns = {**found.columns, **columns_of(named, are_metadata=True)}
                read: Read = found
            except Unreadable as error:
                read = error
            yield Place(of_row, source, row.number, at), read
    if reader.session is not None and whole:
        try:
            found = reader.session(path, whole)
        except Unreadable as error:
            yield Place(name, source, error.line, at), error
            return
        yield Place(name, source, None, at), found
        for problem in found.problems:
            yield Place(name, source, problem.line, at), problem


def _other_format(row: Mapping[str, Any], name: str) -> str | None:
    """Another format than this one whose conversation a row has."""
    for other in FORMATS:
        reader = _reader_named(other)
        if other != name and reader.row is not None and reader.recognizes(row):
            return other
    return None


def _reader_named(name: str) -> Reader:
    reader: Reader = import_module(f"batch_trajectories.importing.readers.{name}").READER
    return reader


def _reader_of(head: list[SourceRow | Unreadable], format: str | None) -> tuple[str, Reader | None]:
    for name in FORMATS if format is None else (format,):
        reader = _reader_named(name)
        if format is not None or any(
            reader.recognizes(row.content) for row in head if isinstance(row, SourceRow)
        ):
            return name, reader
    return "", None


def _unit_of(file: SourceFile) -> Unit:
    if file.kind == "lines":
        return "line"
    # Of a compressed file only its reader knows whether it is a list.
    return "element" if file.kind == "list" and file.compression is None else "row"


def _rows_of_file(file: SourceFile) -> Iterator[SourceRow | Unreadable]:
    if file.kind == "lines" and file.compression is None and _begins_a_document(file.path):
        try:
            content = exact_json.loads_with_valid_text(file.path.read_bytes())
        except exact_json.JSONDecodeError as error:
            yield Unreadable(f"not JSON: {error}", error.lineno)
        else:
            yield SourceRow(1, content)
        return
    yield from _rows_of(DataSource(str(file.path), files=(file,)))


def _begins_a_document(path: Path) -> bool:
    """Whether a file is one object on several lines: its first line does not hold all of it."""
    try:
        if path.stat().st_size > MAX_LINE_BYTES:
            return False
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES).removeprefix(_BOM).strip()
            if not first.startswith(b"{") or not first.endswith((b"{", b"[", b",")):
                return False
            second = file.readline(MAX_LINE_BYTES).strip()
    except OSError:
        return False  # named when it is read as rows
    return bool(second) and not _is_object(first) and not _is_object(second)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(exact_json.loads_with_valid_text(text), dict)
    except exact_json.JSONDecodeError:
        return False


def _rows_of(source: DataSource) -> Iterator[SourceRow | Unreadable]:
    """The rows with their numbers; what is no object is named. A part that cannot be read ends
    them."""
    number = 0
    left_out: set[str] = set()
    try:
        for number, row in enumerate(rows_of_source(source, left_out), start=1):
            content: Any = row
            if isinstance(row, bytes):
                if not row.strip():
                    continue
                try:
                    content = exact_json.loads_with_valid_text(row)
                except exact_json.JSONDecodeError as error:
                    is_told = row.startswith(DAMAGED)  # a row of a table
                    why = row.removeprefix(DAMAGED).decode() if is_told else f"not JSON: {error}"
                    yield Unreadable(why, number)
                    continue
            if isinstance(content, Mapping):
                content = _with_bytes(content, left_out)
                yield SourceRow(number, content)
            else:
                why = str(content) if row == TOO_LONG else "not an object"
                yield Unreadable(why, number)
    except DatasetError as error:
        damaged = Unreadable(_without_name(str(error), source.name), number + 1 if number else None)
        damaged.is_damaged = True
        yield damaged


def _with_bytes(row: Mapping[str, Any], left_out: set[str]) -> Mapping[str, Any]:
    """A row with a sign in place of its columns of bytes, which rows do not hold."""
    signs: dict[str, Any] = {}
    for name in left_out:
        column, _, inside = name.partition(".")
        if not is_blank(row.get(column)):
            continue  # it holds more than bytes, which say what it is
        if kind_of_media(column) is not None:
            signs[column] = _BYTES
        elif not inside:
            signs[column] = {"binary": _BYTES}  # no text: it is refused by name
        elif inside == "bytes":
            signs[column] = {"bytes": _BYTES, "path": None}  # a feature of `datasets`
    return {**row, **signs}


def _without_name(reason: str, source: str) -> str:
    """A reason that begins with the name of its source, which a `Place` says already."""
    if not reason.startswith(source):
        return reason
    rest = reason.removeprefix(source)
    return f"line {rest[1:]}" if re.match(r":\d+: ", rest) else rest.removeprefix(": ").lstrip()
