"""What a task is, and what a bad row is: the values that all of a run speaks of."""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

SCHEMA_VERSION = 2
"""Of records and run.json; raised when a reader of the older form would misread the newer."""


class Task(NamedTuple):
    """One sample of one prompt: the unit of scheduling, resuming and accounting."""

    id: str
    prompt_id: str
    sample: int
    input_digest: str
    """Changes when the row's rollout columns change: an edited prompt is new work."""
    columns: dict[str, Any]

    @property
    def key(self) -> bytes:
        """16 bytes that identify the task and its input."""
        return task_key(self.id, self.input_digest)


class BadRow(NamedTuple):
    """A line that cannot be used, and why."""

    line: int
    reason: str


def task_key(task_id: str, digest: str) -> bytes:
    """16 bytes for a task id and its input digest: small enough to hold millions of them."""
    return hashlib.blake2b(f"{digest} {task_id}".encode(), digest_size=16).digest()
