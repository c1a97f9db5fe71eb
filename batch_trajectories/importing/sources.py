"""Reads sources: finds their files, recognizes the format, and yields their conversations."""

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
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.kept_dataset import rows_of_source
from batch_trajectories.dataset.lines import DAMAGED, MAX_LINE_BYTES, TOO_LONG
from batch_trajectories.dataset.source import DataSource, SourceFile, parse_source
from batch_trajectories.importing.conversation import (
    Reader,
    SourceConversation,
    SourceRow,
    Unreadable,
    is_blank,
)
from batch_trajectories.importing.row_columns import media_kind, short_columns

FORMATS = ("atif", "openai", "sharegpt", "claude_code", "codex")
"""The modules of readers, in the order in which they are tried for a file."""

_SAMPLE_ROWS = 50
"""The number of rows of a file by which its format is recognized."""


Unit = Literal["line", "element", "row"]
"""The kind of a source's rows: lines, elements of a JSON list, or rows of a table."""


class SourcePlace(NamedTuple):
    """The place at which a conversation, or a row that is none, was read."""

    format: str
    source: str
    line: int | None
    """The number of the line or row, from 1; None for the whole source."""
    at: float
    """The time at which the source was written, epoch seconds."""
    unit: Unit = "line"

    def __str__(self) -> str:
        if self.line is None:
            return self.source
        if self.unit == "line":
            return f"{self.source}:{self.line}"
        return f"{self.source}, {self.unit} {self.line}"

    def names(self) -> tuple[str, str]:
        """Return the name of the place, and the name that earlier versions gave it."""
        return str(self), str(self._replace(unit="line"))


Read = SourceConversation | Unreadable

_BYTES = "bytes"
"""The value that stands for bytes, which rows do not hold."""

_BOM = b"\xef\xbb\xbf"


def read_conversations(
    name: Path, format: str | None, metadata: Collection[str] = ()
) -> Iterator[tuple[SourcePlace, Read]]:
    """Yield the conversations of a file, a directory or a hub's dataset (`hf:`), in order.

    `format` is one of `FORMATS`, or None to recognize the format of each file. `metadata` names
    columns that are no part of a conversation. Raises `DatasetError` for a source that cannot be
    read, `ConfigError` for a directory without any conversation.
    """
    source = parse_source(name)
    if not source.files:
        for place, read in _read_rows(_read_source_rows(source), str(name), name, format, metadata):
            yield place._replace(unit="row"), read
        return
    is_directory = name.is_dir()
    is_known = False
    for file in source.files:
        rows = _rows_of_file(file)
        for place, read in _read_rows(
            rows, str(file.path), file.path, format, metadata, is_one_of_many=is_directory
        ):
            place = place._replace(unit=_choose_unit(file))
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
) -> Iterator[tuple[SourcePlace, Read]]:
    at = path.stat().st_mtime if path.exists() else time.time()
    head = list(islice(rows, _SAMPLE_ROWS))
    name, reader = _recognize(head, format)
    if reader is None:
        known = ", ".join(FORMATS)
        wrong = next((one for one in head if isinstance(one, Unreadable)), None)
        if wrong is None:
            reason = f"its format is none of {known}; see --format" if head else "it is empty"
            wrong = Unreadable(reason)
        yield SourcePlace("", source, wrong.line, at), wrong
        return
    first = [row for row in head if isinstance(row, SourceRow)]
    if is_one_of_many and reader.is_part is not None and reader.is_part(path, first):
        return
    whole: list[SourceRow] = []
    for row in chain(head, rows):
        if isinstance(row, Unreadable):
            if reader.session is None:
                yield SourcePlace(name, source, row.line, at), row
                continue
            # Without one of its lines a session would be another conversation.
            wrong = Unreadable(f"{row}; its whole session is left out", row.line)
            yield SourcePlace(name, source, row.line, at), wrong
            return
        elif reader.row is None:
            whole.append(row)
        else:
            content = {key: one for key, one in row.content.items() if key not in metadata}
            other = _other_format(content, name) if format is None else None
            row_format, read = _read_row(content, name, reader, other)
            if isinstance(read, SourceConversation) and len(content) < len(row.content):
                named = {key: one for key, one in row.content.items() if key in metadata}
                read.columns = {**read.columns, **short_columns(named, are_metadata=True)}
            yield SourcePlace(row_format, source, row.number, at), read
    if reader.session is not None and whole:
        try:
            found = reader.session(path, whole)
        except Unreadable as error:
            yield SourcePlace(name, source, error.line, at), error
            return
        yield SourcePlace(name, source, None, at), found
        for problem in found.problems:
            yield SourcePlace(name, source, problem.line, at), problem


def _read_row(
    content: Mapping[str, Any], name: str, reader: Reader, other: str | None
) -> tuple[str, Read]:
    """Read a row; return the name of its format, and the conversation or the error.

    `name` and `reader` are those of the file. `other` is another format of the row; None without.
    """
    if other is not None and reader.recognizes(content):
        return name, Unreadable(f"it is also a row of {other}; --format says which is read")
    if other is not None:
        name, reader = other, _load_reader(other)
    assert reader.row is not None
    try:
        return name, reader.row(content)
    except Unreadable as error:
        return name, error


def _other_format(row: Mapping[str, Any], name: str) -> str | None:
    """Find another format of which a row is a conversation; None if there is none."""
    for other in FORMATS:
        reader = _load_reader(other)
        if other != name and reader.row is not None and reader.recognizes(row):
            return other
    return None


def _load_reader(name: str) -> Reader:
    reader: Reader = import_module(f"batch_trajectories.importing.readers.{name}").READER
    return reader


def _recognize(head: list[SourceRow | Unreadable], format: str | None) -> tuple[str, Reader | None]:
    for name in FORMATS if format is None else (format,):
        reader = _load_reader(name)
        if format is not None or any(
            reader.recognizes(row.content) for row in head if isinstance(row, SourceRow)
        ):
            return name, reader
    return "", None


def _choose_unit(file: SourceFile) -> Unit:
    if file.kind == "lines":
        return "line"
    # Of a compressed file only its reader knows whether it is a list.
    return "element" if file.kind == "list" and file.compression is None else "row"


def _rows_of_file(file: SourceFile) -> Iterator[SourceRow | Unreadable]:
    if file.kind == "lines" and file.compression is None and _is_document(file.path):
        try:
            content = exact_json.loads_with_valid_text(file.path.read_bytes())
        except exact_json.JSONDecodeError as error:
            yield Unreadable(f"not JSON: {error}", error.lineno)
        else:
            yield SourceRow(1, content)
        return
    yield from _read_source_rows(DataSource(str(file.path), files=(file,)))


def _is_document(path: Path) -> bool:
    """Whether a file is one JSON object on several lines."""
    try:
        if path.stat().st_size > MAX_LINE_BYTES:
            return False
        with path.open("rb") as file:
            first = file.readline(MAX_LINE_BYTES).removeprefix(_BOM).strip()
            if not first.startswith(b"{") or not first.endswith((b"{", b"[", b",")):
                return False
            second = file.readline(MAX_LINE_BYTES).strip()
    except OSError:
        return False  # reading it as rows reports the error
    return bool(second) and not _is_object(first) and not _is_object(second)


def _is_object(text: bytes) -> bool:
    try:
        return isinstance(exact_json.loads_with_valid_text(text), dict)
    except exact_json.JSONDecodeError:
        return False


def _read_source_rows(source: DataSource) -> Iterator[SourceRow | Unreadable]:
    """Yield the rows with their numbers, and an error for each row that is no object.

    A part of the source that cannot be read ends the rows.
    """
    number = 0
    left_out = Omissions()
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
                content = _mark_bytes(content, left_out.bytes)
                yield SourceRow(number, content)
            else:
                why = str(content) if row == TOO_LONG else "not an object"
                yield Unreadable(why, number)
        if left_out.numbers:
            columns = ", ".join(sorted(left_out.numbers))
            yield Unreadable(f"NaN and infinite numbers, which JSON has not, in: {columns}", None)
    except DatasetError as error:
        damaged = Unreadable(_strip_source(str(error), source.name), number + 1 if number else None)
        damaged.is_damaged = True
        yield damaged


def _mark_bytes(row: Mapping[str, Any], left_out: set[str]) -> Mapping[str, Any]:
    """Add a mark to a row for each of its columns of bytes, which rows do not hold."""
    signs: dict[str, Any] = {}
    for name in left_out:
        column, _, inside = name.partition(".")
        if not is_blank(row.get(column)):
            continue  # its other values tell the kind of the column
        if media_kind(column) is not None:
            signs[column] = _BYTES
        elif not inside:
            signs[column] = {"binary": _BYTES}  # no text: it is refused by name
        elif inside == "bytes":
            signs[column] = {"bytes": _BYTES, "path": None}  # a feature of `datasets`
    return {**row, **signs}


def _strip_source(reason: str, source: str) -> str:
    """Remove the name of the source, which a `SourcePlace` has already, from a reason."""
    if not reason.startswith(source):
        return reason
    rest = reason.removeprefix(source)
    return f"line {rest[1:]}" if re.match(r":\d+: ", rest) else rest.removeprefix(": ").lstrip()
