"""What a model did in a conversation, apart from the turns that the prompt brought along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.reasoning import hides_reasoning, split_inline_reasoning
from agent.tokens import has_ids
from runs.store.index import own_turns

_UNNAMED_FAILURE = "reported"
"""The kind of failures that tools report themselves, without an exception."""


class Counts(msgspec.Struct, frozen=True, gc=False):
    """Counts of what this run's model did in a conversation."""

    tools: list[dict[str, Any]]
    """Counts of its tool calls, see `tool_stats`."""
    replies: int
    """Number of its messages."""
    with_reasoning: int
    """Number of those that have reasoning, see `has_reasoning`."""
    hidden: int
    """Number of those with hidden reasoning."""
    failures: Sequence[str]
    """The kinds of its calls' failures."""
    with_token_ids: int
    """Number of its turns with token ids."""
    started_at: float | None
    """When its first turn began; None without turns."""
    ended_at: float | None
    """When its last turn ended."""


class Own(msgspec.Struct, frozen=True, gc=False):
    """What this run's model did in a conversation, without the turns of a branch's parent."""

    turns: Sequence[Any]
    """Turns of the record."""
    start: int
    """Index of its first message among those of the record."""
    messages: Sequence[Any]
    """That message and all later ones."""
    known: Counts | None = None
    """The counts, if they were made while the record was read."""

    @property
    def counts(self) -> Counts:
        """Counts for statistics. What only reads the conversation must not need its times."""
        return _counts_of(self) if self.known is None else self.known


def own_of(record: Mapping[str, Any]) -> Own:
    """What this run's model did in a record."""
    turns = own_turns(record)
    start = first_reply(record["messages"], turns=len(turns))
    return Own(turns, start, record["messages"][start:])


def _counts_of(own: Own) -> Counts:
    turns, replies = own.turns, replies_of(own)
    failed = [m for m in own.messages if m["role"] == "tool" and m.get("is_error")]
    reasoned = sum(map(has_reasoning, replies))
    return Counts(
        tool_stats(own.messages),
        len(replies),
        reasoned,
        hidden_reasoning(own) if reasoned < len(replies) else 0,
        [kind_of_failure(message.get("details")) for message in failed],
        sum(map(has_ids, turns)),
        min([turn["started_at"] for turn in turns], default=None),
        max([turn["started_at"] + turn["duration_s"] for turn in turns], default=None),
    )


def replies_of(own: Own) -> list[Mapping[str, Any]]:
    """The messages of this run's model."""
    return [message for message in own.messages if message["role"] == "assistant"]


def first_reply(messages: Sequence[Mapping[str, Any]], *, turns: int) -> int:
    """The index of the first of the last `turns` assistant messages, or the end without any.

    These are the model's own; earlier assistant messages came with the prompt.
    """
    starts = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    own = starts[-turns:] if turns else []
    return own[0] if own else len(messages)


def tool_stats(messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How often each tool was called in `messages` and how it went, sorted by tool.

    A call without a result is neither a success nor a failure.
    """
    stats: dict[str, dict[str, Any]] = {}
    of_call: dict[str, dict[str, Any]] = {}
    for message in messages:
        if message["role"] == "tool":
            if (tool := of_call.get(message["tool_call_id"])) is not None:
                tool["failure" if message.get("is_error") else "success"] += 1
            continue
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            if (tool := stats.get(name)) is None:
                tool = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
            tool["count"] += 1
            of_call[call["id"]] = tool
    return [stats[name] for name in sorted(stats)]


def has_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether an assistant message has reasoning, in its own field or inline."""
    if (reasoning := message.get("reasoning")) and not reasoning.isspace():
        return True
    content = message.get("content")
    return (
        isinstance(content, str)
        and "<" in content
        and split_inline_reasoning(content).reasoning is not None
    )


def kind_of_failure(details: Mapping[str, Any] | None) -> str:
    """The kind of a failure by the details of its result."""
    kind = (details or {}).get("failure")
    return kind if isinstance(kind, str) else _UNNAMED_FAILURE


def hidden_reasoning(own: Own) -> int:
    """The number of replies with hidden reasoning."""
    return sum(
        not has_reasoning(message) and hides_reasoning(message, turn.get("usage"))
        for message, turn in zip(replies_of(own), own.turns, strict=False)
    )
