"""The numbers of the report's charts, of the rows that a filter leaves."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from batch_trajectories.view.index.filters import COMPUTED
from batch_trajectories.view.index.table import POOL, Masks, Table, count_selected

_STEPS = 24
_TIMES = 48
_GROWS_ABOVE = 60
"""Values that are as far apart are shown in growing steps."""

_SUMMED = (
    "turns",
    "calls",
    "failed_calls",
    "reasoned",
    "input_tokens",
    "cached_tokens",
    "output_tokens",
    "cost_usd",
    "reward",
    "duration_s",
)
_KNOWN = ("input_tokens", "cached_tokens", "output_tokens", "cost_usd", "reward", "passed")
_HISTOGRAMS = ("turns", "duration_s", "input_tokens", "output_tokens", "cost_usd", "reward")
_NEEDED = (
    *_SUMMED,
    "passed",
    "status",
    "model",
    "finished_at",
    "tool_names",
    "tool_calls",
    "tool_failed",
    "failure_kinds",
    "failure_calls",
    "flags",
)


_OPTIONAL = (
    "answer",
    "turns",
    "reward",
    "expected",
    "calls",
    "input_tokens",
    "output_tokens",
    "cost_usd",
    "duration_s",
)
"""Columns that the page leaves out of its table where no row has something there."""


_USUAL = {"turns": [0, 1], "reward": [0, 1]}
"""Values of optional columns that are not worth a column; of the others it is 0."""


def make_charts(table: Table, masks: Masks) -> dict[str, Any]:
    """See the API's `charts`; JSON-ready."""
    columns = table.columns(masks, _NEEDED)

    def make_histogram(name: str) -> dict[str, Any]:
        return histogram(columns[name], is_whole=name == "turns", passed=columns["passed"])

    turns, reasoned, passed = columns["turns"], columns["reasoned"], columns["passed"]
    has_turns = pc.greater(turns, 0)
    all_reasoned = pc.and_(has_turns, pc.equal(reasoned, turns))
    none_reasoned = pc.and_(has_turns, pc.equal(reasoned, 0))
    some = _count(has_turns) - _count(all_reasoned) - _count(none_reasoned)
    return {
        "count": count_selected(masks),
        "completed": _count(pc.equal(columns["status"], "completed")),
        "passed": _count(passed),
        "not_passed": _count(pc.invert(passed)),
        "unjudged": columns["reward"].null_count,
        "sums": {name: pc.sum(columns[name]).as_py() or 0 for name in _SUMMED},
        "known": {name: len(columns[name]) - columns[name].null_count for name in _KNOWN},
        "statuses": count_values(columns["status"]),
        "models": count_values(columns["model"]),
        "tools": _tools(columns),
        "failures": _sum_counts(columns["failure_kinds"], columns["failure_calls"]),
        "flags": count_values(pc.list_flatten(columns["flags"])),
        "reasoning": {"all": _count(all_reasoned), "some": some, "none": _count(none_reasoned)},
        "over_time": _count_over_time(columns["finished_at"], columns["passed"]),
        "histograms": dict(zip(_HISTOGRAMS, POOL.map(make_histogram, _HISTOGRAMS), strict=True)),
    }


def list_choices(table: Table) -> dict[str, list[list[Any]]]:
    """List the values that rows of the run can be filtered by, with counts, most frequent first."""
    masks = table.counting
    names = ("status", "model", "error", "exported", "tool_names", "flags")
    columns = table.columns(masks, names)
    optional = table.columns(masks, _OPTIONAL)
    computed = [[name, count_selected(table.select(choice))] for name, choice in COMPUTED.items()]
    flags = [*computed, *count_values(pc.list_flatten(columns["flags"]))]
    return {
        **{name: count_values(columns[name]) for name in ("status", "model", "error", "exported")},
        "tool": count_values(pc.list_flatten(columns["tool_names"])),
        "ended": pc.max(table.columns(masks, ["finished_at"])["finished_at"]).as_py(),
        "has": [name for name, column in optional.items() if _has_any(name, column)],
        "flag": sorted((flag for flag in flags if flag[1]), key=lambda flag: -flag[1]),
    }


def _has_any(name: str, column: pa.ChunkedArray) -> bool:
    """Whether a column says more than zeros, one turn, and rewards that the verdict says."""
    if pa.types.is_string(column.type):
        return bool(pc.any(pc.not_equal(column, "")).as_py())
    usual = pa.array(_USUAL.get(name, [0]), column.type)
    return bool(pc.any(pc.invert(pc.is_in(column.drop_null(), value_set=usual))).as_py())


def count_values(column: pa.ChunkedArray) -> list[list[Any]]:
    """Known values and how often they are there, most frequent first."""
    counts = pc.value_counts(column)
    pairs = zip(counts.field("values").to_pylist(), counts.field("counts").to_pylist(), strict=True)
    known = [[value, count] for value, count in pairs if value is not None]
    return sorted(known, key=lambda pair: (-pair[1], pair[0]))


def _count(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)


def _tools(columns: dict[str, pa.ChunkedArray]) -> list[list[Any]]:
    lists = {
        "name": pc.list_flatten(columns["tool_names"]),
        "calls": pc.list_flatten(columns["tool_calls"]),
        "failed": pc.list_flatten(columns["tool_failed"]),
    }
    summed = pa.table(lists).group_by("name").aggregate([("calls", "sum"), ("failed", "sum")])
    values = [summed[name].to_pylist() for name in ("name", "calls_sum", "failed_sum")]
    rows = zip(*values, strict=True)
    return sorted(map(list, rows), key=lambda tool: (-tool[1], tool[0]))


def _sum_counts(names: pa.ChunkedArray, numbers: pa.ChunkedArray) -> list[list[Any]]:
    lists = {"name": pc.list_flatten(names), "number": pc.list_flatten(numbers)}
    summed = pa.table(lists).group_by("name").aggregate([("number", "sum")])
    rows = zip(summed["name"].to_pylist(), summed["number_sum"].to_pylist(), strict=True)
    return sorted(map(list, rows), key=lambda pair: (-pair[1], pair[0]))


def _count_over_time(times: pa.ChunkedArray, passed: pa.ChunkedArray) -> dict[str, Any] | None:
    ends = pc.min_max(times).as_py()
    first, last = ends["min"], ends["max"]
    if first is None:
        return None
    span = (last - first) or 1.0
    steps = pc.floor(pc.multiply(pc.divide(pc.subtract(times, first), span), float(_TIMES)))
    return {"first": first, "last": last, **_heights_by_verdict(steps, _TIMES, passed)}


def _heights_by_verdict(
    steps: pa.ChunkedArray, number: int, passed: pa.ChunkedArray
) -> dict[str, list[int]]:
    """The number of rows in each step: all, those that passed, and those that did not."""
    return {
        "heights": _heights(steps, number),
        "passed": _heights(steps.filter(passed), number),
        "failed": _heights(steps.filter(pc.invert(passed)), number),
    }


def _heights(steps: pa.ChunkedArray, number: int) -> list[int]:
    heights = [0] * number
    for step, count in count_values(steps.cast(pa.int64())):
        heights[min(number - 1, max(0, step))] += count
    return heights


def histogram(
    values: pa.ChunkedArray, *, is_whole: bool, passed: pa.ChunkedArray
) -> dict[str, Any]:
    """Count values by step: equal steps, or growing ones if the values are far apart.

    `passed` is the verdict of each value's row. As the report's `histogramOf`.
    """
    missing = values.null_count
    if missing:
        is_known = values.is_valid()
        values, passed = values.filter(is_known), passed.filter(is_known)
    known = len(values)
    result: dict[str, Any] = {"known": known, "missing": missing, "low": None, "high": None}
    if not known:
        return result | {"median": None, "p90": None, "grows": False, "edges": [], "heights": []}
    ends = pc.min_max(values).as_py()
    low, high = ends["min"], ends["max"]
    median, p90 = pc.quantile(values, q=[0.5, 0.9], interpolation="higher").to_pylist()
    result |= {"low": low, "high": high, "median": median, "p90": p90, "grows": False}
    if low == high:
        return result | {"edges": [], "heights": []}
    positive = pc.min(values.filter(pc.greater(values, 0))).as_py() or 1
    grows = not is_whole and high / positive > _GROWS_ABOVE
    steps = max(1, min(_STEPS, int(high - low + 1))) if is_whole else _STEPS
    width = high - low + (1 if is_whole else 0)
    numbers = values.cast(pa.float64())
    if grows:
        scale = math.log(high / positive)
        at = pc.divide(
            pc.ln(pc.divide(pc.max_element_wise(numbers, float(positive)), float(positive))), scale
        )
        edges = [positive * (high / positive) ** (n / steps) for n in range(steps + 1)]
    else:
        at = pc.divide(pc.subtract(numbers, float(low)), float(width))
        edges = [low + width * n / steps for n in range(steps + 1)]
    heights = _heights_by_verdict(pc.floor(pc.multiply(at, float(steps))), steps, passed)
    return result | {"grows": grows, "edges": edges, **heights}
