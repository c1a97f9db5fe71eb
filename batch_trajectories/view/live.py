"""Conversations that have not ended, from the journals of the workers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from agent.messages.message import Message
from agent.state.trajectory import Trajectory
from batch_trajectories.api.stored_run import states_in
from batch_trajectories.basics.errors import RunError
from batch_trajectories.runs.dataset.row import opening_messages
from batch_trajectories.runs.dataset.scan import tasks
from batch_trajectories.runs.store.files import StorageError
from batch_trajectories.runs.store.journal import Inflight, segments
from batch_trajectories.view.index.filters import in_keys
from batch_trajectories.view.index.table import Table
from batch_trajectories.view.runs import RunPlace


def _read(run: RunPlace, table: Table) -> tuple[Inflight, list[bytes]]:
    """The journals, and their tasks without a record, as far as the table knows."""
    journals = Inflight(run.path / "inflight", read_only=True)
    journals.read(settled=frozenset())
    tasks_there = journals.tasks()
    if not tasks_there:
        return journals, []
    masks = table.select(in_keys("key", tasks_there))
    ended = set(table.columns(masks, ["key"])["key"].to_pylist())
    return journals, [key for key in tasks_there if key not in ended]


def in_flight(run: RunPlace, table: Table) -> list[dict[str, Any]]:
    """See `StoredRun.in_flight`."""
    journals, keys = _read(run, table)
    return states_in(journals, keys, now=time.time())


def signature(run_dir: Path) -> tuple[tuple[str, int], ...]:
    """Changes when a journal does."""
    found = []
    for segment in segments(run_dir / "inflight"):
        try:
            found.append((segment.name, segment.stat().st_size))
        except FileNotFoundError:  # its last task has a record now
            continue
    return tuple(sorted(found))


def conversation(run: RunPlace, table: Table, id: str) -> dict[str, Any]:
    """What the journals have of a conversation; see the API's `live`."""
    journals, keys = _read(run, table)
    for key in keys:
        try:
            if journals.task_id(key) != id:
                continue
            events = journals.events(key)
        except StorageError:
            continue  # its record was just written
        found = Trajectory(_opening(run, key), events).to_record()
        return {"id": id, "is_over": False, **found}
    return {"id": id, "is_over": True, "messages": [], "turns": [], "tool_calls": []}


def _opening(run: RunPlace, key: bytes) -> list[Message]:
    """The prompt, which no journal has; nothing if the dataset cannot be read any more."""
    try:
        stored = run.stored()
        dataset = Path(stored.identity["dataset"]["path"])
        if dataset.exists() and not (dataset.is_file() or dataset.is_dir()):
            return []  # a pipe or a device, as a run directory from elsewhere could name
        scan = stored.scan
        at = scan.keys.find(key)
        while at % 16:
            at = scan.keys.find(key, at + 1)
        if at < 0:
            return []
        columns = next(tasks(scan, [at // 16])).columns
        return opening_messages(columns, stored.config.system_prompt)
    except (RunError, OSError, ValueError):
        return []
