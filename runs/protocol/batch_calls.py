"""The names by which parent and workers know models and calls that go by the Batch API."""

from __future__ import annotations

from hashlib import blake2b

from agent.models.model import ModelSettings

_HASH_BYTES = 10


def name_of(settings: ModelSettings) -> str:
    """What parent and workers call the models of a run; the same after a move of the endpoint."""
    return f"{settings.api} {settings.reference or settings.name}"


def item_id(task: bytes, asked: bytes, time: int) -> str:
    """The id of the call by which a task asks something for the `time`-th time, from 0.

    It begins with the task's key, and has 53 characters of those that every provider takes.
    """
    digest = blake2b(b"%d %b" % (time, asked), digest_size=_HASH_BYTES).hexdigest()
    return f"{task.hex()}-{digest}"


def task_of(id: str) -> bytes:
    """The key of the task that a call belongs to."""
    return bytes.fromhex(id.partition("-")[0])
