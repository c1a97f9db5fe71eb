"""Conversations of agents that run as commands, with their messages in an order that rows can have.

Such agents speak several times in a row: reminders after results, several messages before the first
reply, system messages in the middle. Every trainer wants: system, user, assistant, results, and so
on. What would be out of order is added to the message before it, as the model read it there;
`OWN_CHARS` of a result says where its own text ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from msgspec.structs import replace

from batch_trajectories.runs.store.record_types import (
    InnerRecord,
    Record,
    StoredBlocks,
    StoredConversation,
    StoredMessage,
)

_THREAD = "thread#"

_Part = TypeVar("_Part", bound=StoredConversation)


def is_agents(part: StoredConversation) -> bool:
    """Whether a record, or an inner conversation, is that of an agent that runs as a command."""
    if isinstance(part, Record):
        return part.agent is not None
    return isinstance(part, InnerRecord) and part.key.startswith(_THREAD)


def ends_with_a_call(record: Record) -> bool:
    """Whether an agent ended its task by a call, whose result no model has seen."""
    last = record.messages[-1]
    return is_agents(record) and last.role == "assistant" and bool(last.tool_calls)


def in_order(part: _Part) -> _Part:
    """An agent's conversation with its messages in order; any other as it is."""
    return replace(part, messages=_merged(part.messages)) if is_agents(part) else part


def _merged(messages: Sequence[StoredMessage]) -> list[StoredMessage]:
    """User and system messages, but for those that may follow, added to the one before them."""
    merged: list[StoredMessage] = []
    for message in messages:
        role, before = message.role, merged[-1].role if merged else "system"
        if role in ("assistant", "tool") or (before == "system" and role in ("system", "user")):
            merged.append(message)
        elif before in ("user", "tool"):
            earlier = merged[-1]
            own = earlier.own_chars
            if before == "tool" and own is None:
                own = len(earlier.content)
            merged[-1] = replace(
                earlier,
                content=f"{earlier.content}\n\n{message.content}",
                own_chars=own,
                provider_blocks=_joined_blocks(earlier, message),
            )
        else:
            merged.append(replace(message, role="user"))
    return merged


def _joined_blocks(earlier: StoredMessage, message: StoredMessage) -> StoredBlocks | None:
    if (added := message.provider_blocks) is None:
        return earlier.provider_blocks
    known = earlier.provider_blocks or StoredBlocks()
    return replace(known, blocks=[*known.blocks, *added.blocks])
