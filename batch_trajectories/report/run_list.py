"""The runs in a directory, each in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.console import show
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.report.formatting import count, moment, one_line, plain
from batch_trajectories.runs.directory.run_dir import read_run_json, runs_in
from batch_trajectories.runs.directory.run_lock import holder_of
from batch_trajectories.runs.supervisor.progress import PROGRESS_FILE

_ID_CHARS = 40


def show_runs(output_dir: Path, *, as_json: bool) -> None:
    """Print the runs in a directory, the latest first. Raises `RunDirError` without any."""
    runs = runs_of(output_dir)
    if as_json:
        show(orjson.dumps(runs, option=orjson.OPT_INDENT_2).decode())
        return
    if not runs:
        raise RunDirError(f"{output_dir}: no runs in this directory; --output_dir names another")
    width = max(len(one_line(run["name"], _ID_CHARS)) for run in runs)
    show("\n".join(f"{one_line(run['name'], _ID_CHARS):<{width}}  {_words(run)}" for run in runs))


def runs_of(output_dir: Path) -> list[dict[str, Any]]:
    """The runs in a directory, the latest first, without reading their records.

    Keys: `name`, `state` ("running", "not running" or "unreadable"), `begun` (epoch seconds),
    `tasks`, `done`, `failed` and `pending`: as the running process or the last end says it, None
    if unknown.
    """
    runs = [_run(output_dir / name) for name in runs_in(output_dir)]
    return sorted(runs, key=lambda run: -(run["begun"] or 0.0))


def _run(path: Path) -> dict[str, Any]:
    unknown = dict.fromkeys(("begun", "tasks", "done", "failed", "pending"))
    try:
        begun = read_run_json(path)["created"]
    except RunDirError:
        return {"name": path.name, "state": "unreadable", **unknown}
    holder = holder_of(path)
    told = _read(path / ("summary.json" if holder is None else PROGRESS_FILE)) or {}
    found = {"name": path.name, "state": "not running" if holder is None else "running"}
    counts = {key: told.get(key) for key in ("tasks", "done", "failed", "pending")}
    if holder is not None and told:
        failed = sum(told["failed"].values())
        left = told["total"] - told["done"] - failed
        counts = {"tasks": told["total"], "done": told["done"], "failed": failed, "pending": left}
    return {**found, **unknown, "begun": begun, **counts}


def _words(run: dict[str, Any]) -> str:
    parts = [run["state"]]
    if run["tasks"] is not None:
        failed = f", failed {count(run['failed'])}" if run["failed"] else ""
        parts.append(f"done {count(run['done'])} of {count(run['tasks'])}{failed}")
    if run["begun"] is not None:
        parts.append(f"begun {moment(run['begun'])}")
    return plain(", ".join(parts))


def _read(path: Path) -> dict[str, Any] | None:
    """A JSON object; None where there is none yet."""
    try:
        found = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return found if isinstance(found, dict) else None
