"""The words of whole conversations, for `text=`: full-text tables of SQLite without the texts.

Each file has the records of a range of records.jsonl; a row is the offset of its record. They are
made when somebody first searches.
"""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batch_trajectories.basics.parts import Advance, run_in_processes
from batch_trajectories.records.files import DamagedLine, lock_directory, make_directory
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.records.record_types import Record, StoredConversation, decode_record
from batch_trajectories.records.records import lines_from
from batch_trajectories.view.index.filters import BadFilter, Choice, in_offsets
from batch_trajectories.view.index.parts import (
    IndexPart,
    Origin,
    cache_of,
    missing_in,
    origin_of,
    parts_in,
    ranges_of,
)
from batch_trajectories.view.index.run_index import Maker

RANGE_BYTES = 64 << 20
"""Of records.jsonl in one file of a new index."""

_KIND = "text"
_AT_ONCE = 500
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_PARTS = re.compile(r"\w+", re.UNICODE)


class NothingToFind(ValueError):
    """A search has no word in it."""


def extend_texts(run_dir: Path, cache: Path, origin: Origin) -> None:
    """Make the files that are missing. Raises `RunLocked` if another process makes them."""
    directory = cache / origin.name_of_texts
    make_directory(directory, is_inside=False)
    with lock_directory(directory, f"{directory}: another process makes this index"):
        records = run_dir / RECORDS_FILE
        _drop_small(directory)
        missing = missing_in(parts_in(directory, _KIND), records.stat().st_size)
        ranges = ranges_of(records, missing, RANGE_BYTES)

        def do(some: Sequence[tuple[int, int]], advance: Advance) -> None:
            for begin, end in some:
                _make(records, directory, begin, end)
                advance(1)

        run_in_processes(ranges, do, doing=f"texts of {run_dir.name}", enough=2)


def _drop_small(directory: Path) -> None:
    """Drop the last files that are together smaller than one before them: they are made as one."""
    parts = parts_in(directory, _KIND)
    size = 0
    for part in reversed(parts):
        own = part.end - part.begin
        if own >= RANGE_BYTES or (size and own > 2 * size):
            return
        size += own
        part.path.unlink()


def _make(records: Path, directory: Path, begin: int, end: int) -> None:
    path = directory / f"{_KIND}-{begin}-{end}.sqlite"
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as base:
            base.execute("pragma journal_mode=off")
            base.execute("pragma synchronous=off")
            base.execute("create virtual table words using fts5(said, content='', columnsize=0)")
            base.execute("begin")
            some: list[tuple[int, str]] = []
            for offset, line in lines_from(records, begin):
                if offset >= end:
                    break
                try:
                    text = "\n".join(texts_of(decode_record(line)))
                except DamagedLine:
                    continue
                some.append((offset, text.encode(errors="replace").decode()))
                if len(some) >= _AT_ONCE:
                    base.executemany("insert into words(rowid, said) values (?, ?)", some)
                    some.clear()
            base.executemany("insert into words(rowid, said) values (?, ?)", some)
            base.execute("commit")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def texts_of(record: Record) -> Iterator[str]:
    """All that was said in a conversation, and in those inside it, and what its check printed."""
    yield record.id
    yield from _said(record)
    if record.check is not None:
        printed = (record.check.stdout, record.check.stderr)
        yield from (text for text in printed if isinstance(text, str))
    if record.error is not None and record.error.message is not None:
        yield record.error.message


def _said(part: StoredConversation) -> Iterator[str]:
    for message in part.messages:
        yield message.content
        if message.reasoning:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.function.name
            yield call.function.arguments
    for inner in part.inner:
        yield from _said(inner)


def question_of(words: str) -> str:
    """The words of a search in the language of SQLite: all of them, phrases, beginnings with `*`.

    Raises `NothingToFind`.
    """
    found = []
    for match in _WORD.finditer(words):
        said = match[1] if match[1] is not None else match[2]
        parts = _PARTS.findall(said.replace("_", " "))
        if parts:
            phrase = " ".join(parts)
            star = "*" if match[1] is None and said.endswith("*") else ""
            found.append(f'"{phrase}"{star}')
    if not found:
        raise NothingToFind(f"text={words}: has no word; give words of letters and digits")
    return " AND ".join(found)


def offsets_of(parts: Sequence[IndexPart], question: str) -> pa.Array:
    """The offsets of the records that have what is asked for."""
    found: list[pa.Array] = []
    for part in parts:
        with closing(
            sqlite3.connect(f"{part.path.as_uri()}?mode=ro&immutable=1", uri=True)
        ) as base:
            rows = base.execute("select rowid from words where words match ?", (question,))
            found.append(pa.array([offset for (offset,) in rows], pa.int64()))
    return pa.concat_arrays(found) if found else pa.array([], pa.int64())


# The text index of one run: made when somebody searches, extended while somebody does.

_KEPT = 4


class FoundTexts(NamedTuple):
    """The answer to a search."""

    choice: Choice
    version: str
    """Changes with what the index has."""


class RunTexts:
    """The words of one run's conversations; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._maker: Maker | None = None
        self._found: OrderedDict[Any, pa.Array] = OrderedDict()
        self._failed_at: int | None = None
        self.state: dict[str, Any] | None = None
        """See the API's `Text`; None until somebody searches."""

    def find(self, words: str) -> FoundTexts | None:
        """The records with these words, as far as they are indexed; None without records.

        Raises `BadFilter`.
        """
        try:
            question = question_of(words)
        except NothingToFind as error:
            raise BadFilter(str(error)) from error
        with self._lock:
            parts = self._look()
            if parts is None:
                return None
            version = "-".join(f"{part.begin:x}.{part.end:x}" for part in parts)
            key = (question, version)
            if key not in self._found:
                self._found[key] = offsets_of(parts, question)
                while len(self._found) > _KEPT:
                    self._found.popitem(last=False)
            return FoundTexts(in_offsets(self._found[key]), version)

    def look(self) -> dict[str, Any] | None:
        """The state now, if somebody has searched."""
        with self._lock:
            if self.state is not None:
                self._look()
            return self.state

    def _look(self) -> Any:
        origin = origin_of(self._run_dir)
        if origin is None:
            return None
        records = self._run_dir / RECORDS_FILE
        size = records.stat().st_size
        parts = parts_in(cache_of(self._run_dir) / origin.name_of_texts, "text")
        ranges = ranges_of(records, missing_in(parts, size), RANGE_BYTES)
        error = None if self.state is None else self.state["error"]
        if self._maker is not None and self._maker.is_over():
            error = self._maker.problem()
            self._failed_at = None if error is None else size
            self._maker.stop()
            self._maker = None
        if ranges and self._maker is None and self._failed_at != size:
            self._maker = Maker("texts", self._run_dir)
        self.state = {
            "bytes": sum(part.end - part.begin for part in parts),
            "of_bytes": size,
            "is_complete": not ranges,
            "error": error,
        }
        return parts

    def close(self) -> None:
        """End the process that makes it."""
        with self._lock:
            if self._maker is not None:
                self._maker.stop()
                self._maker = None
