"""Whether a task needs more work, by what lies on disk: one rule for dealing and accounts."""

from __future__ import annotations

from batch.records import Entry

WORKER_DIED = "worker_died"
"""The failure class of a task that killed its workers; it is not tried again by itself."""


def is_settled(entry: Entry, max_attempts: int) -> bool:
    """Whether a task with this record needs no more work.

    A failed record can be tried again once `max_attempts` is raised.
    """
    if entry.status != "failed":
        return True
    return entry.error_class == WORKER_DIED or entry.attempt >= max_attempts
