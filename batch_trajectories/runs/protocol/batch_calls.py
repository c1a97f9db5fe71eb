"""How parent and workers name models and calls of the Batch API."""

from __future__ import annotations

from hashlib import blake2b

from agent.models.model import ModelSettings

_HASH_BYTES = 10


def name_of(settings: ModelSettings) -> str:
    """The name of a model between parent and workers; it stays if the endpoint moves."""
    return f"{settings.api} {settings.reference or settings.name}"


def item_id(task: bytes, asked: bytes, time: int) -> str:
    """The id of a task's call with this question, asked for the `time`-th time (from 0).

    It begins with the task's key and has 53 characters that every provider allows.
    """
    digest = blake2b(b"%d %b" % (time, asked), digest_size=_HASH_BYTES).hexdigest()
    return f"{task.hex()}-{digest}"


def task_of(id: str) -> bytes:
    """The key of the task that a call belongs to."""
    return bytes.fromhex(id.partition("-")[0])
