"""Conversations of agents that run as commands, with their messages in an order that rows can have.

Such agents speak several times in a row: reminders after results, several messages before the first
reply, system messages in the middle. Every trainer wants: system, user, assistant, results, and so
on. What would be out of order is added to the message before it, as the model read it there;
`OWN_CHARS` of a result says where its own text ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_THREAD = "thread#"

OWN_CHARS = "own_chars"
"""In a result that others' words were added to: the length of its own text."""


def is_agents(part: Mapping[str, Any]) -> bool:
    """Whether a record, or an inner conversation, is that of an agent that runs as a command."""
    return "agent" in part or str(part.get("key", "")).startswith(_THREAD)


def ends_with_a_call(record: Mapping[str, Any]) -> bool:
    """Whether an agent ended its task by a call, whose result no model has seen."""
    last = record["messages"][-1]
    return is_agents(record) and last["role"] == "assistant" and bool(last.get("tool_calls"))


def in_order(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """An agent's conversation with its messages in order; any other as it is."""
    return {**part, "messages": _merged(part["messages"])} if is_agents(part) else part


def _merged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """User and system messages, but for those that may follow, added to the one before them."""
    merged: list[Mapping[str, Any]] = []
    for message in messages:
        role, before = message["role"], merged[-1]["role"] if merged else "system"
        if role in ("assistant", "tool") or (before == "system" and role in ("system", "user")):
            merged.append(message)
        elif before in ("user", "tool"):
            earlier = merged[-1]
            own = {OWN_CHARS: len(earlier["content"])} if before == "tool" else {}
            content = f"{earlier['content']}\n\n{message['content']}"
            blocks = [*_blocks_of(earlier), *_blocks_of(message)]
            others = {"provider_blocks": {"blocks": blocks}} if blocks else {}
            merged[-1] = {**own, **earlier, **others, "content": content}
        else:
            merged.append({**message, "role": "user"})
    return merged


def _blocks_of(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    blocks: Sequence[Mapping[str, Any]] = (message.get("provider_blocks") or {}).get("blocks", ())
    return blocks
