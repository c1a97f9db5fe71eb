"""The filters of a request: read from its query, then asked of each batch of columns."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from multidict import MultiMapping

from batch_trajectories.view.index.columns import KINDS

Choice = Callable[[pa.RecordBatch], Any]
"""Says for each row of a batch whether it is chosen; null counts as false."""

EXPORTED = {"a training row": "training", "a partial row": "partial", "no row: rejected": "rejects"}


def _compares(column: str, compare: Callable[..., Any], value: Any) -> Choice:
    return lambda batch: compare(batch.column(column), value)


def _has(column: str, part: str, *, ignore_case: bool = False) -> Choice:
    return lambda batch: pc.match_substring(batch.column(column), part, ignore_case=ignore_case)


COMPUTED: Mapping[str, Choice] = {
    "failed calls": lambda batch: pc.greater(batch.column("failed_calls"), 0),
    "not completed": lambda batch: pc.not_equal(batch.column("status"), "completed"),
    "an error": lambda batch: pc.is_valid(batch.column("error")),
    "turns without reasoning": lambda batch: pc.less(
        batch.column("reasoned"), batch.column("turns")
    ),
    "a suspected leak": lambda batch: pc.greater(batch.column("leaks"), 0),
    "tokens from a cache": lambda batch: pc.greater(batch.column("cached_tokens"), 0),
    "a cache miss": lambda batch: pc.greater(batch.column("cache_misses"), 0),
    "no tool call": lambda batch: pc.equal(batch.column("calls"), 0),
    **{name: _compares("exported", pc.equal, file) for name, file in EXPORTED.items()},
    "not checked or scored": lambda batch: pc.is_null(batch.column("reward")),
}
"""Flags that are computed from other columns, as in the report's table."""

LABELS = ("keep", "reject", "fix", "disputed", "none", "any", "note", "no_loss", "preferred")

_CATEGORIES = ("status", "model", "error", "exported")
_COMPARE = {
    "eq": pc.equal,
    "ne": pc.not_equal,
    "lt": pc.less,
    "le": pc.less_equal,
    "gt": pc.greater,
    "ge": pc.greater_equal,
}
_OTHER_OPS = ("has", "null", "notnull")
KNOWN = (
    *_CATEGORIES,
    "tool",
    "flag",
    "label",
    "passed",
    "reward_min",
    "reward_max",
    "q",
    "text",
    "where",
    "ids",
    "undecided_by",
)


class BadFilter(ValueError):
    """A parameter of a request is wrong; the text names it."""


@dataclass(slots=True)
class RowFilters:
    """The filters of a request."""

    choices: list[Choice] = field(default_factory=list)
    """The filters that columns alone decide."""
    labels: list[str] = field(default_factory=list)
    undecided_by: str = ""
    """A reviewer: the rows without a verdict of theirs."""
    text: str = ""
    """Words of whole conversations."""
    source: tuple[tuple[str, str], ...] = ()
    """The parameters, which name the filter."""

    def join(self, more: Sequence[Choice] = ()) -> Choice | None:
        """One choice of all, and of `more`; None without any."""
        choices = [*self.choices, *more]
        if not choices:
            return None

        def chooses(batch: pa.RecordBatch) -> Any:
            mask = choices[0](batch)
            for other in choices[1:]:
                mask = pc.and_(mask, other(batch))
            return mask

        return chooses


def read_filters(query: MultiMapping[str]) -> RowFilters:
    """The filters in the query of a request. Raises `BadFilter`."""
    filters = RowFilters()
    filters.source = tuple(sorted((key, query_value) for key, query_value in query.items()))
    filters.source = tuple(pair for pair in filters.source if pair[0] in KNOWN)
    for name in _CATEGORIES:
        if wanted := _query_values(query, name):
            filters.choices.append(_choose_values(name, wanted))
    if tools := _query_values(query, "tool"):
        filters.choices.append(_in_list("tool_names", tools))
    for flag in _query_values(query, "flag"):
        filters.choices.append(COMPUTED.get(flag) or _in_list("flags", [flag]))
    filters.labels = _query_values(query, "label")
    if strange := set(filters.labels) - set(LABELS):
        raise BadFilter(f"label={strange.pop()}: must be one of {', '.join(LABELS)}")
    if passed := query.get("passed"):
        filters.choices.append(_choose_passed(passed))
    for name, compare in (("reward_min", pc.greater_equal), ("reward_max", pc.less_equal)):
        if given := query.get(name):
            limit = _number(name, given)
            filters.choices.append(_compares("reward", compare, limit))
    for word in query.get("q", "").lower().split():
        filters.choices.append(_has("search", word))
    filters.undecided_by = query.get("undecided_by", "")
    filters.text = query.get("text", "").strip()
    for condition in _query_values(query, "where"):
        filters.choices.append(_where(condition))
    if ids := _query_values(query, "ids"):
        filters.choices.append(_choose_values("id", ids))
    return filters


def in_keys(column: str, keys: Collection[bytes]) -> Choice:
    """The rows whose key in a column is one of these."""
    wanted = pa.array(list(keys), pa.binary(16))
    return lambda batch: pc.is_in(batch.column(column), value_set=wanted)


def _as_number(value: pa.Scalar) -> int:
    return int(value.as_py())


def in_offsets(offsets: pa.Array) -> Choice:
    """The rows of the records at these places in records.jsonl, which ascend."""

    def chooses(batch: pa.RecordBatch) -> Any:
        column = batch.column("offset")
        ends = pc.min_max(column).as_py()
        if ends["min"] is None:
            return pa.array([], pa.bool_())
        # Arrow makes a hash table of all that is looked for, anew for each batch.
        first = bisect_left(offsets, ends["min"], key=_as_number)
        end = bisect_right(offsets, ends["max"], key=_as_number)
        return pc.is_in(column, value_set=offsets[first:end])

    return chooses


def invert_choice(choice: Choice) -> Choice:
    """The other rows."""
    return lambda batch: pc.invert(choice(batch))


def either(choices: Sequence[Choice]) -> Choice:
    """The rows that one of these chooses."""

    def chooses(batch: pa.RecordBatch) -> Any:
        mask = choices[0](batch)
        for other in choices[1:]:
            mask = pc.or_(mask, other(batch))
        return mask

    return chooses


def _query_values(query: MultiMapping[str], name: str) -> list[str]:
    return [value for value in query.getall(name, []) if value]


def _choose_values(column: str, values: Sequence[str]) -> Choice:
    if len(values) == 1:
        return _compares(column, pc.equal, values[0])
    wanted = pa.array(values, pa.string())
    return lambda batch: pc.is_in(batch.column(column), value_set=wanted)


def _in_list(column: str, names: Sequence[str]) -> Choice:
    """The rows whose list in a column has one of the names."""
    wanted = pa.array(names, pa.string())

    def chooses(batch: pa.RecordBatch) -> Any:
        lists = batch.column(column)
        rows = pc.list_parent_indices(lists).filter(
            pc.is_in(pc.list_flatten(lists), value_set=wanted)
        )
        return pc.is_in(pa.arange(0, batch.num_rows), value_set=rows.unique().cast(pa.int64()))

    return chooses


def _choose_passed(given: str) -> Choice:
    if given == "none":
        return lambda batch: pc.is_null(batch.column("passed"))
    if given not in ("true", "false"):
        raise BadFilter(f"passed={given}: must be true, false or none")
    return _compares("passed", pc.equal, given == "true")


def _number(name: str, given: str) -> float:
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if math.isnan(number):
        raise BadFilter(f"{name}={given}: must be a number")
    return number


def _where(condition: str) -> Choice:
    name, _, rest = condition.partition(":")
    op, _, given = rest.partition(":")
    if name not in KINDS:
        raise BadFilter(f"where={condition}: no column {name!r}; there are {', '.join(KINDS)}")
    kind, type = KINDS[name]
    if op not in (*_COMPARE, *_OTHER_OPS):
        ops = ", ".join((*_COMPARE, *_OTHER_OPS))
        raise BadFilter(f"where={condition}: give COLUMN:OP:VALUE, with OP one of {ops}")
    if op == "null":
        return lambda batch: pc.is_null(batch.column(name))
    if op == "notnull":
        return lambda batch: pc.is_valid(batch.column(name))
    if op == "has":
        if kind == "list":
            return _in_list(name, [given])
        if type != pa.string():
            raise BadFilter(f"where={condition}: {name} is no text")
        return _has(name, given, ignore_case=True)
    if kind == "list":
        raise BadFilter(f"where={condition}: of a list only `has` can be asked")
    value: Any = given
    if type == pa.bool_():
        if given not in ("true", "false"):
            raise BadFilter(f"where={condition}: {name} is true or false")
        value = given == "true"
    elif type != pa.string():
        value = _number(f"where={name}:{op}", given)
    return _compares(name, _COMPARE[op], value)
