"""Reads the records of a run as Arrow tables with typed columns, a batch at a time.

Only the parts of a record that a table shows are decoded. A batch has about 8 MB of records, so
memory grows only with the result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, cast, get_args

import msgspec

from batch_trajectories.basics.process import no_garbage_collection
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.records.checks import judge_record, record_rewards
from batch_trajectories.records.files import DamagedLine, verify_checksum
from batch_trajectories.records.index import Index
from batch_trajectories.records.reader import open_index
from batch_trajectories.records.record_types import (
    CheckResult,
    Note,
    Number,
    Record,
    Score,
    StoredCall,
    StoredError,
    StoredTurn,
    ToolRun,
    UsageSums,
    decode_record,
)
from batch_trajectories.records.records import unreadable_record
from batch_trajectories.records.scores import Scores

if TYPE_CHECKING:
    import pyarrow as pa

TableName = Literal["tasks", "turns", "calls", "scores"]

_BATCH_BYTES = 8 << 20


class _Time(msgspec.Struct, gc=False):
    started_at: Number
    duration_s: Number
    inherited: bool | None = None


class _Facts(msgspec.Struct, gc=False, kw_only=True):
    """The fields of a record that all tables need."""

    id: str
    status: str
    input_digest: str
    finished_at: Number
    status_reason: str | None = None
    check: CheckResult | None = None
    scores: list[Score] | None = None
    options: dict[str, Any] | None = None
    notes: tuple[Note, ...] = ()


class _TaskFacts(_Facts, kw_only=True):
    prompt_id: str
    sample: int
    attempt: int
    error: StoredError | None
    model: str | None
    model_returned: str | None
    toolsets: list[str]
    api_calls: int
    usage: UsageSums | None
    cost_usd: Number | None
    turns: list[_Time]
    tool_calls: list[ToolRun]


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str
    reasoning: str | None = None
    tool_calls: Sequence[StoredCall] = ()
    tool_call_id: str | None = None


class _TurnFacts(_Facts, kw_only=True):
    turns: list[StoredTurn]
    messages: list[_Message]
    tool_calls: list[ToolRun]

    def replies(self) -> Iterator[tuple[StoredTurn, int | None]]:
        """The turns, each with the index of its message; None if it has no message."""
        places = [n for n, message in enumerate(self.messages) if message.role == "assistant"]
        first = len(places) - len(self.turns)
        for number, turn in enumerate(self.turns, start=first):
            yield turn, places[number] if number >= 0 else None


class _Table(NamedTuple):
    """The fields of records, columns and rows of a table."""

    facts: type[_Facts]
    columns: dict[str, str]
    """The types of columns by name, in order."""
    rows: Callable[[Any], Iterator[dict[str, Any]]]
    """Makes the rows of a record, with a value for each column."""


_Row = dict[str, Any]
"""One row of a table: a value for each of its columns."""


def _task_rows(facts: _TaskFacts) -> Iterator[_Row]:
    usage: UsageSums = facts.usage or {}
    turns = [turn for turn in facts.turns if turn.inherited is None]
    inherited = len(facts.turns) - len(turns)
    tool_calls: Sequence[ToolRun] = facts.tool_calls
    if inherited:
        tool_calls = [call for call in tool_calls if call.turn > inherited]
    is_judged = facts.check is not None or facts.scores
    judgement = judge_record(cast(Record, facts)) if is_judged else None
    error = facts.error
    yield {
        "id": facts.id,
        "prompt_id": facts.prompt_id,
        "sample": facts.sample,
        "status": facts.status,
        "status_reason": facts.status_reason,
        "error_class": None if error is None else error.error_class,
        "error": None if error is None else error.message,
        "model": facts.model_returned or facts.model,
        "toolsets": facts.toolsets,
        "attempt": facts.attempt,
        "turns": len(turns),
        "tool_calls": len(tool_calls),
        "tool_errors": sum([call.is_error for call in tool_calls]),
        "api_calls": facts.api_calls,
        "input_tokens": usage.get("input_tokens"),
        "output_tokens": usage.get("output_tokens"),
        "cache_read_tokens": usage.get("cache_read_tokens"),
        "reasoning_tokens": usage.get("reasoning_tokens"),
        "cost_usd": facts.cost_usd,
        "passed": None if judgement is None else judgement.passed,
        "reward": None if judgement is None else judgement.reward,
        "started_at": turns[0].started_at if turns else None,
        "finished_at": facts.finished_at,
        "model_seconds": sum([turn.duration_s for turn in turns]),
    }


def _turn_rows(facts: _TurnFacts) -> Iterator[_Row]:
    for turn, place in facts.replies():
        usage = turn.usage
        message = None if place is None else facts.messages[place]
        yield {
            "id": facts.id,
            "turn": turn.turn,
            "model": turn.model,
            "finish_reason": turn.finish_reason,
            "input_tokens": None if usage is None else usage.input_tokens,
            "output_tokens": None if usage is None else usage.output_tokens,
            "cache_read_tokens": None if usage is None else usage.cache_read_tokens,
            "reasoning_tokens": None if usage is None else usage.reasoning_tokens,
            "cost_usd": turn.cost_usd,
            "started_at": turn.started_at,
            "duration_s": turn.duration_s,
            "waited_s": turn.waited_s,
            "inherited": turn.inherited is not None,
            "tool_calls": 0 if message is None else len(message.tool_calls),
            "content": None if message is None else message.content,
            "reasoning": None if message is None else message.reasoning,
        }


def _call_rows(facts: _TurnFacts) -> Iterator[_Row]:
    ran = {(one.turn, one.call): one for one in facts.tool_calls}
    results = {one.tool_call_id: one.content for one in facts.messages if one.role == "tool"}
    for turn, place in facts.replies():
        calls = () if place is None else facts.messages[place].tool_calls
        for number, call in enumerate(calls):
            run = ran.get((turn.turn, number))
            yield {
                "id": facts.id,
                "turn": turn.turn,
                "call": number,
                "call_id": call.id,
                "name": call.function.name,
                "arguments": call.function.arguments,
                "result": results.get(call.id),
                "is_error": None if run is None else run.is_error,
                "started_at": None if run is None else run.started_at,
                "duration_s": None if run is None else run.duration_s,
            }


def _score_rows(facts: _Facts) -> Iterator[_Row]:
    record = cast(Record, facts)
    if (check := facts.check) is not None:
        only_checked = record_rewards(cast(Record, msgspec.structs.replace(facts, scores=None)))
        passed = check.passed if isinstance(check.passed, bool) else None
        for name, reward in _or_none(only_checked.by_name):
            yield {
                "id": facts.id,
                "source": "check",
                "version": None,
                "name": name,
                "reward": reward,
                "passed": passed,
                "error": check.error,
                "at": facts.finished_at,
                "cost_usd": None,
            }
    for score in record.scores or ():
        if score.check is not None:
            continue  # it is the check of the record now
        for name, reward in _or_none(score.rewards or {}):
            yield {
                "id": facts.id,
                "source": score.source,
                "version": score.version,
                "name": name,
                "reward": reward,
                "passed": None,
                "error": score.error,
                "at": score.at,
                "cost_usd": score.cost_usd,
            }


def _or_none(rewards: Mapping[str, float]) -> Iterable[tuple[str | None, float | None]]:
    """The rewards by name; without any, one pair of None, so that a failure has a row."""
    return rewards.items() or ((None, None),)


_COUNT, _TEXT, _TIME, _NUMBER = "count", "text", "time", "number"
_FLAG, _CATEGORY, _LIST = "flag", "category", "list"

TABLES: dict[TableName, _Table] = {
    "tasks": _Table(
        facts=_TaskFacts,
        columns={
            "id": _TEXT,
            "prompt_id": _TEXT,
            "sample": _COUNT,
            "status": _CATEGORY,
            "status_reason": _TEXT,
            "error_class": _CATEGORY,
            "error": _TEXT,
            "model": _CATEGORY,
            "toolsets": _LIST,
            "attempt": _COUNT,
            "turns": _COUNT,
            "tool_calls": _COUNT,
            "tool_errors": _COUNT,
            "api_calls": _COUNT,
            "input_tokens": _COUNT,
            "output_tokens": _COUNT,
            "cache_read_tokens": _COUNT,
            "reasoning_tokens": _COUNT,
            "cost_usd": _NUMBER,
            "passed": _FLAG,
            "reward": _NUMBER,
            "started_at": _TIME,
            "finished_at": _TIME,
            "model_seconds": _NUMBER,
        },
        rows=_task_rows,
    ),
    "turns": _Table(
        facts=_TurnFacts,
        columns={
            "id": _TEXT,
            "turn": _COUNT,
            "model": _CATEGORY,
            "finish_reason": _CATEGORY,
            "input_tokens": _COUNT,
            "output_tokens": _COUNT,
            "cache_read_tokens": _COUNT,
            "reasoning_tokens": _COUNT,
            "cost_usd": _NUMBER,
            "started_at": _TIME,
            "duration_s": _NUMBER,
            "waited_s": _NUMBER,
            "inherited": _FLAG,
            "tool_calls": _COUNT,
            "content": _TEXT,
            "reasoning": _TEXT,
        },
        rows=_turn_rows,
    ),
    "calls": _Table(
        facts=_TurnFacts,
        columns={
            "id": _TEXT,
            "turn": _COUNT,
            "call": _COUNT,
            "call_id": _TEXT,
            "name": _CATEGORY,
            "arguments": _TEXT,
            "result": _TEXT,
            "is_error": _FLAG,
            "started_at": _TIME,
            "duration_s": _NUMBER,
        },
        rows=_call_rows,
    ),
    "scores": _Table(
        facts=_Facts,
        columns={
            "id": _TEXT,
            "source": _CATEGORY,
            "version": _TEXT,
            "name": _CATEGORY,
            "reward": _NUMBER,
            "passed": _FLAG,
            "error": _TEXT,
            "at": _TIME,
            "cost_usd": _NUMBER,
        },
        rows=_score_rows,
    ),
}


def find_table(name: str) -> _Table:
    """The table with this name. Raises `ValueError`, which lists the names."""
    if name not in TABLES:
        names = get_args(TableName)
        hint = did_you_mean(name, names) or f"there are {', '.join(names)}"
        raise ValueError(f"no table is named {name!r}; {hint}")
    return TABLES[name]


def table_schema(name: str) -> pa.Schema:
    """The columns of a table."""
    import pyarrow as pa

    types = {
        _COUNT: pa.int64(),
        _TEXT: pa.string(),
        _TIME: pa.timestamp("us", tz="UTC"),
        _NUMBER: pa.float64(),
        _FLAG: pa.bool_(),
        _CATEGORY: pa.dictionary(pa.int32(), pa.string()),
        _LIST: pa.list_(pa.string()),
    }
    return pa.schema([(column, types[kind]) for column, kind in find_table(name).columns.items()])


def read_batches(run_dir: Path, table_name: str) -> Iterator[pa.RecordBatch]:
    """Read a table in batches, in the order in which records were written.

    Raises `ValueError` for another name, `UnreadableRecord`, and what `open_index` raises.
    """
    import pyarrow as pa

    table, schema = find_table(table_name), table_schema(table_name)
    decode = msgspec.json.Decoder(table.facts).decode
    scores = Scores(run_dir)
    with open_index(run_dir) as (index, file):
        for places in _places(index):
            with no_garbage_collection():  # there are no cycles, and it would look at each value
                read = _read(file, places, decode)
                rows = [row for facts in read for row in table.rows(scores.extend_record(facts))]
                arrays = [
                    _array([row[name] for row in rows], schema.field(name).type, kind)
                    for name, kind in table.columns.items()
                ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _places(index: Index) -> Iterator[list[tuple[int, int]]]:
    """Offsets and lengths of the records that count, in file order, some megabytes at a time."""
    batch: list[tuple[int, int]] = []
    size = 0
    for offset, length in zip(*index.places(index.current_rows()), strict=True):
        batch.append((offset, length))
        size += length
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read(
    file: BinaryIO, places: Sequence[tuple[int, int]], decode: Callable[[bytes], Any]
) -> Iterator[Any]:
    """Read the facts of the records at these offsets and lengths."""
    first_offset, _ = places[0]
    last_offset, last_length = places[-1]
    size = last_offset + last_length - first_offset
    are_adjacent = size == sum(length for _, length in places)
    block = os.pread(file.fileno(), size, first_offset) if are_adjacent else b""
    for offset, length in places:
        if block:
            begin = offset - first_offset
            line = block[begin : begin + length]
        else:
            line = os.pread(file.fileno(), length, offset)
        try:
            verify_checksum(line)
            yield _add_judgement(decode(line), line)
        except (DamagedLine, msgspec.MsgspecError) as error:
            damage = DamagedLine(str(error))
            raise unreadable_record(file, offset, line, damage) from error


def _add_judgement(facts: _Facts, line: bytes) -> _Facts:
    """Add the verdict of a comparison with the expected answer as a check; returns the facts."""
    if facts.options is not None and facts.options.get("check_expected"):
        # The comparison needs the whole record.
        verdict, reward, error = judge_record(decode_record(line))
        facts.options = None
        if reward is not None or error is not None:
            facts.check = CheckResult(passed=verdict, reward=reward, error=error)
    return facts


def _array(values: Sequence[Any], type: Any, kind: str) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if kind == _CATEGORY:
        return pa.array(values, pa.string()).dictionary_encode()
    if kind in (_TIME, _NUMBER):
        numbers = pa.array([None if v is None else float(v) for v in values], pa.float64())
        if kind == _NUMBER:
            return numbers
        return pc.round(pc.multiply(numbers, 1e6)).cast(pa.int64()).cast(type)
    return pa.array(values, type)
