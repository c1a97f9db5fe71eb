"""Ids of conversations: endpoints keep the requests of one id where its prompt is cached.

An id reveals no prompts, paths or keys: it is a digest with a random key of the run. It depends on
the run and the task alone, so it stays the same over turns, retries, resumes and machines.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

_BYTES = 16
"""Size of ids and of runs' keys: 32 characters, which every provider takes (OpenAI up to 64)."""


def new_run_key() -> str:
    """Make a random key for the ids of one run."""
    return secrets.token_hex(_BYTES)


def new_id() -> str:
    """Make a random id for a conversation outside of runs, which is never resumed."""
    return secrets.token_hex(_BYTES)


def task_conversation_id(run_key: str, task: bytes) -> str:
    """The id of a task's conversation; "" for a run without a key."""
    if not run_key:
        return ""
    key = run_key.encode()[: blake2b.MAX_KEY_SIZE]
    return blake2b(task, digest_size=_BYTES, key=key, person=b"conversation").hexdigest()


def inner_conversation_id(outer: str, name: str) -> str:
    """The id of the inner conversation called `name`; "" if the outer one has no id."""
    if not outer:
        return ""
    text = name.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=_BYTES, key=outer.encode(), person=b"inner").hexdigest()
