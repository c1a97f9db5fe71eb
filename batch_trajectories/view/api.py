"""The answers of the API: functions of the state and a request, which run in threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

import msgspec
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from multidict import MultiMapping

from batch_trajectories.audit.verdicts import read_step, shows_defect
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.basics.validation import did_you_mean
from batch_trajectories.engine.control import refuse_strangers, steer
from batch_trajectories.engine.run_dir import read_holder, read_run_json
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import agreed_verdict, score_key
from batch_trajectories.report.page.writer import dataset_name
from batch_trajectories.view import conversation as live
from batch_trajectories.view.conversation import (
    describe_requests,
    find_record,
    find_request,
    find_siblings,
    make_form,
    read_found,
)
from batch_trajectories.view.index.charts import make_charts
from batch_trajectories.view.index.columns import KINDS
from batch_trajectories.view.index.filters import RowFilters, in_keys, invert_choice, read_filters
from batch_trajectories.view.index.run_index import run_maker
from batch_trajectories.view.index.table import SAMPLES, Masks, Table, count_selected
from batch_trajectories.view.labels import MAX_NAME_CHARS, decide, decided_records, labels_json
from batch_trajectories.view.runs import run_json
from batch_trajectories.view.state import OpenRun, State

_MAX_ROWS = 500
_MAX_COMPARED_RUNS = 6
_MAX_DIGITS = 18
_MAX_OVER_IDS = 1000
"""Samples that one is preferred to."""
_STEERS: Mapping[str, tuple[str, ...]] = {
    "pause": (),
    "resume": (),
    "retry": (),
    "stop": ("id",),
    "limits": ("rpm", "max_in_flight", "max_run_cost_usd"),
}


class BadRequest(ValueError):
    """Something in a request is wrong; the text names it."""


class Query(NamedTuple):
    """The parameters of a request, and the key of the run in its path."""

    values: MultiMapping[str]
    run: str

    def text(self, name: str) -> str:
        """A parameter that must be there."""
        if not (value := self.values.get(name, "")):
            raise BadRequest(f"give {name}=...")
        return value

    def whole(self, name: str, default: int, most: int | None = None) -> int:
        """A whole number from 0 to `most`."""
        given = self.values.get(name, str(default))
        if not given.isascii() or not given.isdecimal() or len(given) > _MAX_DIGITS:
            raise BadRequest(
                f"{name}={given}: must be a whole number of up to {_MAX_DIGITS} digits"
            )
        number = int(given)
        return number if most is None else min(number, most)


def list_runs(state: State, query: Query, body: Any) -> dict[str, Any]:
    """All runs, the latest first."""
    runs = [run_json(run) for run in state.places.runs()]
    return {
        "who": state.who,
        "version": metadata.version("batch-trajectories"),
        "runs": sorted(runs, key=lambda run: -(run["begun"] or 0.0)),
    }


def describe_run(state: State, query: Query, body: Any) -> dict[str, Any]:
    """One run: its options, what its rows can be filtered by."""
    run = state.open(query.run)
    identity = read_run_json(run.place.path)
    dataset = identity["dataset"]
    table = run.index.refresh()
    facts, why = run.facts()
    return {
        "run": run_json(run.place),
        "index": run.index.to_json(),
        "columns": [{"name": name, "kind": kind} for name, (kind, _) in KINDS.items()],
        "choices": run.choices(table),
        "identity": {
            "created": identity["created"],
            "dataset": dataset_name(dataset),
            "rows": dataset["rows"],
            "bad_rows": dataset["bad_rows"],
            "samples": identity["config"].get("num_samples"),
            **{name: identity.get(name) for name in ("meaning", "history", "versions")},
        },
        "facts": facts,
        "facts_error": why,
        "labels": run.agreement(table),
    }


class _Selected(NamedTuple):
    run: OpenRun
    table: Table
    filters: RowFilters
    masks: Masks


def _select_rows(state: State, query: Query) -> _Selected:
    run = state.open(query.run)
    table = run.index.refresh()
    run.labels.refresh()
    filters = read_filters(query.values)
    return _Selected(run, table, filters, run.select(table, filters))


def _order(selected: _Selected, query: Query) -> Any:
    by = query.values.get("order") or None
    if by is not None and by != SAMPLES and (by not in KINDS or KINDS[by][0] == "list"):
        hint = did_you_mean(by, KINDS) or f"there are {', '.join(KINDS)}"
        raise BadRequest(f"order={by}: no column to sort by; {hint}")
    down = query.values.get("down", "") not in ("", "0", "false")
    return selected.run.order(selected.table, selected.masks, by, down=down)


def rows(state: State, query: Query, body: Any) -> dict[str, Any]:
    """A page of the rows that match."""
    selected = _select_rows(state, query)
    run, table = selected.run, selected.table
    ordered = _order(selected, query)
    offset = query.whole("offset", 0)
    numbers = ordered[offset : offset + query.whole("limit", 100, _MAX_ROWS)].to_pylist()
    return {
        "total": count_selected(table.counting),
        "matching": len(ordered),
        "offset": offset,
        "place": _find_place(table, ordered, query.values.get("place_of")),
        "rows": _add_groups(table, [_add_labels(run, row) for row in table.rows(numbers)]),
        "index": run.index.to_json(),
        "text": run.texts.state if selected.filters.text else None,
        "version": run.version,
    }


def _find_place(table: Table, ordered: Any, id: str | None) -> int | None:
    """The index of a row in an order; None if there is no such row or the filters leave it out."""
    if id is None:
        return None
    places = [ordered.index(table.number(found)).as_py() for found in table.find("id", id)]
    return max((place for place in places if place >= 0), default=None)


def _add_groups(table: Table, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `group`, what became of all samples of their prompt, if it has several."""
    if not any(row["sample"] for row in rows):
        return rows  # the usual run has one sample of each prompt
    groups = table.groups(list(dict.fromkeys(row["prompt_id"] for row in rows)))
    return [
        {**row, "group": group._asdict()}
        if (group := groups[row["prompt_id"]]).samples > 1
        else row
        for row in rows
    ]


def _add_labels(run: OpenRun, row: dict[str, Any]) -> dict[str, Any]:
    labels = run.labels.refresh()
    of_row = [] if labels is None else labels.get(row["record"])
    return {**row, "labels": labels_json(of_row), "verdict": agreed_verdict(of_row)}


def charts(state: State, query: Query, body: Any) -> dict[str, Any]:
    """Numbers of the rows that match."""
    selected = _select_rows(state, query)
    counts = selected.run.label_counts(selected.table, selected.masks)
    return {**make_charts(selected.table, selected.masks), "labels": counts}


def record(state: State, query: Query, body: Any) -> dict[str, Any]:
    """One conversation, and what stands around it in the list."""
    selected = _select_rows(state, query)
    run, table = selected.run, selected.table
    found = find_record(table, query.text("id"))
    stored = read_found(run.place, table, found, run.labels.refresh())
    number = table.number(found)
    (row,) = table.rows([number])
    ordered = _order(selected, query)
    place = ordered.index(number).as_py()
    around = [None if place < 0 else _find_id(table, ordered, at) for at in (place - 1, place + 1)]
    return {
        "row": _add_labels(run, row),
        "record": orjson.Fragment(stored.splice({})),
        "form": orjson.Fragment(make_form(run.place, stored)),
        "step": _describe_step(stored),
        "requests": describe_requests(stored),
        "around": {
            "place": None if place < 0 else place,
            "matching": len(ordered),
            **dict(zip(("before", "after"), around, strict=True)),
            **_find_undecided(selected, query, ordered, number),
        },
    }


def _describe_step(stored: Record) -> dict[str, Any] | None:
    """The step of an audit that a record is, as in tasks.jsonl; None for a conversation."""
    if stored.audit is None:
        return None
    part = read_step(stored)
    return {**part, "against": shows_defect(part)}


def _find_undecided(
    selected: _Selected, query: Query, ordered: Any, number: int
) -> dict[str, str | None]:
    """The next row, from this one on and then from the first, without a verdict of `who`."""
    if not (who := query.values.get("who")):
        return {}
    table = selected.table
    decided = in_keys("record", decided_records(selected.run.labels.refresh(), who))
    # Arrow goes through a million rows in milliseconds, a loop of Python takes seconds.
    is_open = pa.chunked_array(table.select(invert_choice(decided)), pa.bool_()).take(ordered)
    at = ordered.index(number).as_py()
    for first, end in ((at + 1, len(ordered)), (0, max(at, 0))):
        found = pc.index(is_open[first:end], pa.scalar(True)).as_py()
        if found >= 0:
            return {"undecided": _find_id(table, ordered, first + found)}
    return {"undecided": None}


def _find_id(table: Table, ordered: Any, at: int) -> str | None:
    if not 0 <= at < len(ordered):
        return None
    return str(table.value(table.place(ordered[at].as_py()), "id"))


def request(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The request of one turn."""
    run = state.open(query.run)
    table = run.index.refresh()
    stored = read_found(run.place, table, find_record(table, query.text("id")), None)
    return find_request(stored, query.values.get("part", "main"), query.whole("turn", 1))


def siblings(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The samples of the same prompt."""
    run = state.open(query.run)
    table = run.index.refresh()
    found = find_record(table, query.text("id"))
    return {"siblings": find_siblings(run.place, table, found, run.labels.refresh())}


def compare(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The first run with each other one."""
    keys = list(dict.fromkeys(query.values.getall("run", [])))
    if not 2 <= len(keys) <= _MAX_COMPARED_RUNS:
        raise BadRequest(f"run: name 2 to {_MAX_COMPARED_RUNS} runs, as run=A&run=B")
    first, *others = [state.places.find(key) for key in keys]
    return {
        "comparisons": [
            {
                **orjson.loads(run_maker("compare", first.path, other.path)),
                "first": first.key,
                "second": other.key,
            }
            for other in others
        ]
    }


def in_flight(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The conversations that have not ended."""
    run = state.open(query.run)
    return {"conversations": live.in_flight(run.place, run.index.refresh())}


def live_conversation(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The journaled part of a conversation."""
    run = state.open(query.run)
    return live.conversation(run.place, run.index.refresh(), query.text("id"))


def agreement(state: State, query: Query, body: Any) -> dict[str, Any]:
    """The verdicts, and how reviewers agree."""
    run = state.open(query.run)
    found = run.agreement(run.index.refresh())
    if run.labels.error is not None:
        raise RunDirError(run.labels.error)
    return {"version": run.version, "labels": found}


def label(state: State, query: Query, body: Any) -> dict[str, Any]:
    """Decide about a record."""
    given = _object(body)
    run = state.open(query.run)
    if run.place.url is not None:
        raise RunDirError("this is a copy of a mirror; label the run itself")
    refuse_strangers(run.place.path)
    table = run.index.refresh()
    labels = run.labels.refresh()
    if run.labels.error is not None:
        raise RunDirError(run.labels.error)
    found = read_found(run.place, table, find_record(table, _text(given, "id")), labels)
    if given.get("record") not in (None, score_key(found)):
        raise RunDirError(f"{found.id}: was made again since you opened it; look at it again")
    who = given.get("who") or state.who
    if not isinstance(who, str) or len(who) > MAX_NAME_CHARS or not who.isprintable():
        raise BadRequest(f"who: must be a name of up to {MAX_NAME_CHARS} characters")
    over = given.get("over") or []
    if not isinstance(over, list) or not all(isinstance(one, str) for one in over):
        raise BadRequest("over: must be a list of ids")
    over = list(dict.fromkeys(over))  # each is read from the disk
    if len(over) > _MAX_OVER_IDS:
        raise BadRequest(f"over: {len(over):,} different ids; up to {_MAX_OVER_IDS:,} are possible")
    others = [read_found(run.place, table, find_record(table, one), None) for one in over]
    try:
        before = decide(run.place.path, found, others, given, who)
    except (ValueError, msgspec.ValidationError) as error:
        raise BadRequest(str(error)) from error
    now = run.labels.refresh()
    of_record = [] if now is None else now.get(score_key(found))
    return {
        "labels": labels_json(of_record),
        "verdict": agreed_verdict(of_record),
        "before": before,
        "version": run.version,
    }


def steer_run(state: State, query: Query, body: Any) -> dict[str, Any]:
    """Ask the process that works on a run."""
    given = _object(body)
    do = _text(given, "do")
    if do not in _STEERS:
        raise BadRequest(f"do: {do!r} must be one of {', '.join(_STEERS)}")
    run = state.places.find(query.run)
    if run.url is not None:
        raise RunDirError("this is a copy of a mirror; steer the run where it works")
    values = {name: given[name] for name in _STEERS[do] if given.get(name) is not None}
    if do == "stop":
        values["id"] = _text(given, "id")
    return {"answer": steer(run.path, read_holder(run.path), do, **values)}


def _object(body: Any) -> Mapping[str, Any]:
    if not isinstance(body, dict):
        raise BadRequest("the body must be an object")
    return body


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise BadRequest(f"{name}: must be a text")
    return value


_RUN = "/api/runs/{run}"
READS: Mapping[str, Callable[[State, Query, Any], Any]] = {
    "/api/runs": list_runs,
    "/api/compare": compare,
    _RUN: describe_run,
    f"{_RUN}/rows": rows,
    f"{_RUN}/charts": charts,
    f"{_RUN}/record": record,
    f"{_RUN}/request": request,
    f"{_RUN}/siblings": siblings,
    f"{_RUN}/in_flight": in_flight,
    f"{_RUN}/live": live_conversation,
    f"{_RUN}/labels": agreement,
}
WRITES: Mapping[str, Callable[[State, Query, Any], Any]] = {
    f"{_RUN}/labels": label,
    f"{_RUN}/steer": steer_run,
}
