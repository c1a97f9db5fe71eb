"""Finds and counts the work of the run's model in a conversation.

Assistant messages of the prompt, and turns of a branch's parent, are not its work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from agent.messages.message import SIMULATED_USER, hides_reasoning, split_inline_reasoning
from batch_trajectories.basics import exact_json
from batch_trajectories.records.record_types import (
    InnerRecord,
    Record,
    StoredConversation,
    StoredMessage,
    StoredTurn,
)

_UNNAMED_FAILURE = "reported"
"""The kind of a failure that the tool itself reports, without an exception."""


class WorkCounts(msgspec.Struct, frozen=True, gc=False):
    """Counts of the work of this run's model in a conversation."""

    tools: list[dict[str, Any]]
    """Counts of the model's tool calls, see `tool_stats`."""
    replies: int
    """Number of the model's messages."""
    with_reasoning: int
    """Number of replies that have reasoning, see `has_reasoning`."""
    hidden: int
    """Number of replies whose reasoning the API hides."""
    failures: Sequence[str]
    """The kinds of failures of calls, one for each failed call."""
    hollow: int
    """Number of replies with neither text nor reasoning nor a call."""
    results: int
    """Number of results of calls."""
    with_token_ids: int
    """Number of turns with token ids."""
    started_at: float | None
    """The time when the first turn began, epoch seconds; None without turns."""
    ended_at: float | None
    """The time when the last turn ended, epoch seconds; None without turns."""


class _Location(NamedTuple):
    """The place at which the work of this run's model begins in a record."""

    prior_replies: int
    start: int
    """The index of the model's first message."""


class AuthoredWork:
    """The work of this run's model in a record, without the turns of a branch's parent."""

    __slots__ = ("_counts", "_location", "_messages", "turns")

    def __init__(self, record: StoredConversation) -> None:
        self.turns: Sequence[StoredTurn] = record.own_turns
        self._messages = record.messages
        self._location: _Location | None = None
        self._counts: WorkCounts | None = None

    @property
    def prior_replies(self) -> int:
        """Number of replies from before this work: of the prompt, or of a branch's parent."""
        return self._locate().prior_replies

    @property
    def start(self) -> int:
        """Index of the model's first message in the record."""
        return self._locate().start

    def _locate(self) -> _Location:
        if self._location is None:
            messages = self._messages
            replies = [n for n, message in enumerate(messages) if message.role == "assistant"]
            prior_replies = max(0, len(replies) - len(self.turns))
            start = replies[prior_replies] if prior_replies < len(replies) else len(messages)
            self._location = _Location(prior_replies, start)
        return self._location

    @property
    def messages(self) -> Sequence[StoredMessage]:
        """The model's first message and all later messages of the record."""
        return self._messages[self.start :]

    @property
    def counts(self) -> WorkCounts:
        """Counts of this work, made at the first use."""
        if self._counts is None:
            self._counts = _count_turn(self)
        return self._counts

    def set_known(self, start: int, counts: WorkCounts) -> None:
        """Set start and counts that the caller has found; there are no prior replies."""
        self._location, self._counts = _Location(0, start), counts


def _count_turn(authored: AuthoredWork) -> WorkCounts:
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
                failures.append(failure_kind(message.details))
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


def users_with_calls(record: StoredConversation) -> list[InnerRecord]:
    """The conversations in which a simulated user called tools, one for each of its messages."""
    return [one for one in record.inner if one.name == SIMULATED_USER and one.tool_calls]


def user_tool_names(record: Record) -> frozenset[str]:
    """The names of the tools that the simulated user of a record could call."""
    raw = bytes(record.inner_tools)
    offered = exact_json.loads(raw).get(SIMULATED_USER, []) if raw else []
    return frozenset(tool["function"]["name"] for tool in offered)


def interrupted_calls(record: Record) -> list[str]:
    """The ids of calls whose results say that a crash interrupted them, inherited ones included."""
    if not record.resumes and record.fork is None:
        return []
    calls = [call for resume in record.resumes for call in resume.interrupted]
    if record.fork is not None:
        inherited = record.messages[: AuthoredWork(record).start]
        calls += [
            str(message.tool_call_id)
            for message in inherited
            if message.is_error and message.details.get("failure") == "interrupted"
        ]
    return calls


def first_reply(messages: Sequence[StoredMessage], *, turns: int) -> int:
    """The index of the first of the last `turns` assistant messages; without any, of the end.

    The last `turns` assistant messages are the model's; earlier ones came with the prompt.
    """
    starts = [n for n, message in enumerate(messages) if message.role == "assistant"]
    last = starts[-turns:] if turns else []
    return last[0] if last else len(messages)


def tool_stats(messages: Iterable[StoredMessage]) -> list[dict[str, Any]]:
    """Counts of the calls in `messages` by tool: `tool`, `count`, `success`, `failure`.

    Sorted by tool. A call without a result is neither a success nor a failure.
    """
    stats: dict[str, dict[str, Any]] = {}
    tool_by_call: dict[str | None, dict[str, Any]] = {}
    for message in messages:
        role = message.role
        if role == "tool":
            if (tool := tool_by_call.get(message.tool_call_id)) is not None:
                tool["failure" if message.is_error else "success"] += 1
        elif role == "assistant":
            for call in message.tool_calls:
                name = call.function.name
                if (tool := stats.get(name)) is None:
                    tool = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
                tool["count"] += 1
                tool_by_call[call.id] = tool
    return [stats[name] for name in sorted(stats)]


def has_reasoning(message: StoredMessage) -> bool:
    """Whether an assistant message has reasoning, in a field or inline."""
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


def failure_kind(details: Mapping[str, Any]) -> str:
    """The kind of a failure, read from the details of its result."""
    kind = details.get("failure")
    return kind if isinstance(kind, str) else _UNNAMED_FAILURE
