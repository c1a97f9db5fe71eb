"""What a model did in a conversation, apart from the turns that the prompt brought along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from agent.reasoning import hides_reasoning, split_inline_reasoning
from runs.store.index import own_turns


class Own(NamedTuple):
    """What this run's model did in a conversation, without the turns of a branch's parent."""

    turns: Sequence[Any]
    """Turns of the record."""
    start: int
    """Index of its first message among those of the record."""
    messages: Sequence[Any]
    """That message and all later ones."""
    tools: list[dict[str, Any]]
    """Counts of its tool calls, see `tool_stats`."""
    replies: int
    """Number of its messages."""
    with_reasoning: int
    """Number of those that have reasoning, see `has_reasoning`."""
    failed: Sequence[Mapping[str, Any]]
    """The results of its calls that failed."""


def own_of(record: Mapping[str, Any]) -> Own:
    """What this run's model did in a record."""
    turns = own_turns(record)
    start = first_reply(record["messages"], turns=len(turns))
    messages = record["messages"][start:]
    replies = [message for message in messages if message["role"] == "assistant"]
    failed = [m for m in messages if m["role"] == "tool" and m.get("is_error")]
    reasoned = sum(map(has_reasoning, replies))
    return Own(turns, start, messages, tool_stats(messages), len(replies), reasoned, failed)


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


def hidden_reasoning(own: Own) -> int:
    """The number of replies with hidden reasoning."""
    said = (message for message in own.messages if message["role"] == "assistant")
    return sum(
        not has_reasoning(message) and hides_reasoning(message, turn.get("usage"))
        for message, turn in zip(said, own.turns, strict=False)
    )
