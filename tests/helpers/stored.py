"""Records as readers find them, from the parts that a test gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from agent.messages.tokens import TokenTurn, token_turns
from batch_trajectories.engine.record import as_stored
from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.row_json import dumps_row
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.tolerance import Tolerance, parse_reasons
from batch_trajectories.export.rows.format import RowFormat, load_kind
from batch_trajectories.export.rows.format_names import format_names
from batch_trajectories.records.record_types import Record, StoredTurn
from batch_trajectories.records.tasks import SCHEMA_VERSION

ROW_FORMATS = [name for name in format_names() if isinstance(load_kind(name), RowFormat)]
"""Formats with one row per conversation."""

_PLAIN = Style()

_CONVERSATION: dict[str, Any] = {
    "messages": [],
    "turns": [],
    "tool_calls": [],
    "notes": [],
    "discarded": [],
    "inner": [],
    "resumes": [],
    "api_calls": 0,
    "usage": None,
    "cost_usd": None,
    "model_returned": None,
}

KEPT: dict[str, Any] = {
    **_CONVERSATION,
    "id": "r1",
    "status": "completed",
    "status_reason": None,
    "error": None,
    "prompt_id": "r1",
    "sample": 0,
    "input_digest": "d",
    "attempt": 1,
    "row": {},
    "tools": [],
    "model": "m",
    "api": "openai_chat",
    "toolsets": [],
    "sandbox": None,
    "seed": None,
    "config_digest": "c",
    "options": {},
    "view_compacted": False,
    "finished_at": 2.5,
    "schema_version": SCHEMA_VERSION,
}
"""What records hold, where a test says nothing of it."""

_TURN = {"cost_usd": None, "usage": None, "finish_reason": "stop", "started_at": 1, "duration_s": 0}


def complete(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record with all keys that ours have."""
    return {**KEPT, **_whole(record)}


def to_record(record: Mapping[str, Any]) -> Record:
    """A record with all keys that ours have, as it is read from its line."""
    return as_stored(complete(record))


def written_row(record: Mapping[str, Any], name: str = "openai", **style: Any) -> dict[str, Any]:
    """The row of a record in a format, as a reader of the line gets it."""
    line = dumps_row(row_in(name, to_record(record), Style(**style)))
    loaded: dict[str, Any] = json.loads(line)
    return loaded


def tolerant_row(record: Mapping[str, Any], name: str, *accepts: str) -> dict[str, Any]:
    """The row of a record in a format that accepts these flaws."""
    return row_in(name, to_record(record), Style(tolerance=Tolerance(parse_reasons(accepts))))


def row_in(name: str, record: Record, style: Style = _PLAIN) -> dict[str, Any]:
    """The row of a record in a format with one row per conversation; raises Rejected."""
    format = load_kind(name)
    assert isinstance(format, RowFormat)
    style = format.limit(style)
    return format.row_of(apply_style(read_conversation(record), style), style)


def to_row(record: Record) -> dict[str, Any]:
    """Its row in the format of training files; raises Rejected."""
    return row_in("hermes", record)


def token_turns_of(part: Mapping[str, Any]) -> list[TokenTurn]:
    """The turns with token ids of a record, or of a conversation inside one."""
    turns = msgspec.convert(part["turns"], list[StoredTurn])
    return list(token_turns([turn.tokens for turn in turns]))


def _whole(part: Mapping[str, Any]) -> dict[str, Any]:
    """A record, or a conversation inside one, with what every conversation has."""
    turns = [{"turn": n, **_TURN, **turn} for n, turn in enumerate(part.get("turns", ()), 1)]
    inner = [_whole(conversation) for conversation in part.get("inner", ())]
    discarded = [{"turn": 1, **_TURN, **reply} for reply in part.get("discarded", ())]
    found = {"turns": turns, "inner": inner, "discarded": discarded}
    return {**_CONVERSATION, **part, **found}
