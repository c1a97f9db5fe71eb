"""Whether a task needs more work: one rule for the supervisor, totals and maintenance."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from batch_trajectories.runs.store.index import IndexEntry

WORKER_DIED = "worker_died"
"""The failure class of a task that killed its workers; it is not retried automatically."""

NO_LIMIT = sys.maxsize
"""A `max_attempts` that no task reaches."""


def is_settled(entry: IndexEntry, max_attempts: int) -> bool:
    """Whether a task with this record needs no more work.

    After a raise of `max_attempts`, a failed record is tried again.
    """
    if entry.status != "failed":
        return True
    return entry.error_class == WORKER_DIED or entry.attempt >= max_attempts


class Settled:
    """The keys of the tasks that need no more work."""

    def __init__(self, records: Mapping[bytes, IndexEntry], max_attempts: int) -> None:
        self._records = records
        self._max_attempts = max_attempts

    def __contains__(self, key: object) -> bool:
        entry = self._records.get(key) if isinstance(key, bytes) else None
        return entry is not None and is_settled(entry, self._max_attempts)
