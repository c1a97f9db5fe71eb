"""What a run is about, beside its accounts: what is in flight, slow or failing."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import orjson

from batch.accounts import account, as_table
from batch.config import RunConfig
from batch.console import show
from batch.prompts import Scan
from batch.records import load_index
from batch.run_dir import holder_of
from batch.wave_sums import sum_up
from report.errors_seen import errors_seen
from report.rows import seconds_at_work
from report.stored import last_records
from report.under_way import conversations_under_way
from report.words import count, one_line, plural, seconds

_SLOWEST = 5
_SHOWN = 10
_ID_CHARS = 40
_MESSAGE_CHARS = 100


def show_status(
    run_dir: Path, scan: Scan, config: RunConfig, *, as_json: bool, every_s: float | None
) -> None:
    """Print the accounts and the status of a run, with `every_s` again while the run goes on.

    JSON is one object, or one line each time.
    """
    while True:
        holder = holder_of(run_dir)
        accounts = account(run_dir, scan, config)
        found = run_status(run_dir)
        batches = sum_up(run_dir)
        if as_json:
            if batches is not None:
                found["batches"] = batches.to_json()
            content = {"run_dir": str(run_dir), "holder": holder, **accounts.to_json(), **found}
            text = orjson.dumps(content, option=None if every_s else orjson.OPT_INDENT_2).decode()
        else:
            state = (
                f"running (pid {holder['pid']} on {holder['host']})" if holder else "not running"
            )
            waves = "" if batches is None else batches.in_words()
            parts = (f"{run_dir}: {state}", as_table(accounts), waves, as_text(found))
            text = "\n".join(filter(None, parts))
            if every_s and sys.stdout.isatty():
                click.clear()
        show(text)
        if every_s is None or holder is None:
            return
        time.sleep(every_s)


def run_status(run_dir: Path) -> dict[str, Any]:
    """From the run directory alone, while the run goes on or not; writes nothing.

    Keys: `in_flight` (see `conversations_under_way`), `slowest` (tasks of the last
    `slowest_of` records: `id`, `status`, `turns`, `duration_s` at work), `errors` (see
    `errors_seen`).
    """
    in_flight = conversations_under_way(
        run_dir, settled=load_index(run_dir).keys(), now=time.time()
    )
    ended = [
        {
            "id": record["id"],
            "status": record["status"],
            "turns": len(record["turns"]),
            "duration_s": round(seconds_at_work(record), 3),
        }
        for record in last_records(run_dir)
    ]
    ended_by_time = sorted(ended, key=lambda task: -task["duration_s"])
    return {
        "in_flight": in_flight,
        "slowest": ended_by_time[:_SLOWEST],
        "slowest_of": len(ended),
        "errors": errors_seen(run_dir),
    }


def as_text(found: dict[str, Any]) -> str:
    """The same for a person: a paragraph for each part that there is."""
    lines: list[str] = []
    if in_flight := found["in_flight"]:
        lines.append(f"in flight {count(len(in_flight))}, the longest silent first")
        lines += [
            f"  {_id(task['id'])}  {plural(task['turns'], 'turn')}  {_doing(task)}, "
            f"{seconds(task['idle_s'])} since its last event"
            for task in in_flight[:_SHOWN]
        ]
        if len(in_flight) > _SHOWN:
            lines.append(f"  and {count(len(in_flight) - _SHOWN)} more")
    if slowest := found["slowest"]:
        lines.append(f"slowest of the last {count(found['slowest_of'])} that ended")
        lines += [
            f"  {_id(task['id'])}  {seconds(task['duration_s'])}, {plural(task['turns'], 'turn')}, "
            f"{task['status']}"
            for task in slowest
        ]
    if errors := found["errors"]:
        lines.append("failed attempts, all starts")
        lines += [
            f"  {one_line(error['class'], _ID_CHARS)} {count(error['count'])}, the last: "
            f"{one_line(error['id'], _ID_CHARS)}: "
            f"{one_line(error['message'], _MESSAGE_CHARS)}"
            for error in errors[:_SHOWN]
        ]
    return "\n".join(lines)


def _doing(task: dict[str, Any]) -> str:
    if task["doing"] == "tools":
        return f"runs {one_line(', '.join(task['calls']), _ID_CHARS)}"
    last = f" after {one_line(task['tool'], _ID_CHARS)}" if task["tool"] else ""
    return f"waits for the model{last}"


def _id(task_id: str) -> str:
    return f"{one_line(task_id, _ID_CHARS):<{_ID_CHARS}}"
