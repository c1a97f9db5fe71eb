"""Rows of `conversations` of `from` and `value`: ShareGPT, and its dialect of the Hermes models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.messages.message import Message
from agent.messages.reasoning import split_inline_reasoning
from batch_trajectories.runs.importing.conversation import (
    Dialogue,
    Foreign,
    Reader,
    Unreadable,
    of_metadata,
)
from batch_trajectories.runs.importing.readers.openai import (
    columns_of,
    id_of,
    keep_media,
    metadata_in,
    tools_of,
)
from batch_trajectories.runs.maintenance.import_hermes import read_conversation

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}


def _read(row: Mapping[str, Any]) -> Foreign:
    entries = row.get("conversations")
    if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
        raise Unreadable("conversations: it must be a list of objects")
    for n, entry in enumerate(entries):
        for key in ("from", "value"):
            if not isinstance(entry.get(key), str):
                raise Unreadable(f"conversations[{n}].{key}: it must be text")
    metadata = metadata_in(row)
    known = of_metadata(metadata)
    tools = tools_of(row)
    if any("<tool_call>" in str(one.get("value")) or one.get("from") == "tool" for one in entries):
        try:
            # Its times are left out: rows of this format have none.
            hermes = read_conversation(entries, model=known.get("model"), at=0.0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unreadable(f"conversations: {error}") from error
        messages, tools = hermes.trajectory.messages, tools or hermes.tools
    else:
        messages = [_message(entry, n) for n, entry in enumerate(entries)]
    keep_media(row, messages)
    replies = [{"model": known.get("model_returned")} for m in messages if m["role"] == "assistant"]
    found = Foreign(Dialogue(messages, replies), "sharegpt", id=id_of(row), tools=tools)
    columns = {key: value for key, value in columns_of(row).items() if key != "system"}
    found.columns, found.facts = columns, known
    return found


def _message(entry: Mapping[str, Any], n: int) -> Message:
    role, value = _ROLES.get(entry["from"]), entry["value"]
    if role is None:
        known = ", ".join(_ROLES)
        raise Unreadable(f"conversations[{n}].from: {entry['from']!r} is none of {known}, tool")
    message = Message(role=role, content=value)  # type: ignore[typeddict-item]
    if role == "assistant":
        reasoning, message["content"] = split_inline_reasoning(value)
        if reasoning:
            message["reasoning"] = reasoning
    return message


def _is_row(row: Mapping[str, Any]) -> bool:
    return "conversations" in row


READER = Reader(_is_row, row=_read)
