"""The runs of the places that a server shows, by keys, and what the list of runs says of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.api.stored_run import StoredRun, open_run
from batch_trajectories.basics.errors import RunDirError, RunError
from batch_trajectories.basics.validation import is_url
from batch_trajectories.engine.run_dir import list_run_names, read_holder, read_run_json
from batch_trajectories.engine.supervisor.progress import describe, read_state
from batch_trajectories.records.files import read_json, refuse_strange_files
from batch_trajectories.records.names import (
    EXPORTS,
    MANIFEST_FILE,
    RECORDS_FILE,
    RECORDS_INDEX,
    RUN_FILE,
    SUMMARY_FILE,
)
from batch_trajectories.records.records import load_index
from batch_trajectories.report.page.writer import dataset_name
from batch_trajectories.view.index.facts import read_facts
from batch_trajectories.view.index.parts import find_cache

_SHOWN_OF_PROCESS = (
    "pid",
    "at",
    "running",
    "tasks_per_min",
    "turns_per_s",
    "input_tokens_per_s",
    "output_tokens_per_s",
    "left_s",
    "forecast_usd",
    "limit",
    "messages",
)

_BRING_EVERY_S = 10.0
_LARGE_INDEX = 2 << 20
"""Bytes of records.idx."""


class NoSuchRun(LookupError):
    """No run has this key."""


class RunPlace(NamedTuple):
    """The place of a run: a directory of this machine, or a copy of a URL."""

    key: str
    """The run's name in addresses of the API."""
    path: Path
    """The run's directory; of a mirror, the directory of the copy."""
    place: str
    """The path or URL that the command was given."""
    url: str | None = None
    """The mirror of which the directory is a copy; None for a run of this machine."""
    problem: str | None = None
    """The reason why the copy could not be brought up to date."""

    def stored(self) -> StoredRun:
        """The run. Raises `RunDirError`."""
        return StoredRun(self.path, url=self.url)


class Places:
    """Directories of runs, run directories, and URLs of mirrored runs."""

    def __init__(self, places: Sequence[str]) -> None:
        """Raises `RunDirError` for one that is no directory, or a mirror without a run."""
        self._places = list(dict.fromkeys(places))
        self._mirrors: dict[str, Path] = {}
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()
        self._brought_at = time.monotonic()
        for place in self._places:
            if is_url(place):
                self._mirrors[place] = open_run(place).path
            elif not Path(place).is_dir():
                raise RunDirError(
                    f"{place}: no such directory; give a directory of runs, a run, or the URL of a "
                    "mirrored run"
                )

    def runs(self) -> Iterator[RunPlace]:
        """All runs there are now."""
        for number, place in enumerate(self._places):
            if place in self._mirrors:
                path = self._mirrors[place]
                problem = self._problems.get(place)
                yield RunPlace(
                    key=_key(path.name, number), path=path, place=place, url=place, problem=problem
                )
                continue
            directory = Path(place)
            if (directory / RUN_FILE).exists():
                name = directory.resolve().name
                yield RunPlace(_key(name, number), directory, place)
                continue
            for name in list_run_names(directory):
                yield RunPlace(_key(name, number), directory / name, place)

    def find(self, key: str) -> RunPlace:
        """The run with a key. Raises `NoSuchRun`.

        Keys are compared with those of the runs, so none leads out of the places.
        """
        for run in self.runs():
            if run.key == key:
                return run
        raise NoSuchRun(f"{key!r}: no such run here (any more); the list has all")

    def bring_mirrors(self) -> None:
        """Bring the copies of mirrors up to date, unless that was done just now."""
        with self._lock:
            if not self._mirrors or time.monotonic() - self._brought_at < _BRING_EVERY_S:
                return
            for url in self._mirrors:
                self._problems.pop(url, None)
                try:
                    open_run(url)
                except (RunError, OSError) as error:
                    self._problems[url] = str(error)
            self._brought_at = time.monotonic()


def _key(name: str, number: int) -> str:
    return name if number == 0 else f"{name}@{number + 1}"


def is_own(path: Path) -> bool:
    """Whether a directory belongs to the user of this process."""
    return path.stat().st_uid == os.geteuid()


def run_json(run: RunPlace) -> dict[str, Any]:
    """The run's row in the list of runs, read from small files, without the records."""
    unknown: dict[str, Any] = dict.fromkeys(
        (
            "error",
            "begun",
            "model",
            "dataset",
            "rows",
            "samples",
            "training_rows",
            "tasks",
            "done",
            "failed",
            "pending",
            "passed",
            "checked",
            "pass_rate",
            "cost_usd",
            "health",
            "verdicts",
            "now",
        )
    )
    about: dict[str, Any] = {"key": run.key, "name": run.path.name, "place": run.place}
    about |= {"is_mirror": run.url is not None, "is_audit": False, "cost_unknown": False}
    about |= {"can_steer": False, "can_label": False}
    try:
        return {**unknown, **about, **_describe_run(run), "error": run.problem}
    except (RunError, OSError) as error:
        why = str(error)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        why = f"{run.path}: a file of this run is damaged ({error!r}); `verify` names it"
    return {**unknown, **about, "state": "unreadable", "error": why}


def _describe_run(run: RunPlace) -> dict[str, Any]:
    refuse_strange_files(run.path)
    identity = read_run_json(run.path)
    holder = run.stored().holder if run.url else read_holder(run.path)
    config = identity["config"]
    own = run.url is None and is_own(run.path)
    found: dict[str, Any] = {
        "state": "not running" if holder is None else "running",
        "begun": identity["created"],
        "model": config.get("model") or config.get("models"),
        "dataset": dataset_name(identity["dataset"]),
        "rows": identity["dataset"]["rows"],
        "samples": config.get("num_samples"),
        "training_rows": _training_rows(run.path),
        "is_audit": bool(config.get("audit")),
        "can_label": own,
        "can_steer": own and holder is not None,
    }
    state = read_state(run.path, holder) if holder is not None and run.url is None else None
    if state is not None:
        found |= _process_facts(state)
    else:
        found |= _end_facts(run.path, identity)
    if (cache := find_cache(run.path)) is not None:
        facts, _ = read_facts(cache, run.path)
        found["health"] = None if facts is None else facts["health"]
        found["verdicts"] = None if facts is None else facts.get("verdicts")
    return found


def _process_facts(state: Mapping[str, Any]) -> dict[str, Any]:
    failed = sum(state["failed"].values())
    checked = state.get("checked")
    steered = state.get("steered") or {}
    return {
        **({"state": "paused"} if steered.get("is_paused") else {}),
        "tasks": state["total"],
        "done": state["done"],
        "failed": failed,
        "pending": state["total"] - state["done"] - failed,
        "passed": state.get("passed"),
        "checked": checked,
        "pass_rate": state["passed"] / checked if checked else None,
        "cost_usd": state["cost_usd"],
        "cost_unknown": bool(state["cost_unknown"]),
        "now": {
            **{name: state.get(name) for name in _SHOWN_OF_PROCESS},
            "line": describe(state),
        },
    }


def _end_facts(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that the last end of the run wrote; after a kill, those in the index."""
    summary = read_json(path / SUMMARY_FILE)
    if summary is None or _is_older(path / SUMMARY_FILE, path / RECORDS_FILE):
        return _index_facts(path, identity)
    checks = summary.get("checks") or {}
    rate = checks.get("pass_rate")
    return {
        **{name: summary.get(name) for name in ("tasks", "done", "failed", "pending")},
        "passed": checks.get("passed"),
        "checked": checks["passed"] + checks["failed"] if checks else None,
        "pass_rate": None if rate is None else rate / 100,
        "cost_usd": summary.get("spent_usd"),
        "cost_unknown": bool(summary.get("spent_unknown")),
    }


def _training_rows(path: Path) -> int | None:
    """The rows of the training file, as its manifest counted them; None before the first export."""
    manifest = read_json(path / EXPORTS / MANIFEST_FILE)
    rows = None if manifest is None else manifest.get("exported")
    return rows if isinstance(rows, int) else None


def _is_older(one: Path, other: Path) -> bool:
    try:
        return one.stat().st_mtime < other.stat().st_mtime
    except FileNotFoundError:
        return False


def _index_facts(path: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Counts of the records of a small run; of a large one it would take seconds."""
    try:
        if (path / RECORDS_INDEX).stat().st_size > _LARGE_INDEX:
            return {}
        index = load_index(path, lenient=True)
    except (OSError, RunError):
        return {}
    sums = index.sums(index.current_rows())
    ended = sums.endings
    failed = sum(count for ending, count in ended.items() if ending.status == "failed")
    config = identity["config"]
    is_fixed = config.get("until_passed") is None
    tasks = identity["dataset"]["rows"] * config["num_samples"] if is_fixed else None
    done = ended.total() - failed
    judged = [verdict for verdict in index.passed(index.current_rows()) if verdict is not None]
    return {
        "tasks": tasks,
        "done": done,
        "failed": failed,
        "pending": None if tasks is None else tasks - done - failed,
        "passed": sum(judged),
        "checked": len(judged),
        "pass_rate": sum(judged) / len(judged) if judged else None,
        "cost_usd": sums.cost_usd,
        "cost_unknown": bool(sums.cost_unknown),
    }
