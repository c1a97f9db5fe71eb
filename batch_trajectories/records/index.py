"""The rows of `records.idx`: 64 bytes per record, so a start can load a million at once.

Row 0 marks the format and has a checksum of the bytes up to a size: an index with a changed row is
not used, and rows after this size are made again. Any other row holds the task key of a record,
its place in `records.jsonl`, and the numbers for the totals. An ending (status, check result and
error class) is text; each distinct ending has one row of its own, with length 0, and rows of
records refer to it by its number. Row size divides the block size of a disk, so a power loss takes
whole rows, and a row of zeros is detected because its offset is wrong.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, islice
from math import isnan, nan
from typing import Any, Literal, NamedTuple
from zlib import crc32

from agent.messages.message import MAX_TOKEN_COUNT
from batch_trajectories.records.checks import CHECK_FAILED, Judgement, has_passed, judge_record
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.tasks import task_key

ROW_BYTES = 64
VERSION = 3
FORMAT = f"batch records index {VERSION}, {sys.byteorder}".encode()
MARK = FORMAT.ljust(ROW_BYTES - 1) + b"\n"
"""Row 0 of an index without a checksum."""

_RECORD = struct.Struct("=16sQIHHIIHHIIfd")
"""Task key, offset, length, ending, attempt, turns, tool calls, tokens in and out (the high 16 bits
of each, then the low 32 bits of each), reward, dollars."""
_ENDING = struct.Struct("=16xQI2x34s")
"""Offset of the next record, 0, and the ending: status, check result and error class, separated
by NUL."""


class Column(NamedTuple):
    """A column of the rows: where a row has its value, to read all of them without a loop."""

    kind: Literal["Q", "I", "H", "f", "d"]
    """The type of the values, as `array` and `memoryview` name it."""
    first: int
    """Number of the value in a row, if the whole row had this type."""
    per_row: int
    """Values of this type in a whole row."""


OFFSETS = Column("Q", 2, 8)
LENGTHS = Column("I", 6, 16)
ENDINGS = Column("H", 14, 32)
_BUCKETS = Column("H", 0, 32)
_TURNS = Column("I", 8, 16)
_CALLS = Column("I", 9, 16)
_INPUT_HIGH = Column("H", 20, 32)
_INPUT_LOW = Column("I", 11, 16)
_OUTPUT_HIGH = Column("H", 21, 32)
_OUTPUT_LOW = Column("I", 12, 16)
_REWARDS = Column("f", 13, 16)
_COSTS = Column("d", 7, 8)

_MAX_ATTEMPTS = 2**16 - 1
_LOW_BITS = 2**32 - 1
_NO_TOKENS = 2**48 - 1
"""Stands for an unknown number of tokens."""
_MAX_REWARD = 3.4e38
"""The range of a four-byte float."""
_ENDING_BYTES = 34
"""Length of an ending with its last NUL. An earlier version has cut an ending that lacks it."""
_VERDICT_WORDS = {None: "", True: "passed", False: "not"}
_SHORT_VERDICT_WORDS = {None: "", True: "+", False: "-"}
"""Shorter words, for endings that would be too long."""
_SHORT_CHECK_FAILED = "!"
_VERDICTS = {
    word: verdict
    for words in (_VERDICT_WORDS, _SHORT_VERDICT_WORDS)
    for verdict, word in words.items()
}
_SUMMED = (
    ENDINGS,
    _TURNS,
    _CALLS,
    _INPUT_HIGH,
    _INPUT_LOW,
    _OUTPUT_HIGH,
    _OUTPUT_LOW,
    _COSTS,
)
"""Columns that `Index.sums` reads."""
CHUNK = 1 << 13
_FINE_MASK = 2**16 - 1
"""Selects one of so many buckets that a key is found at once."""
_COARSE_MASK = 2**12 - 1
"""Selects one of fewer buckets, which take 30 MB less per million rows; to visit all of them."""


class IndexEntry(NamedTuple):
    """One record in the index: its place, and the numbers for the totals."""

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
    """The class of the error that failed the task; `CHECK_FAILED` if only its check failed."""
    verdict: bool | None
    """The verdict of the check; see `records.checks`."""
    reward: float | None
    """The reward, to seven digits."""

    @property
    def has_replies(self) -> bool:
        """Whether any reply was paid for; one that cannot be used is no turn, but has tokens."""
        return self.turns > 0 or (self.input_tokens, self.output_tokens) != (None, None)

    @property
    def passed(self) -> bool | None:
        """Whether the conversation passed; see `has_passed`."""
        return has_passed(self.verdict, self.reward)

    @property
    def check_failed(self) -> bool:
        """Whether its check gave no result."""
        return Ending(self.status, self.verdict, self.error_class).check_failed


class Ending(NamedTuple):
    """The ending of a record; many records share one."""

    status: str
    verdict: bool | None
    error_class: str | None

    @property
    def check_failed(self) -> bool:
        """Whether its check gave no result."""
        return self.error_class == CHECK_FAILED and self.status != "failed"


@dataclass(slots=True)
class Sums:
    """Sums over records; unknown numbers of tokens and dollars count as 0."""

    endings: Counter[Ending] = field(default_factory=Counter)
    turns: int = 0
    tool_calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    tokens_unknown: int = 0
    """Records with turns but without token counts."""
    cost_usd: float = 0.0
    cost_unknown: int = 0
    """Records with turns of unknown cost."""


class IndexFields(NamedTuple):
    """Facts of a record that its row in the index holds; workers send them as a JSON list."""

    id: str
    input_digest: str
    status: str
    attempt: int
    turns: int
    tool_calls: int
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    error_class: str | None
    """The class of the error that failed the task; `CHECK_FAILED` if only its check failed."""
    verdict: bool | None
    reward: float | None

    @property
    def passed(self) -> bool | None:
        """Whether the conversation passed; see `has_passed`."""
        return has_passed(self.verdict, self.reward)


def index_fields(record: Record) -> IndexFields:
    """The facts of a record that the index holds."""
    usage = record.usage or {}
    judgement = judge_record(record)
    return IndexFields(
        id=record.id,
        input_digest=record.input_digest,
        status=record.status,
        attempt=record.attempt,
        turns=len(record.own_turns),
        tool_calls=len(record.own_tool_calls),
        input_tokens=usage.get("input_tokens"),
        output_tokens=usage.get("output_tokens"),
        cost_usd=record.cost_usd,
        error_class=_error_class(record, judgement),
        verdict=judgement.verdict,
        reward=judgement.reward,
    )


def _error_class(record: Record, judgement: Judgement) -> str | None:
    if record.error is not None:
        return record.error.error_class
    return None if judgement.error is None else CHECK_FAILED


class RowMaker:
    """Makes the rows of an index, record by record."""

    def __init__(self, rows: bytes = MARK) -> None:
        """`rows` are the rows so far."""
        endings = endings_in(memoryview(rows))
        self._numbers = {ending: number for number, ending in enumerate(endings)}
        self._known: dict[Ending, int] = {}
        """The numbers by ending: a cache, which saves encoding the endings."""

    def rows(self, fields: IndexFields, offset: int, length: int) -> bytes:
        """The row of a record, preceded by a row for its ending if that is new.

        Raises `ValueError` if a field has another type than it should.
        """
        reward, cost = fields.reward, fields.cost_usd
        ending = Ending(fields.status, fields.verdict, fields.error_class)
        try:
            if (number := self._known.get(ending, -1)) < 0:
                text = _ending_text(ending)
                number = self._numbers.get(text, len(self._numbers))
            input_tokens = _stored_tokens(fields.input_tokens)
            output_tokens = _stored_tokens(fields.output_tokens)
            row = _RECORD.pack(
                task_key(fields.id, fields.input_digest),
                offset,
                length,
                number,
                min(fields.attempt, _MAX_ATTEMPTS),
                fields.turns,
                fields.tool_calls,
                input_tokens >> 32,
                output_tokens >> 32,
                input_tokens & _LOW_BITS,
                output_tokens & _LOW_BITS,
                nan if reward is None else max(-_MAX_REWARD, min(reward, _MAX_REWARD)),
                nan if cost is None else cost,
            )
        except (struct.error, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise ValueError(fields) from error
        if number < len(self._numbers):
            self._known[ending] = number
            return row
        self._numbers[text] = number
        return _ENDING.pack(offset, 0, text) + row


class Index(Mapping[bytes, IndexEntry]):
    """The last record of each task of a run, by task key.

    Needs no object per record: only its row, and 4 or 8 bytes more once tasks are looked up.
    """

    def __init__(self, rows: bytes) -> None:
        """`rows` must be valid; see `valid_rows`."""
        self._rows = rows
        self._view = memoryview(rows)
        self._endings = [_parse_ending(ending) for ending in endings_in(self._view)]

    @property
    def rows(self) -> bytes:
        """The bytes of all rows."""
        return self._rows

    def __getitem__(self, key: bytes) -> IndexEntry:
        if len(key) == 16:
            for row in reversed(self._fine_buckets.get(int.from_bytes(key[:2], sys.byteorder), ())):
                if self.key(row) == key:
                    return self.entry(row)
        raise KeyError(key)

    def __iter__(self) -> Iterator[bytes]:
        for rows in self._fine_buckets.values():
            yield from {self.key(row): None for row in rows}

    def __len__(self) -> int:
        return sum(len({self.key(row) for row in rows}) for rows in self._fine_buckets.values())

    def entry(self, row: int) -> IndexEntry:
        """The record of one row; rows of records start at 1."""
        (
            _key,
            offset,
            length,
            ending,
            attempt,
            turns,
            tool_calls,
            input_high,
            output_high,
            input_low,
            output_low,
            reward,
            cost_usd,
        ) = _RECORD.unpack_from(self._view, ROW_BYTES * row)
        input_tokens = input_high << 32 | input_low
        output_tokens = output_high << 32 | output_low
        status, verdict, error_class = self._endings[ending]
        return IndexEntry(
            offset=offset,
            length=length,
            status=status,
            attempt=attempt,
            turns=turns,
            tool_calls=tool_calls,
            input_tokens=input_tokens if input_tokens < MAX_TOKEN_COUNT else None,
            output_tokens=output_tokens if output_tokens < MAX_TOKEN_COUNT else None,
            cost_usd=None if isnan(cost_usd) else cost_usd,
            error_class=error_class,
            verdict=verdict,
            reward=None if isnan(reward) else reward,
        )

    def records(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """All records in file order, including those that a later record replaces."""
        for row, length in enumerate(column_view(self._view, LENGTHS)):
            if row and length:
                yield self.key(row), self.entry(row)

    def written(self) -> int:
        """Number of all records, including those that a later record replaces."""
        return len(self._view) // ROW_BYTES - 1 - len(self._endings)

    def current_entries(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield the record that counts for each task, with the task's key, in file order."""
        return ((self.key(row), self.entry(row)) for row in self.current_rows())

    def current_rows(self) -> array[int]:
        """The rows of the records that count, in file order."""
        replaced = {row for row, _ in self.repeated()}
        rows = enumerate(column_view(self._view, LENGTHS))
        return array("I", (row for row, size in rows if row and size and row not in replaced))

    def latest(self) -> Iterator[tuple[bytes, IndexEntry]]:
        """Yield the record that counts for each task, with the task's key, the last one first."""
        seen = set()
        lengths = column_view(self._view, LENGTHS)
        for row in reversed(range(1, len(lengths))):
            if lengths[row] and (key := self.key(row)) not in seen:
                seen.add(key)
                yield key, self.entry(row)

    def places(self, rows: array[int]) -> tuple[array[int], array[int]]:
        """The offsets and lengths of the records in these rows; 0 for row 0.

        The lengths replace the rows in the same array, which saves 4 MB per million.
        """
        all_offsets = column_view(self._view, OFFSETS)
        all_lengths = column_view(self._view, LENGTHS)
        offsets = array("Q", [0]) * len(rows)
        for number, row in enumerate(rows):
            if row:
                offsets[number], rows[number] = all_offsets[row], all_lengths[row]
        return offsets, rows

    def endings(self, rows: Iterable[int]) -> Iterator[Ending | None]:
        """The endings of the records in these rows; None for row 0."""
        numbers = column_view(self._view, ENDINGS)
        return (self._endings[numbers[row]] if row else None for row in rows)

    def passed(self, rows: Iterable[int]) -> Iterator[bool | None]:
        """Whether the records in these rows passed; None for row 0."""
        for ending, reward in self.judgements(rows):
            yield None if ending is None else has_passed(ending.verdict, reward)

    def judgements(self, rows: Iterable[int]) -> Iterator[tuple[Ending | None, float | None]]:
        """The endings and rewards of the records in these rows; None for row 0."""
        endings, rewards = column_view(self._view, ENDINGS), column_view(self._view, _REWARDS)
        for row in rows:
            if row:
                reward = rewards[row]
                yield self._endings[endings[row]], None if isnan(reward) else reward
            else:
                yield None, None

    def sums(self, rows: Iterable[int]) -> Sums:
        """Sums over the records in these rows, without an object per record."""
        sums = Sums()
        columns = {column: column_view(self._view, column) for column in _SUMMED}
        left = iter(rows)
        while chunk := [*islice(left, CHUNK)]:
            values = {name: [column[row] for row in chunk] for name, column in columns.items()}
            for number, count in Counter(values[ENDINGS]).items():
                sums.endings[self._endings[number]] += count
            turns, costs = values[_TURNS], values[_COSTS]
            sums.turns += sum(turns)
            sums.tool_calls += sum(values[_CALLS])
            read = _join_bits(values[_INPUT_HIGH], values[_INPUT_LOW])
            written = _join_bits(values[_OUTPUT_HIGH], values[_OUTPUT_LOW])
            sums.input_tokens += sum([number for number in read if number < MAX_TOKEN_COUNT])
            sums.output_tokens += sum([number for number in written if number < MAX_TOKEN_COUNT])
            # As `IndexEntry.has_replies`.
            paid = [
                count > 0 or min(in_, out) < MAX_TOKEN_COUNT
                for count, in_, out in zip(turns, read, written, strict=True)
            ]
            sums.tokens_unknown += sum(
                [
                    is_paid and max(in_, out) >= MAX_TOKEN_COUNT
                    for is_paid, in_, out in zip(paid, read, written, strict=True)
                ]
            )
            sums.cost_unknown += sum(
                [is_paid and isnan(cost) for is_paid, cost in zip(paid, costs, strict=True)]
            )
            for cost in costs:
                if not isnan(cost):
                    sums.cost_usd += cost
        return sums

    def has_turns(self) -> bool:
        """Whether any record has a model reply."""
        return any(entry.turns for _, entry in self.records())

    def costs(self) -> tuple[float, int]:
        """The cost of all records together, and how many have replies of unknown cost.

        Includes records that later ones replaced: they were paid for.
        """
        columns = [column_view(self._view, column) for column in (LENGTHS, _TURNS, _COSTS)]
        total, unknown = 0.0, 0
        for start in range(1, len(columns[0]), CHUNK):
            chunk = (column[start : start + CHUNK].tolist() for column in columns)
            for row, (length, turns, cost) in enumerate(zip(*chunk, strict=True), start):
                if not isnan(cost):
                    total += cost if length else 0.0
                elif length and (turns or self.entry(row).has_replies):
                    unknown += 1
        return total, unknown

    def repeated(self) -> Iterator[tuple[int, int]]:
        """Pairs of rows: each record that replaces another, after the one that it replaces."""
        for rows in self._coarse_buckets.values():
            if len(set(map(self.key, rows))) == len(rows):
                continue
            last: dict[bytes, int] = {}
            for row in rows:
                key = self.key(row)
                if key in last:
                    yield last[key], row
                last[key] = row

    def match(self, keys: bytes) -> tuple[array[int], int]:
        """Find the row of each task key (16 bytes each, all different); 0 for no record.

        Also returns the number of recorded tasks that are not among the keys. Compares bucket by
        bucket, so only a few keys at a time become objects.
        """
        rows = array("I", bytes(4 * (len(keys) // 16)))
        wanted = _sort_into_buckets(memoryview(keys).cast("H")[::8], _COARSE_MASK)
        others, all_rows = 0, self._rows
        for bucket, places in self._coarse_buckets.items():
            row_of = {all_rows[64 * row : 64 * row + 16]: row for row in places}
            for number in wanted.get(bucket, ()):
                rows[number] = row_of.pop(keys[16 * number : 16 * number + 16], 0)
            others += len(row_of)
        return rows, others

    def key(self, row: int) -> bytes:
        """The task key of the record of one row."""
        return self._rows[ROW_BYTES * row : ROW_BYTES * row + 16]

    @cached_property
    def _fine_buckets(self) -> Mapping[int, array[int]]:
        return self._rows_by_bucket(_FINE_MASK)

    @cached_property
    def _coarse_buckets(self) -> Mapping[int, array[int]]:
        return self._rows_by_bucket(_COARSE_MASK)

    def _rows_by_bucket(self, mask: int) -> Mapping[int, array[int]]:
        """The rows of records, sorted by these bits of the first two bytes of their task keys."""
        buckets = _sort_into_buckets(column_view(self._view, _BUCKETS), mask)
        lengths = column_view(self._view, LENGTHS)
        for bucket in {0, int.from_bytes(MARK[:2], sys.byteorder) & mask} & buckets.keys():
            buckets[bucket] = array("I", (row for row in buckets[bucket] if row and lengths[row]))
        return buckets


def endings_in(rows: memoryview) -> list[bytes]:
    """The endings in the rows, by number."""
    lengths = column_view(rows, LENGTHS)
    endings = []
    for start in range(1, len(lengths), CHUNK):
        sizes = lengths[start : start + CHUNK].tolist()
        if 0 in sizes:
            without_length = (start + n for n, size in enumerate(sizes) if not size)
            endings += [_ENDING.unpack_from(rows, ROW_BYTES * row)[2] for row in without_length]
    return endings


def are_whole(endings: Iterable[bytes]) -> bool:
    """Whether no ending was cut, as earlier versions did: `check_failed` to `check_faile`."""
    return not any(ending[-1] for ending in endings)


def _ending_text(ending: Ending) -> bytes:
    status, verdict, error_class = ending
    text = "\0".join((status, _VERDICT_WORDS[verdict], error_class or "")).encode()
    if len(text) >= _ENDING_BYTES:
        short_class = _SHORT_CHECK_FAILED if error_class == CHECK_FAILED else error_class or ""
        text = "\0".join((status, _SHORT_VERDICT_WORDS[verdict], short_class)).encode()
    return text[: _ENDING_BYTES - 1].ljust(_ENDING_BYTES, b"\0")


def _stored_tokens(tokens: int | None) -> int:
    return tokens if tokens is not None and 0 <= tokens < MAX_TOKEN_COUNT else _NO_TOKENS


def _join_bits(high: Sequence[int], low: Sequence[int]) -> list[int]:
    """The numbers whose high and low bits these are."""
    return [upper << 32 | lower for upper, lower in zip(high, low, strict=True)]


def _parse_ending(ending: bytes) -> Ending:
    status, _, rest = ending.rstrip(b"\0").decode(errors="replace").partition("\0")
    verdict, _, error_class = rest.partition("\0")
    if error_class == _SHORT_CHECK_FAILED:
        error_class = CHECK_FAILED
    # Few words, many entries: keep each word once.
    return Ending(
        sys.intern(status),
        _VERDICTS.get(verdict),
        sys.intern(error_class) if error_class else None,
    )


def column_view(rows: memoryview, column: Column) -> memoryview[Any]:
    """The values of one column, without a copy."""
    return rows.cast(column.kind)[column.first :: column.per_row]


def _sort_into_buckets(column: memoryview[int], mask: int) -> dict[int, array[int]]:
    """The numbers of the items of a column by these bits of their value, in order."""
    buckets: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
    for start in range(0, len(column), CHUNK):
        for number, value in enumerate(column[start : start + CHUNK].tolist(), start):
            buckets[value & mask].append(number)
    return buckets


# Which bytes of `records.idx` can be trusted; see `records.index` for its rows.


def make_mark(size: int, checksum: int) -> bytes:
    """Row 0 of an index whose first `size` bytes, without this row, have this CRC-32."""
    return (b"%b %016x %08x" % (FORMAT, size, checksum)).ljust(ROW_BYTES - 1) + b"\n"


def is_index(content: bytes) -> bool:
    """Whether this is an index of this version."""
    return content.startswith(FORMAT) and content[ROW_BYTES - 1 : ROW_BYTES] == b"\n"


def is_earlier_index(content: bytes) -> bool:
    """Whether an earlier version of this program wrote this index; it is made again.

    Those of this format are, if they have an ending that was cut.
    """
    earlier = (b"batch records index %d," % version for version in range(1, VERSION))
    if content.startswith(tuple(earlier)):
        return True
    whole_rows = memoryview(content)[: len(content) // ROW_BYTES * ROW_BYTES]
    return is_index(content) and not are_whole(endings_in(whole_rows))


def checked_bytes(content: bytes) -> int:
    """The number of bytes that match the checksum; 0 if the index is damaged or no index."""
    if content.startswith(MARK):
        return len(content)
    try:
        size, checksum = (int(word, 16) for word in content[len(FORMAT) : ROW_BYTES].split())
    except ValueError:
        return 0
    is_valid = (
        content.startswith(make_mark(size, checksum))
        and size <= len(content)
        and crc32(memoryview(content)[ROW_BYTES:size]) == checksum
    )
    return size if is_valid else 0


def valid_rows(content: bytes, records_size: int) -> tuple[int, int]:
    """The number of valid bytes of an index, and of bytes of the records that they cover.

    Each record must begin where the one before it ends. 0, 0 if the index is damaged or not an
    index.
    """
    checked = checked_bytes(content)
    if checked < ROW_BYTES:
        return 0, 0
    view = memoryview(content)[: checked // ROW_BYTES * ROW_BYTES]
    offsets, lengths = column_view(view, OFFSETS), column_view(view, LENGTHS)
    covered, valid = 0, 1
    for start in range(1, len(offsets), CHUNK):
        sizes = lengths[start : start + CHUNK].tolist()
        *begins, end = accumulate(sizes, initial=covered)
        if offsets[start : start + CHUNK].tolist() == begins and end <= records_size:
            covered, valid = end, start + len(sizes)
            continue
        for row, size in enumerate(sizes, start):
            if offsets[row] != covered or covered + size > records_size:
                break
            covered, valid = covered + size, row + 1
        break
    while valid > 1 and not lengths[valid - 1]:
        valid -= 1  # the row of an ending without the record that it was made for
    rows = view[: valid * ROW_BYTES]
    endings = endings_in(rows)
    are_known = all(map(any, endings)) and are_whole(endings) and len(set(endings)) == len(endings)
    numbers = column_view(rows, ENDINGS)
    for start in range(1, valid, CHUNK):
        are_known = are_known and max(numbers[start : start + CHUNK].tolist()) < len(endings)
    return (valid * ROW_BYTES, covered) if are_known else (0, 0)
