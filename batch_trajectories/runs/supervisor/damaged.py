"""Set damaged lines aside at the beginning of a start. For records, see `runs.store.records`."""

from __future__ import annotations

from pathlib import Path

from batch_trajectories.runs.store.failures import is_failure
from batch_trajectories.runs.store.files import keep_readable
from batch_trajectories.runs.store.journal import is_event, segments
from batch_trajectories.runs.supervisor.budget import is_budget_line


def set_aside_damaged(run_dir: Path) -> list[str]:
    """Move the unreadable lines of journals and logs to the quarantine; return their names.

    Call it before these files are read. Raises `StorageError`.
    """
    quarantine = run_dir / "quarantine"
    names = keep_readable(run_dir / "failures.jsonl", quarantine, is_failure)
    names += keep_readable(run_dir / "budget.jsonl", quarantine, is_budget_line)
    for segment in sorted(segments(run_dir / "inflight")):
        names += keep_readable(segment, quarantine, is_event)
    return names
