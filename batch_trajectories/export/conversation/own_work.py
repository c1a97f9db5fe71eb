"""What a model did in a conversation, apart from the turns that the prompt brought along."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from agent.messages.message import hides_reasoning, split_inline_reasoning
from batch_trajectories.records.record_types import (
    Record,
    StoredConversation,
    StoredMessage,
    StoredTurn,
)

_UNNAMED_FAILURE = "reported"
"""The kind of failures that tools report themselves, without an exception."""


class WorkCounts(msgspec.Struct, frozen=True, gc=False):
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
    hollow: int
    """Number of its messages with neither text nor reasoning nor a call."""
    results: int
    """Number of results."""
    with_token_ids: int
    """Number of its turns with token ids."""
    started_at: float | None
    """When its first turn began; None without turns."""
    ended_at: float | None
    """When its last turn ended."""


class Own:
    """What this run's model did in a record, without the turns of a branch's parent."""

    __slots__ = ("_counts", "_messages", "_location", "turns")

    def __init__(self, record: StoredConversation) -> None:
        self.turns: Sequence[StoredTurn] = record.own_turns
        self._messages = record.messages
        self._location: tuple[int, int] | None = None
        self._counts: WorkCounts | None = None

    @property
    def prior_replies(self) -> int:
        """Number of replies that were there before, from the prompt or a branch's parent."""
        return self._locate()[0]

    @property
    def start(self) -> int:
        """Index of its first message among those of the record."""
        return self._locate()[1]

    def _locate(self) -> tuple[int, int]:
        if self._location is None:
            messages = self._messages
            replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
            prior_replies = max(0, len(replies) - len(self.turns))
            start = replies[prior_replies] if prior_replies < len(replies) else len(messages)
            self._location = prior_replies, start
        return self._location

    @property
    def messages(self) -> Sequence[StoredMessage]:
        """That message and all later ones."""
        return self._messages[self.start :]

    @property
    def counts(self) -> WorkCounts:
        """Counts of it, made once."""
        if self._counts is None:
            self._counts = _counts_of(self)
        return self._counts

    def set_known(self, start: int, counts: WorkCounts) -> None:
        """Take what the caller knows; nothing was brought along."""
        self._location, self._counts = (0, start), counts


def _counts_of(authored: Own) -> WorkCounts:
    turns, messages = authored.turns, authored.messages
    replies = with_reasoning = hidden = hollow = results = with_ids = 0
    failures = []
    for message in messages:
        role = message.role
        if role == "assistant":
            if has_reasoning(message):
                with_reasoning += 1
            else:
                text = message.content
                hollow += not message.tool_calls and (not text or text.isspace())
                if replies < len(turns):
                    hidden += is_reasoning_hidden(message, turns[replies].reasoning_tokens)
            replies += 1
        elif role == "tool":
            results += 1
            if message.is_error:
                failures.append(kind_of_failure(message.details))
    started_at = ended_at = None
    for turn in turns:
        ended = turn.started_at + turn.duration_s
        if started_at is None or turn.started_at < started_at:
            started_at = turn.started_at
        if ended_at is None or ended > ended_at:
            ended_at = ended
        with_ids += turn.tokens is not None and turn.has_ids
    return WorkCounts(
        tools=tool_stats(messages),
        replies=replies,
        with_reasoning=with_reasoning,
        hidden=hidden,
        failures=failures,
        hollow=hollow,
        results=results,
        with_token_ids=with_ids,
        started_at=started_at,
        ended_at=ended_at,
    )


def interrupted_calls(record: Record) -> list[str]:
    """The ids of calls whose results say that a crash interrupted them; a branch inherits some."""
    if not record.resumes and record.fork is None:
        return []
    calls = [call for resume in record.resumes for call in resume.interrupted]
    if record.fork is not None:
        inherited = record.messages[: Own(record).start]
        calls += [
            str(message.tool_call_id)
            for message in inherited
            if message.is_error and message.details.get("failure") == "interrupted"
        ]
    return calls


def first_reply(messages: Sequence[StoredMessage], *, turns: int) -> int:
    """The index of the first of the last `turns` assistant messages, or the end without any.

    These are the model's own; earlier assistant messages came with the prompt.
    """
    starts = [n for n, message in enumerate(messages) if message.role == "assistant"]
    last = starts[-turns:] if turns else []
    return last[0] if last else len(messages)


def tool_stats(messages: Iterable[StoredMessage]) -> list[dict[str, Any]]:
    """How often each tool was called in `messages` and how it went, sorted by tool.

    A call without a result is neither a success nor a failure.
    """
    stats: dict[str, dict[str, Any]] = {}
    of_call: dict[str | None, dict[str, Any]] = {}
    for message in messages:
        role = message.role
        if role == "tool":
            if (tool := of_call.get(message.tool_call_id)) is not None:
                tool["failure" if message.is_error else "success"] += 1
        elif role == "assistant":
            for call in message.tool_calls:
                name = call.function.name
                if (tool := stats.get(name)) is None:
                    tool = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
                tool["count"] += 1
                of_call[call.id] = tool
    return [stats[name] for name in sorted(stats)]


def has_reasoning(message: StoredMessage) -> bool:
    """Whether an assistant message has reasoning, in its own field or inline."""
    if (reasoning := message.reasoning) and not reasoning.isspace():
        return True
    content = message.content
    return "<" in content and split_inline_reasoning(content).reasoning is not None


def is_reasoning_hidden(message: StoredMessage, reasoning_tokens: int | None) -> bool:
    """Whether the model reasoned for a reply that has no readable reasoning."""
    verbatim = message.provider_blocks
    return hides_reasoning(
        () if verbatim is None else verbatim.blocks,
        [call.extra_content for call in message.tool_calls],
        reasoning_tokens,
    )


def kind_of_failure(details: Mapping[str, Any]) -> str:
    """The kind of a failure by the details of its result."""
    kind = details.get("failure")
    return kind if isinstance(kind, str) else _UNNAMED_FAILURE
