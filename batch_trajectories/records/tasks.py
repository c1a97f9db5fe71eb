"""Tasks and bad rows, and the keys of tasks."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any, NamedTuple

SCHEMA_VERSION = 2
"""Version of records and run.json. Raise it when readers of the old form would misread the new."""

SUSPECT_DEATHS = 2
"""A task that was in flight at this many worker deaths runs isolated."""


class Task(NamedTuple):
    """One sample of one prompt: what is scheduled, resumed and counted."""

    id: str
    prompt_id: str
    sample: int
    input_digest: str
    """A digest of the columns that affect the conversation: an edited prompt is new work."""
    columns: dict[str, Any]
    model: str | None = None
    """The model, if a cascade chose it; None if the config or the row names it."""

    @property
    def key(self) -> bytes:
        """16 bytes that identify the task and its input."""
        return task_key(self.id, self.input_digest)


class BadRow(NamedTuple):
    """A line of the dataset that cannot be used, and why."""

    line: int
    reason: str


@lru_cache(maxsize=4096)  # a conversation asks for its key at each event
def task_key(task_id: str, digest: str) -> bytes:
    """16 bytes for a task id and its input digest: small enough for millions of tasks."""
    return hashlib.blake2b(f"{digest} {task_id}".encode(), digest_size=16).digest()
