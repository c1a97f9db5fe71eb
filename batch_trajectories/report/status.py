"""The status of a run: totals, progress, and conversations in flight, slow or failed."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click
import orjson

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.basics.console import show, show_json
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.basics.text import plural, single_line
from batch_trajectories.engine.run_dir import list_run_names, read_holder, read_run_json
from batch_trajectories.engine.run_totals import RunTotals, as_table
from batch_trajectories.engine.supervisor.progress import describe, read_state
from batch_trajectories.export.statistics import cache_use
from batch_trajectories.export.statistics.cache_use import CacheUse
from batch_trajectories.export.statistics.health import HEALTH_CHECKS
from batch_trajectories.records.failures import failures_by_class
from batch_trajectories.records.files import has_batches, read_json
from batch_trajectories.records.names import SUMMARY_FILE
from batch_trajectories.report.facts import seconds_at_work
from batch_trajectories.report.formatting import count, moment, one_line, plain, seconds

if TYPE_CHECKING:
    from batch_trajectories.batch_api.batch_log import BatchTotals

_MAX_SLOW_TASKS = 5
_MAX_LISTED = 10
_ID_CHARS = 40
_LINE_CHARS = 100


def show_status(stored: StoredRun, *, as_json: bool, every_s: float | None) -> None:
    """Print the status of a run; with `every_s`, repeat until the run ends.

    With `as_json`: one JSON object, or one line each time.
    """
    while True:
        status = read_status(stored)
        if as_json:
            option = None if every_s else orjson.OPT_INDENT_2
            text = orjson.dumps(status.to_json(), option=option).decode()
        else:
            text = "\n".join(line for section in sections(status) for line in section)
            if every_s and sys.stdout.isatty():
                click.clear()
        show(text)
        if every_s is None or status.holder is None:
            return
        time.sleep(every_s)
        stored = stored.refresh()


class Status(NamedTuple):
    """The status of a run at one moment."""

    run_dir: Path
    holder: dict[str, Any] | None
    """The process that is working on the run; None without one."""
    totals: RunTotals
    progress: dict[str, Any] | None
    """The last state of that process; see `engine/supervisor/progress.py`."""
    details: dict[str, Any]
    """See `run_status`."""
    batches: BatchTotals | None
    """Totals of the batches of the run; None if it has made none."""

    def to_json(self) -> dict[str, Any]:
        """The status as `--json` shows it."""
        return {
            "run_dir": str(self.run_dir),
            "holder": self.holder,
            "progress": self.progress,
            **self.totals.to_json(),
            "judges_usd": self.totals.judges_usd or 0.0,
            "judges_unknown": self.totals.judges_unknown,
            **self.details,
            **({} if self.batches is None else {"batches": self.batches.to_json()}),
        }


def read_status(stored: StoredRun) -> Status:
    """Read the status from the run directory and the dataset."""
    holder = stored.holder
    return Status(
        run_dir=stored.path,
        holder=holder,
        totals=stored.totals(),
        progress=None if holder is None else read_state(stored.path, holder),
        details=run_status(stored),
        batches=_batch_totals(stored.path),
    )


def _batch_totals(path: Path) -> BatchTotals | None:
    if not has_batches(path):
        return None
    from batch_trajectories.batch_api.batch_log import compute_batch_totals

    return compute_batch_totals(path)


def run_status(stored: StoredRun) -> dict[str, Any]:
    """The details of a run, during the run or afterwards; writes nothing.

    Keys: `in_flight` (see `StoredRun.in_flight`), `slowest` (the slowest of the last `slowest_of`
    records: `id`, `status`, `turns`, `duration_s` at work), `caches` (of the same records; see
    `CacheUse.to_json`), `errors` (see `failures_by_class`).
    """
    ended: list[dict[str, Any]] = []
    caches = CacheUse()
    for record in stored.last_records():
        caches.add(record)
        ended.append(
            {
                "id": record.id,
                "status": record.status,
                "turns": len(record.own_turns),
                "duration_s": round(seconds_at_work(record), 3),
            }
        )
    ended_by_time = sorted(ended, key=lambda task: -task["duration_s"])
    return {
        "in_flight": stored.in_flight(),
        "slowest": ended_by_time[:_MAX_SLOW_TASKS],
        "slowest_of": len(ended),
        "caches": caches.to_json(stored.price_of),
        "errors": failures_by_class(stored.path),
    }


def sections(status: Status) -> list[list[str]]:
    """The status for a person: lists of lines, each with its title first."""
    holder, state = status.holder, status.progress
    steered: dict[str, Any] = (state or {}).get("steered") or {}
    running = "not running"
    if holder is not None:
        running = f"running (pid {holder.get('pid')} on {holder.get('host')})"
    if holder is None and status.totals.pending:
        running += f"; `resume {status.run_dir.name}` continues the pending tasks"
    head = [f"{status.run_dir}: {running}"]
    if state is not None:
        head.append(f"this start: {plain(describe(state))}")
        if limits := steered.get("limits"):
            changed = ", ".join(f"{name} {value:g}" for name, value in limits.items())
            head.append(f"limits changed for this start: {changed}")
        head += [f"  {one_line(message, _LINE_CHARS)}" for message in state["messages"]]
    parts = [
        head,
        as_table(status.totals).splitlines(),
        [] if status.batches is None else [status.batches.describe()],
        _in_flight(
            status.details["in_flight"],
            _MAX_LISTED,
            runs=holder is not None,
            is_paused=steered.get("is_paused", False),
        ),
        _slowest(status.details),
        _caches(status.details),
        _errors(status.details["errors"]),
    ]
    return [part for part in parts if part]


def _in_flight(
    tasks: list[dict[str, Any]], shown: int, *, runs: bool, is_paused: bool
) -> list[str]:
    if not tasks:
        return []
    lines = [f"in flight: {count(len(tasks))}, longest without an event first"]
    if not runs:
        lines = [f"unfinished {count(len(tasks))}, the next start continues them"]
    for task in tasks[:shown]:
        doing = _doing(task, is_paused=is_paused)
        last = f"  {doing}, {seconds(task['idle_s'])} since its last event" if runs else ""
        lines.append(f"  {_id(task['id'])}  {plural(task['turns'], 'turn')}{last}")
    more = [f"  and {count(len(tasks) - shown)} more"] if len(tasks) > shown else []
    return lines + more


def _slowest(details: dict[str, Any]) -> list[str]:
    if not details["slowest"]:
        return []
    return [
        f"slowest of the last {count(details['slowest_of'])} finished",
        *(
            f"  {_id(task['id'])}  {seconds(task['duration_s'])}, {plural(task['turns'], 'turn')}, "
            f"{task['status']}"
            for task in details["slowest"]
        ),
    ]


def _caches(details: dict[str, Any]) -> list[str]:
    lines = [plain(line) for line in cache_use.as_text(details["caches"])]
    if not lines:
        return []
    most = HEALTH_CHECKS["cache_misses"].limit
    missed = [
        f"  {one['missed_turns']:,} of {one['later_turns']:,} turns missed: "
        f"{one['lost_tokens']:,} tokens computed again; likely {cache_use.CAUSES[one['cause']]}"
        for one in details["caches"]["endpoints"]
        if one["missed_turns"] > most * one["later_turns"]
    ]
    last = f"the last {count(details['slowest_of'])} finished"
    return [f"{lines[0]} ({last})", *lines[1:], *missed]


def _errors(errors: list[dict[str, Any]]) -> list[str]:
    if not errors:
        return []
    return [
        "failed attempts, all starts (`errors RUN` says what to do)",
        *(
            f"  {one_line(error['class'], _ID_CHARS)} {count(error['count'])}, the last: "
            f"{one_line(error['id'], _ID_CHARS)}: "
            f"{plain(single_line(error['message'], max_chars=2 * _LINE_CHARS))}"
            for error in errors[:_MAX_LISTED]
        ),
    ]


def _doing(task: dict[str, Any], *, is_paused: bool) -> str:
    if task["doing"] == "tools":
        return f"runs {one_line(', '.join(task['calls']), _ID_CHARS)}"
    last = f" after {one_line(task['tool'], _ID_CHARS)}" if task["tool"] else ""
    waits = "paused before the next call" if is_paused else "waits for the model"
    return f"{waits}{last}"


def _id(task_id: str) -> str:
    return f"{one_line(task_id, _ID_CHARS):<{_ID_CHARS}}"


def show_runs(output_dir: Path, *, as_json: bool) -> None:
    """Print the runs in a directory, the latest first. Raises `RunDirError` without any."""
    runs = list_runs(output_dir)
    if as_json:
        show_json(runs)
        return
    if not runs:
        raise RunDirError(f"{output_dir}: no runs in this directory; --output_dir names another")
    width = max(len(one_line(run["name"], _ID_CHARS)) for run in runs)
    show("\n".join(f"{one_line(run['name'], _ID_CHARS):<{width}}  {_words(run)}" for run in runs))


def list_runs(output_dir: Path) -> list[dict[str, Any]]:
    """The runs in a directory, the latest first, without reading their records.

    Keys: `name`, `state` ("running", "not running" or "unreadable"), `begun` (epoch seconds),
    `tasks`, `done`, `failed`, `discarded` and `pending`: as the running process or the last end
    says it, None if unknown.
    """
    runs = [_run(output_dir / name) for name in list_run_names(output_dir)]
    return sorted(runs, key=lambda run: -(run["begun"] or 0.0))


def _run(path: Path) -> dict[str, Any]:
    unknown = dict.fromkeys(("begun", "tasks", "done", "failed", "discarded", "pending"))
    try:
        begun = read_run_json(path)["created"]
    except RunDirError:
        return {"name": path.name, "state": "unreadable", **unknown}
    holder = read_holder(path)
    stored = read_json(path / SUMMARY_FILE) if holder is None else read_state(path, holder)
    stored = stored or {}
    run = {"name": path.name, "state": "not running" if holder is None else "running"}
    counts = {key: stored.get(key) for key in ("tasks", "done", "failed", "discarded", "pending")}
    if holder is not None and stored:
        failed = sum(stored["failed"].values())
        left = stored["total"] - stored["done"] - failed
        counts = {
            "tasks": stored["total"],
            "done": stored["done"],
            "failed": failed,
            "discarded": None,
            "pending": left,
        }
    return {**run, **unknown, "begun": begun, **counts}


def _words(run: dict[str, Any]) -> str:
    parts = [run["state"]]
    if run["tasks"] is not None:
        parts.append(f"done {count(run['done'])} of {count(run['tasks'])}")
        parts += [
            f"{name} {count(run[name])}"
            for name in ("failed", "discarded", "pending")
            if run.get(name)
        ]
    if run["begun"] is not None:
        parts.append(f"begun {moment(run['begun'])}")
    return plain(", ".join(parts))
