"""The full-text index of conversations, for `text=`: tables of SQLite without the texts.

Each file covers a range of records.jsonl; a row is the offset of its record. The files are written
when somebody first searches.
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

import orjson
import pyarrow as pa

from batch_trajectories.basics.parts import Advance, run_in_processes
from batch_trajectories.records.files import DamagedLine, lock_directory, make_directory
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.records.record_types import Record, StoredConversation, decode_record
from batch_trajectories.records.records import read_lines
from batch_trajectories.view.index.filters import BadFilter, Choice, in_offsets
from batch_trajectories.view.index.parts import (
    IndexPart,
    Origin,
    find_origin,
    make_cache,
    missing_in,
    parts_in,
    split_ranges,
)
from batch_trajectories.view.index.run_index import Maker

RANGE_BYTES = 64 << 20
"""Maximum bytes of records.jsonl that one file of a new index covers."""

_KIND = "text"
_INSERT_ROWS = 500
_WORD = re.compile(r'"([^"]*)"|(\S+)')
_WORDS = re.compile(r"\w+", re.UNICODE)


class NothingToFind(ValueError):
    """A search has no word in it."""


def extend_texts(run_dir: Path, cache: Path, origin: Origin) -> None:
    """Write the index files that are missing. Raises `RunLocked` if another process makes them."""
    directory = cache / origin.name_of_texts
    make_directory(directory, is_inside=False)
    with lock_directory(directory, f"{directory}: another process makes this index"):
        records = run_dir / RECORDS_FILE
        _drop_small(directory)
        missing = missing_in(parts_in(directory, _KIND), records.stat().st_size)
        ranges = split_ranges(records, missing, RANGE_BYTES)

        def do(part: Sequence[tuple[int, int]], advance: Advance) -> None:
            for begin, end in part:
                _write_texts(records, directory, begin, end)
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


def _write_texts(records: Path, directory: Path, begin: int, end: int) -> None:
    path = directory / f"{_KIND}-{begin}-{end}.sqlite"
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with closing(sqlite3.connect(temporary, isolation_level=None)) as database:
            database.execute("pragma journal_mode=off")
            database.execute("pragma synchronous=off")
            database.execute(
                "create virtual table words using fts5(said, content='', columnsize=0)"
            )
            database.execute("begin")
            batch: list[tuple[int, str]] = []
            for offset, line in read_lines(records, begin):
                if offset >= end:
                    break
                try:
                    text = "\n".join(record_texts(decode_record(line)))
                except DamagedLine:
                    continue
                batch.append((offset, text.encode(errors="replace").decode()))
                if len(batch) >= _INSERT_ROWS:
                    database.executemany("insert into words(rowid, said) values (?, ?)", batch)
                    batch.clear()
            database.executemany("insert into words(rowid, said) values (?, ?)", batch)
            database.execute("commit")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def record_texts(record: Record) -> Iterator[str]:
    """All texts of a conversation and of those inside it, and the output of its check."""
    yield record.id
    yield from _message_texts(record)
    if record.check is not None:
        printed = (record.check.stdout, record.check.stderr)
        yield from (text for text in printed if isinstance(text, str))
    if record.error is not None and record.error.message is not None:
        yield record.error.message


def _message_texts(part: StoredConversation) -> Iterator[str]:
    for message in part.messages:
        yield message.content
        if message.reasoning:
            yield message.reasoning
        for call in message.tool_calls:
            yield call.function.name
            yield call.function.arguments
    for inner in part.inner:
        yield from _message_texts(inner)


def make_query(words: str) -> str:
    """Make the query of SQLite for the words of a search: all words, phrases, prefixes with `*`.

    Raises `NothingToFind`.
    """
    found = []
    for match in _WORD.finditer(words):
        term = match[1] if match[1] is not None else match[2]
        parts = _WORDS.findall(term.replace("_", " "))
        if parts:
            phrase = " ".join(parts)
            star = "*" if match[1] is None and term.endswith("*") else ""
            found.append(f'"{phrase}"{star}')
    if not found:
        raise NothingToFind(f"text={words}: has no word; give words of letters and digits")
    return " AND ".join(found)


_FIND = """
select coalesce(group_concat(rowid), '')
from (select rowid from words where words match ? order by rowid)
"""
"""The query for the numbers of records that have some words.

The numbers come as one text, because a row of SQLite for each would cost three times as much.
"""


def find_offsets(parts: Sequence[IndexPart], query: str) -> pa.Array:
    """The offsets of the records that match a query, in their order."""

    def find(part: IndexPart) -> pa.Array:
        address = f"{part.path.as_uri()}?mode=ro&immutable=1"
        with closing(sqlite3.connect(address, uri=True)) as database:
            (said,) = database.execute(_FIND, (query,)).fetchone()
        return pa.array(orjson.loads(f"[{said}]"), pa.int64())

    found = list(map(find, parts))
    return pa.concat_arrays(found) if found else pa.array([], pa.int64())


# The text index of one run: made when somebody searches, extended while somebody does.

_CACHED_SEARCHES = 4


class FoundTexts(NamedTuple):
    """The answer to a search."""

    choice: Choice
    version: str
    """A text that changes when the index covers more records."""


class RunTexts:
    """The words of one run's conversations; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._maker: Maker | None = None
        self._found: OrderedDict[Any, pa.Array] = OrderedDict()
        self._failed_at: int | None = None
        self.state: dict[str, Any] | None = None
        """The progress of the index, the API's `Text`; None until somebody searches."""

    def find(self, words: str) -> FoundTexts | None:
        """The records with these words, as far as they are indexed; None without records.

        Raises `BadFilter`.
        """
        try:
            query = make_query(words)
        except NothingToFind as error:
            raise BadFilter(str(error)) from error
        with self._lock:
            parts = self._refresh()
            if parts is None:
                return None
            version = "-".join(f"{part.begin:x}.{part.end:x}" for part in parts)
            key = (query, version)
            if key not in self._found:
                self._found[key] = find_offsets(parts, query)
                while len(self._found) > _CACHED_SEARCHES:
                    self._found.popitem(last=False)
            return FoundTexts(in_offsets(self._found[key]), version)

    def read_state(self) -> dict[str, Any] | None:
        """The state now, if somebody has searched."""
        with self._lock:
            if self.state is not None:
                self._refresh()
            return self.state

    def _refresh(self) -> list[IndexPart] | None:
        origin = find_origin(self._run_dir)
        if origin is None:
            return None
        records = self._run_dir / RECORDS_FILE
        size = records.stat().st_size
        parts = parts_in(make_cache(self._run_dir) / origin.name_of_texts, "text")
        ranges = split_ranges(records, missing_in(parts, size), RANGE_BYTES)
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
        """End the process that writes the index."""
        with self._lock:
            if self._maker is not None:
                self._maker.stop()
                self._maker = None
