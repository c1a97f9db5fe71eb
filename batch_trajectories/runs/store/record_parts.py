"""Small parts of a record, of which nothing else is part; see `record_types`."""

from __future__ import annotations

from typing import TypedDict

import msgspec

Number = int | float


class UsageSums(TypedDict, total=False):
    """Tokens of all paid calls; a dictionary, because rows show it as it is."""

    input_tokens: int | None
    output_tokens: int | None
    cache_read_tokens: int | None
    cache_write_tokens: int | None
    reasoning_tokens: int | None


class ToolRun(msgspec.Struct, gc=False, omit_defaults=True):
    """How the call number `call` (from 0) of a turn went."""

    turn: int
    call: int
    name: str
    is_error: bool
    started_at: Number
    duration_s: Number | None


class StoredFork(msgspec.Struct, gc=False, omit_defaults=True):
    """The parent of a branch: its run and record, the turn it continues after, and its number."""

    turn: int
    run: str | None = None
    record: str | None = None
    branch: int | None = None


class StoredThread(msgspec.Struct, gc=False, omit_defaults=True):
    """One conversation of an agent that runs as a command."""

    key: str
    name: str
    calls: int
    model: str | None = None
