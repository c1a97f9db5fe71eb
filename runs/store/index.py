"""The rows of `records.idx`: 64 bytes per record, so that a start takes in a million at once.

Row 0 marks the format, and says how many bytes of the index have which checksum: an index with a
changed row is not believed, and rows behind these bytes are made again. Any other row holds the
task key of a record, where the record lies, and what accounts need of it. How a conversation
ended, and whether it passed its check, is words; each is told once, in a row of its own without a
length, and numbered in the order of these rows. Rows divide the blocks of a disk, so a power loss
takes them whole, and none that it left zeros in fits its place.
"""

from __future__ import annotations

import sys
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from math import isnan, nan
from struct import Struct, error
from sys import intern
from typing import Any, Literal, NamedTuple
from zlib import crc32

from agent.messages import MOST_TOKENS
from runs.store.checks import judgement_of
from runs.tasks import task_key

ROW_BYTES = 64
_FORMAT = f"batch records index 2, {sys.byteorder}".encode()
MARK = _FORMAT.ljust(ROW_BYTES - 1) + b"\n"
"""Row 0 of an index without a checksum."""

_RECORD = Struct("=16sQIHHIIHHIIfd")
"""Task key, offset, length, ending, attempt, turns, tool calls, tokens in and out (the bits from 32
on of each, then the rest of each), reward, dollars."""
_ENDING = Struct("=16xQI2x34s")
"""Offset of the next record, 0, and how that one ended: status, whether it passed its check, and
error class, with a NUL between them."""
_Column = tuple[Literal["Q", "I", "H", "d"], int, int]
"""A column of the rows: type, its place in the row, and the numbers that make a row."""
_OFFSETS: _Column = ("Q", 2, 8)
_LENGTHS: _Column = ("I", 6, 16)
_ENDINGS: _Column = ("H", 14, 32)
_BUCKETS: _Column = ("H", 0, 32)
_TURNS: _Column = ("I", 8, 16)
_COSTS: _Column = ("d", 7, 8)
_MOST_ATTEMPTS = 2**16 - 1
_LOW = 2**32 - 1
_NO_TOKENS = 2**48 - 1
"""Stands for a number of tokens that is not known."""
_MOST_REWARD = 3.4e38
"""What four bytes can hold."""
_PASSED = {None: "", True: "passed", False: "not"}
_HAS_PASSED = {words: has_passed for has_passed, words in _PASSED.items()}
_CHUNK = 1 << 13


class IndexEntry(NamedTuple):
    """One record in the index: where it lies, and what accounts need of it."""

    offset: int
    length: int
    status: str
    attempt: int
    turns: int
    tool_calls: int
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    error_class: str | None
    passed: bool | None
    """Whether it passed what judged it; see `runs.store.checks`."""
    reward: float | None
    """To seven digits."""


class Ending(NamedTuple):
    """How a record ended, in words that many records have in common."""

    status: str
    passed: bool | None
    error_class: str | None


PASSED = 10
"""The place of `passed` among the `index_fields` of a record."""


def index_fields(record: dict[str, Any]) -> list[Any]:
    """What the index holds of a record beside its place: id, input digest, then numbers."""
    usage = record["usage"] or {}
    error = record["error"] or {}
    turns, calls = own_work(record)
    judgement = judgement_of(record)
    return [
        record["id"],
        record["input_digest"],
        record["status"],
        record["attempt"],
        len(turns),
        len(calls),
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        record["cost_usd"],
        error.get("class"),
        judgement.passed,
        judgement.reward,
    ]


def own_turns(record: Mapping[str, Any]) -> list[Any]:
    """The turns of a record, without those that a branch has from its parent."""
    return [turn for turn in record["turns"] if "inherited" not in turn]


def own_work(record: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """The turns and the tool calls of a record, without what a branch has from its parent."""
    turns, calls = own_turns(record), record["tool_calls"]
    if first := len(record["turns"]) - len(turns):
        calls = [call for call in calls if call["turn"] > first]
    return turns, calls


class RowMaker:
    """Makes the rows of an index, one record after the other."""

    def __init__(self, rows: bytes = MARK) -> None:
        """`rows` are those that were made before."""
        endings = _endings_in(memoryview(rows))
        self._numbers = {ending: number for number, ending in enumerate(endings)}

    def rows(self, fields: list[Any], offset: int, length: int) -> bytes:
        """The row of a record, behind one that tells its ending where that is new.

        `fields` are its `index_fields`. Raises `ValueError` where they are of other types.
        """
        task_id, digest, status, attempt, turns, calls, read, written, cost, *more = fields
        failure, passed, reward = more
        try:
            words = "\0".join((status, _PASSED[passed], failure or ""))
            ending = words.encode()[:34].ljust(34, b"\0")
            number = self._numbers.get(ending, len(self._numbers))
            row = _RECORD.pack(
                task_key(task_id, digest),
                offset,
                length,
                number,
                min(attempt, _MOST_ATTEMPTS),
                turns,
                calls,
                (read := _bounded(read)) >> 32,
                (written := _bounded(written)) >> 32,
                read & _LOW,
                written & _LOW,
                nan if reward is None else max(-_MOST_REWARD, min(reward, _MOST_REWARD)),
                nan if cost is None else cost,
            )
        except (error, TypeError, KeyError, AttributeError, OverflowError) as wrong:
            raise ValueError(fields) from wrong
        if number < len(self._numbers):
            return row
        self._numbers[ending] = number
        return _ENDING.pack(offset, 0, ending) + row


class Index(Mapping[bytes, IndexEntry]):
    """The records of a run by task key: of each task, the last one.

    Holds no object per record: its rows, and 4 bytes more where it is asked for single tasks.
    """

    def __init__(self, rows: bytes) -> None:
        """`rows` are right; see `right_rows`."""
        self._rows = rows
        self._view = memoryview(rows)
        self._endings = [_words(ending) for ending in _endings_in(self._view)]

    def __getitem__(self, key: bytes) -> IndexEntry:
        if len(key) == 16:
            for row in reversed(self._by_bucket.get(int.from_bytes(key[:2], sys.byteorder), ())):
                if self._key(row) == key:
                    return self.entry(row)
        raise KeyError(key)

    def __iter__(self) -> Iterator[bytes]:
        for rows in self._by_bucket.values():
            yield from {self._key(row): None for row in rows}

    def __len__(self) -> int:
        return sum(len({self._key(row) for row in rows}) for rows in self._by_bucket.values())

    def entry(self, row: int) -> IndexEntry:
        """The record of one row, from 1."""
        _, offset, length, ending, attempt, turns, calls, *tokens, reward, cost = (
            _RECORD.unpack_from(self._view, ROW_BYTES * row)
        )
        read, written = tokens[0] << 32 | tokens[2], tokens[1] << 32 | tokens[3]
        status, passed, error_class = self._endings[ending]
        return IndexEntry(
            offset,
            length,
            status,
            attempt,
            turns,
            calls,
            read if read < MOST_TOKENS else None,
            written if written < MOST_TOKENS else None,
            None if isnan(cost) else cost,
            error_class,
            passed,
            None if isnan(reward) else reward,
        )

    def records(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """All records in the order of the file, with those that a later one stands for."""
        for row, length in enumerate(_column(self._view, _LENGTHS)):
            if row and length:
                yield self._key(row), self.entry(row)

    def counting(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """The record that counts of each task, in the order of the file."""
        replaced = {self.entry(row).offset for row, _ in self.repeated()}
        return ((key, entry) for key, entry in self.records() if entry.offset not in replaced)

    def latest(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """The record of each task, from the one that was written last to the first."""
        seen = set()
        lengths = _column(self._view, _LENGTHS)
        for row in range(len(lengths) - 1, 0, -1):
            if lengths[row] and (key := self._key(row)) not in seen:
                seen.add(key)
                yield key, self.entry(row)

    def endings(self, rows: Iterable[int]) -> Iterator[Ending | None]:
        """How the records of these rows ended; None for row 0."""
        numbers = _column(self._view, _ENDINGS)
        for row in rows:
            yield self._endings[numbers[row]] if row else None

    def has_turns(self) -> bool:
        """Whether any record holds a reply of the model."""
        return any(entry.turns for _, entry in self.records())

    def costs(self) -> tuple[float, int]:
        """What all records cost together, and how many have turns whose price is not known.

        Those that later ones replaced are counted too: they were paid for.
        """
        columns = [_column(self._view, column) for column in (_LENGTHS, _TURNS, _COSTS)]
        total, unknown = 0.0, 0
        for start in range(1, len(columns[0]), _CHUNK):
            chunk = (column[start : start + _CHUNK].tolist() for column in columns)
            for length, turns, cost in zip(*chunk, strict=True):
                if not isnan(cost):
                    total += cost if length else 0.0
                elif length and turns:
                    unknown += 1
        return total, unknown

    def repeated(self) -> Iterator[tuple[int, int]]:
        """The rows of each two records of one task that follow each other."""
        for rows in self._by_bucket.values():
            last: dict[bytes, int] = {}
            for row in rows:
                key = self._key(row)
                if key in last:
                    yield last[key], row
                last[key] = row

    def match(self, keys: bytes) -> tuple[array[int], int]:
        """For each task key (16 bytes each, all different), the row of its record, 0 without one.

        Then the number of tasks that have a record and are not among the keys. Both sides are
        sorted into buckets, so that only a few of them at a time become objects.
        """
        rows = array("I", bytes(4 * (len(keys) // 16)))
        asked = _sorted_into_buckets(memoryview(keys).cast("H")[::8])
        others = 0
        all_rows = self._rows
        for bucket, places in self._by_bucket.items():
            found = {all_rows[64 * row : 64 * row + 16]: row for row in places}
            for number in asked.get(bucket, ()):
                rows[number] = found.pop(keys[16 * number : 16 * number + 16], 0)
            others += len(found)
        return rows, others

    def _key(self, row: int) -> bytes:
        return self._rows[ROW_BYTES * row : ROW_BYTES * row + 16]

    @cached_property
    def _by_bucket(self) -> Mapping[int, array[int]]:
        """The rows of records, sorted by the first two bytes of their task keys."""
        buckets = _sorted_into_buckets(_column(self._view, _BUCKETS))
        lengths = _column(self._view, _LENGTHS)
        for bucket in {0, int.from_bytes(MARK[:2], sys.byteorder)} & buckets.keys():
            rows = (row for row in buckets[bucket] if row and lengths[row])
            buckets[bucket] = array("I", rows)
        return buckets


def mark_for(size: int, checksum: int) -> bytes:
    """Row 0 of an index: its first `size` bytes have, without this row, this CRC-32."""
    return (b"%b %016x %08x" % (_FORMAT, size, checksum)).ljust(ROW_BYTES - 1) + b"\n"


def is_index(content: bytes) -> bool:
    """Whether this is an index of this version."""
    return content.startswith(_FORMAT) and content[ROW_BYTES - 1 : ROW_BYTES] == b"\n"


def checked_bytes(content: bytes) -> int:
    """How many bytes of an index are what was written; 0 where it was changed or is not ours."""
    if content.startswith(MARK):
        return len(content)
    try:
        size, checksum = (int(word, 16) for word in content[len(_FORMAT) : ROW_BYTES].split())
    except ValueError:
        return 0
    is_right = (
        content.startswith(mark_for(size, checksum))
        and size <= len(content)
        and crc32(memoryview(content)[ROW_BYTES:size]) == checksum
    )
    return size if is_right else 0


def right_rows(content: bytes, records_size: int) -> tuple[int, int]:
    """How many bytes of an index are right, and how many of `records_size` bytes they cover.

    Each row must lie where the one before it ends. 0, 0 where the index is none of ours, or was
    changed.
    """
    checked = checked_bytes(content)
    if checked < ROW_BYTES:
        return 0, 0
    view = memoryview(content)[: checked // ROW_BYTES * ROW_BYTES]
    offsets, lengths = _column(view, _OFFSETS), _column(view, _LENGTHS)
    covered, right = 0, 1
    for start in range(1, len(offsets), _CHUNK):
        sizes = lengths[start : start + _CHUNK].tolist()
        *begins, end = accumulate(sizes, initial=covered)
        if offsets[start : start + _CHUNK].tolist() == begins and end <= records_size:
            covered, right = end, start + len(sizes)
            continue
        for row, size in enumerate(sizes, start):
            if offsets[row] != covered or covered + size > records_size:
                break
            covered, right = covered + size, row + 1
        break
    while right > 1 and not lengths[right - 1]:
        right -= 1  # of whom this tells, no row has come
    rows = view[: right * ROW_BYTES]
    endings = _endings_in(rows)
    are_told = all(map(any, endings)) and len(set(endings)) == len(endings)
    numbers = _column(rows, _ENDINGS)
    for start in range(1, right, _CHUNK):
        are_told = are_told and max(numbers[start : start + _CHUNK].tolist()) < len(endings)
    return (right * ROW_BYTES, covered) if are_told else (0, 0)


def _endings_in(rows: memoryview) -> list[bytes]:
    """How records ended, as the rows tell it, by number."""
    lengths = _column(rows, _LENGTHS)
    found = []
    for start in range(1, len(lengths), _CHUNK):
        sizes = lengths[start : start + _CHUNK].tolist()
        if 0 in sizes:
            told = (start + n for n, size in enumerate(sizes) if not size)
            found += [_ENDING.unpack_from(rows, ROW_BYTES * row)[2] for row in told]
    return found


def _bounded(tokens: int | None) -> int:
    return tokens if tokens is not None and 0 <= tokens < MOST_TOKENS else _NO_TOKENS


def _words(ending: bytes) -> Ending:
    status, _, rest = ending.rstrip(b"\0").decode(errors="replace").partition("\0")
    passed, _, error_class = rest.partition("\0")
    # Few words, many entries: each word is held once.
    return Ending(
        intern(status), _HAS_PASSED.get(passed), intern(error_class) if error_class else None
    )


def _column(rows: memoryview, column: _Column) -> memoryview[Any]:
    kind, first, step = column
    return rows.cast(kind)[first::step]


def _sorted_into_buckets(column: memoryview[int]) -> dict[int, array[int]]:
    """The numbers of the items of a column by their value, in order."""
    buckets: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
    for start in range(0, len(column), _CHUNK):
        for number, bucket in enumerate(column[start : start + _CHUNK].tolist(), start):
            buckets[bucket].append(number)
    return buckets
