"""Lines that were changed or cut since they were written: what a start does with them.

What can still be read stays in its file. Of records see `runs.store.records`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runs.store.failures import is_failure
from runs.store.files import keep_readable
from runs.store.journal import is_event, segments
from runs.supervisor.budget import is_loan

_SHOWN = 10


def set_aside_damaged(run_dir: Path) -> list[str]:
    """Move the unreadable lines of journals and ledgers to the quarantine, and name each.

    For a start, before anything is read of them. Raises `StorageError`.
    """
    quarantine = run_dir / "quarantine"
    named = []
    for name, is_readable in (
        ("failures.jsonl", is_failure),
        ("budget.jsonl", is_loan),
    ):
        named += keep_readable(run_dir / name, quarantine, is_readable)
    for segment in sorted(segments(run_dir / "inflight")):
        named += keep_readable(segment, quarantine, is_event)
    return named


def listed_in_words(named: Sequence[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(named) - _SHOWN:,} more" if len(named) > _SHOWN else ""
    return ", ".join(named[:_SHOWN]) + more
