"""Small parts of a record, which have no parts of their own; see `record_types`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import msgspec

Number = int | float

KEPT_OF_STEPS = (
    *("timestamp", "model_name", "reasoning_effort", "llm_call_count", "metrics", "extra"),
)
"""Fields of an imported ATIF step that its turn keeps as they came, in `atif` of its `extra`."""


class StoredPart(msgspec.Struct, gc=False, omit_defaults=True):
    """A part of a record. It is in no reference cycle, so the garbage collector skips it."""


class UsageSums(TypedDict, total=False):
    """Tokens of all paid calls; a dictionary, because rows show it as it is."""

    input_tokens: int | None
    output_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None


class ToolRun(StoredPart):
    """The outcome of call number `call` (from 0) of a turn."""

    turn: int
    call: int
    name: str
    is_error: bool
    started_at: Number
    duration_s: Number | None


class Resume(StoredPart):
    """A resume of the conversation by a later start."""

    interrupted: list[str]
    turn: int | None = None
    """After so many turns."""
    workspace_kept: bool | None = None


class StoredFork(StoredPart):
    """The parent of a branch: its run and record, the turn it continues after, and its number."""

    turn: int
    run: str | None = None
    record: str | None = None
    branch: int | None = None


class StoredThread(StoredPart):
    """One conversation of an agent that runs as a command."""

    key: str
    name: str
    calls: int
    model: str | None = None


class StoredTokens(StoredPart):
    """The sampled tokens of a turn; see `agent.messages.tokens`."""

    shared: int = 0
    prompt: str | None = None
    completion: str | None = None
    logprobs: str | None = None
    texts: list[str] | None = None
    split: dict[str, str] | None = None
    sampling: dict[str, Any] | None = None


class StoredUsage(StoredPart):
    """Tokens of a call; None is unknown."""

    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_tokens: int | None = None
    cache_write_tokens: int | None = None
    reasoning_tokens: int | None = None


class StoredError(StoredPart, rename={"error_class": "class"}):
    """Why a task failed."""

    error_class: str
    message: str | None = None


class AgentFacts(StoredPart):
    """What is known of the agent that held the conversation."""

    name: str | None = None
    version: str | None = None
    starts: int = 0
    stripped_tools: Sequence[str] = ()
    exit_code: int | None = None
    timed_out: bool | None = None
    stdout: str | None = None
    stderr: str | None = None
