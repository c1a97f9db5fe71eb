"""The facts of records as columns of Arrow, and back as rows for the page.

Texts are plain, without dictionaries, so that parts join without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from batch_trajectories.audit.verdicts import read_step, shows_defect, step_result, step_title
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import score_key
from batch_trajectories.records.tasks import task_key
from batch_trajectories.report.facts import make_table_row
from batch_trajectories.report.page.writer import training_form

FORMAT = 4
"""The version of the index; raise it when columns change, so that indexes are made again."""

_TEXTS, _COUNTS, _NAMES = pa.list_(pa.string()), pa.list_(pa.int64()), pa.list_(pa.string())
_KEY = pa.binary(16)

KINDS: Mapping[str, tuple[str, pa.DataType]] = {
    "id": ("text", pa.string()),
    "status": ("category", pa.string()),
    "reason": ("text", pa.string()),
    "error": ("category", pa.string()),
    "prompt": ("text", pa.string()),
    "answer": ("text", pa.string()),
    "expected": ("text", pa.string()),
    "step": ("text", pa.string()),
    "model": ("category", pa.string()),
    **{name: ("number", pa.int64()) for name in ("turns", "calls", "failed_calls")},
    **{f"{name}_tokens": ("number", pa.int64()) for name in ("input", "output", "cached")},
    "cached_share": ("number", pa.float64()),
    "cache_misses": ("number", pa.int64()),
    "cost_usd": ("number", pa.float64()),
    "duration_s": ("number", pa.float64()),
    "finished_at": ("time", pa.float64()),
    "passed": ("flag", pa.bool_()),
    "reward": ("number", pa.float64()),
    "reasoned": ("number", pa.int64()),
    "leaks": ("number", pa.int64()),
    "leak_calls": ("list", _TEXTS),
    "flags": ("list", _NAMES),
    "exported": ("category", pa.string()),
    "prompt_id": ("text", pa.string()),
    "sample": ("number", pa.int64()),
    "attempt": ("number", pa.int64()),
}
"""The columns that the page can filter and sort by: what they hold, and their type."""

_HIDDEN: Mapping[str, pa.DataType] = {
    "rewards": pa.string(),
    "tool_names": _NAMES,
    "tool_calls": _COUNTS,
    "tool_failed": _COUNTS,
    "missed_turns": _COUNTS,
    "failure_kinds": _NAMES,
    "failure_calls": _COUNTS,
    "key": _KEY,
    "record": _KEY,
    "offset": pa.int64(),
    "length": pa.int64(),
    "score_places": _COUNTS,
    "search": pa.string(),
}

SCHEMA = pa.schema(
    [
        *((name, type) for name, (_, type) in KINDS.items()),
        *_HIDDEN.items(),
    ]
)
_SEARCHED = ("id", "prompt", "step", "answer", "reason", "error", "model")
_ROW_COLUMNS = [name for name in SCHEMA.names if name not in ("key", "search", "offset", "length")]


class LinePlace(NamedTuple):
    """The place of a record, and of its scores in scores.jsonl."""

    offset: int
    length: int
    scores: Sequence[int] = ()


def column_values(record: Record, place: LinePlace, style: Style) -> dict[str, Any]:
    """The columns of one record."""
    own = AuthoredWork(record)
    form = training_form(record, own, style=style, key_of=len)
    row = make_table_row(record, own) | {"step": None}
    if record.audit is not None:
        row |= _step_values(record, row["flags"])
    tools, failures, rewards = row.pop("tools"), row.pop("failures"), row.pop("rewards")
    return {
        **row,
        "exported": form["file"],
        "attempt": record.attempt,
        "rewards": None if rewards is None else orjson.dumps(rewards).decode(),
        "tool_names": list(tools),
        "tool_calls": [calls for calls, _ in tools.values()],
        "tool_failed": [failed for _, failed in tools.values()],
        "failure_kinds": list(failures),
        "failure_calls": list(failures.values()),
        "key": task_key(record.id, record.input_digest),
        "record": bytes.fromhex(score_key(record)),
        "offset": place.offset,
        "length": place.length,
        "score_places": list(place.scores),
        "search": "\n".join(row[name] or "" for name in _SEARCHED).lower(),
    }


AS_EXPECTED, AGAINST = "as expected", "against its task"
"""Flags of the steps of an audit."""


def _step_values(record: Record, flags: Sequence[str]) -> dict[str, Any]:
    """The columns of a step of an audit: a step "passes" if it shows no defect of its task."""
    part = read_step(record)
    is_against = shows_defect(part)
    others = [flag for flag in flags if flag not in ("passed", "not passed")]
    return {
        "step": step_title(part),
        "answer": step_result(part),
        "passed": not is_against,
        "flags": [*others, AGAINST if is_against else AS_EXPECTED],
    }


def make_batch(values: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """The columns of some records."""
    arrays = [
        pa.array([_storable(one[field.name], field.type) for one in values], field.type)
        for field in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def make_rows(batch: pa.RecordBatch, places: Iterable[int]) -> list[dict[str, Any]]:
    """The rows of a batch at these places, in their order, as the page shows them."""
    some = batch.select(_ROW_COLUMNS).take(pa.array(places, pa.int64())).to_pylist()
    return [_row(one) for one in some]


def _row(one: dict[str, Any]) -> dict[str, Any]:
    names, calls, failed = (one.pop(f"tool_{part}") for part in ("names", "calls", "failed"))
    kinds, of_kind = one.pop("failure_kinds"), one.pop("failure_calls")
    one.pop("score_places")
    rewards = one.pop("rewards")
    return {
        **one,
        "record": one["record"].hex(),
        "rewards": None if rewards is None else orjson.loads(rewards),
        "tools": {n: [c, f] for n, c, f in zip(names, calls, failed, strict=True)},
        "failures": dict(zip(kinds, of_kind, strict=True)),
    }


def _storable(value: Any, type: pa.DataType) -> Any:
    if isinstance(value, str):  # half of a pair of surrogates is no UTF-8
        return value.encode(errors="replace").decode()
    if type == pa.float64() and value is not None:
        return float(value)
    return value
