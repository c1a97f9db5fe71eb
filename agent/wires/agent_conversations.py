"""The conversations of an agent, found among its threads, and the kind of each one.

A conversation is a thread up to the last call that the latest start made in it. A thread that
another thread continues is no conversation of its own. Neither is a thread whose replies another
thread repeats after changed messages: the difference is kept as `Rewritten`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agent.messages.message import NON_CHAT_CALLS, ExchangeEvent, Message
from agent.wires.thread import ReplyPlace, Thread
from agent.wires.threads import Threads

BEFORE_COMPACTION = "before compaction"
BRANCH = "branch"
EARLIER = "earlier attempt"
SIDE = "side"
SUBAGENT = "subagent"

_TAG = re.compile(r"</?\w+>")
_MIN_QUOTED_CHARS = 20
"""Minimum length of a text that identifies a reply when another text quotes it."""


@dataclass(slots=True)
class AgentConversation:
    """One conversation of an agent."""

    thread: Thread
    messages: list[Message]
    replies: list[ReplyPlace]
    """The places of the recorded replies."""
    tools: list[dict[str, Any]]
    """The schemas of all tools that calls of the conversation offered; the latest of each name."""
    has_tools: bool
    """Whether the last call of the conversation offered tools."""
    name: str = ""
    """The kind of conversation; "" for the main one."""
    is_follow_up: bool = False
    """Whether the conversation ends with a call about another one that had already ended."""
    new_calls: set[int] = field(default_factory=set)
    """The numbers of the calls that are part of no conversation before this one."""

    @property
    def key(self) -> str:
        """The name of the conversation within the record."""
        return f"thread#{self.thread.number}"

    @property
    def call_numbers(self) -> list[int]:
        """The numbers of its calls."""
        return [reply.number for reply in self.replies]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Calls whose requests had other messages than the conversation that they are part of."""

    calls: list[int]
    """The numbers of these calls."""
    conversation: AgentConversation
    start: int
    end: int
    messages: list[Message]
    """The messages of the requests in place of the conversation's from `start` to before `end`."""
    until: int
    """The position in the conversation of the reply to the last of these calls."""
    as_requested: AgentConversation
    """The same calls as a conversation of their own, with the messages of their requests."""


@dataclass(frozen=True, slots=True)
class AgentConversations:
    """All conversations of an agent."""

    main: AgentConversation | None
    """The conversation of the task itself; None if the agent made no call."""
    others: list[AgentConversation]
    rewritten: list[Rewritten]
    set_aside: list[ExchangeEvent]
    """The calls before the last restart that are part of no conversation."""


def find_conversations(threads: Threads, prompt: str) -> AgentConversations:
    """Find the conversations of an agent whose task is `prompt`."""
    conversations, rewritten = _drop_continued(_one_per_thread(threads))
    conversations.sort(key=lambda one: one.call_numbers[-1])
    summarized = {one.conversation.key for one in rewritten if _follows_summary(one)}
    main = _find_main(conversations, threads, prompt, summarized)
    counted: set[int] = set()
    if main is not None:
        conversations.remove(main)
        conversations.sort(key=lambda one: one.call_numbers[0])
        # Calls that a compaction keeps belong to the conversation before it.
        before = [one for one in conversations if one.name == BEFORE_COMPACTION]
        after = [one for one in conversations if one.name != BEFORE_COMPACTION]
        for one in (*before, main, *after):
            one.new_calls = set(one.call_numbers) - counted
            counted |= one.new_calls
        trunk = {
            *main.call_numbers,
            *(n for one in conversations if one.name for n in one.call_numbers),
        }
        for one in conversations:
            one.name = one.name or _plain_api(one, threads) or _kind(one, trunk)
    aside = [event for event in threads.exchanges if event["number"] not in counted]
    return AgentConversations(main, conversations, rewritten, aside)


def _one_per_thread(threads: Threads) -> list[AgentConversation]:
    """Make a conversation of each thread, up to the last call of the latest start."""
    last = {threads.thread_and_end(number)[0].number: number for number in sorted(threads.live)}
    conversations = []
    for number in last.values():
        thread, end = threads.thread_and_end(number)
        replies = [reply for reply in thread.replies if reply.position < end]
        offered = [threads.offered_tools(reply.number) for reply in replies]
        conversations.append(
            AgentConversation(
                thread=thread,
                messages=thread.messages[:end],
                replies=replies,
                tools=_unite_tools(offered),
                has_tools=bool(offered[-1]),
            )
        )
    return conversations


def _unite_tools(offered: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if all(tools is offered[0] for tools in offered):
        return offered[0]
    by_name = {str(tool["function"].get("name")): tool for tools in offered for tool in tools}
    return [*by_name.values()]


def _drop_continued(
    conversations: Sequence[AgentConversation],
) -> tuple[list[AgentConversation], list[Rewritten]]:
    """Drop conversations that others continue; return the rest, and the dropped that differ."""
    by_call: defaultdict[int, list[AgentConversation]] = defaultdict(list)
    for one in conversations:
        for number in one.call_numbers:
            by_call[number].append(one)
    rest, rewritten = [], []
    for one in conversations:
        numbers = set(one.call_numbers)
        repeating = [
            other
            for other in by_call[one.call_numbers[-1]]
            if other is not one and numbers.issubset(other.call_numbers)
        ]
        later = [other for other in repeating if not _is_about(other, one)]
        for other in repeating:
            other.is_follow_up = other.is_follow_up or _is_about(other, one)
        if not later:
            rest.append(one)
            continue
        longest = max(later, key=lambda other: len(other.replies))
        if longest.messages[: len(one.messages)] != one.messages:
            rewritten.append(_compare(one, longest))
    return rest, rewritten


def _is_about(other: AgentConversation, ended: AgentConversation) -> bool:
    """Whether `other` continues the conversation `ended` only by a call about its answer."""
    is_answer = ended.has_tools and not ended.messages[-1].get("tool_calls")
    return is_answer and not other.has_tools


def _compare(earlier: AgentConversation, later: AgentConversation) -> Rewritten:
    """Find where the requests of `earlier` had other messages than `later` has."""
    until = next(at for at, number in later.replies if number == earlier.call_numbers[-1])
    before, after = earlier.messages[:-1], later.messages[:until]
    start = _count_common(before, after)
    common_at_end = _count_common(before[start:][::-1], after[start:][::-1])
    return Rewritten(
        calls=[number for position, number in earlier.replies if position >= start],
        conversation=later,
        start=start,
        end=until - common_at_end,
        messages=before[start : len(before) - common_at_end],
        until=until,
        as_requested=earlier,
    )


def _count_common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Count the first messages that two lists have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))


def _follows_summary(rewritten: Rewritten) -> bool:
    """Whether a conversation begins with the reply to one call that had all other messages.

    Compactions are such calls: their reply, a summary, begins the next conversation.
    """
    is_first = rewritten.calls == rewritten.conversation.call_numbers[:1]
    return is_first and rewritten.start <= 1 and rewritten.end == rewritten.until


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A conversation that may be the main one."""

    conversation: AgentConversation
    similarity: int
    """The similarity of a conversation's beginning to the task, 0 to 3; see `_similarity`."""

    @property
    def begins_with_task_and_tools(self) -> bool:
        """Whether the task is in its opening, and its calls offer tools."""
        return self.similarity > 0 and bool(self.conversation.tools)

    def rank_by_task(self) -> tuple[bool, int, int, int]:
        """Return the sort key for candidates of which one begins with the task; highest first."""
        one = self.conversation
        return (
            self.begins_with_task_and_tools,
            self.similarity,
            -one.call_numbers[0],  # the one that began first
            len(one.replies),
        )

    def rank_by_length(self) -> tuple[bool, int, int]:
        """Return the sort key for candidates of which none begins with the task; highest first."""
        one = self.conversation
        return bool(one.tools), len(one.replies), -one.call_numbers[0]


def _find_main(
    conversations: Sequence[AgentConversation],
    threads: Threads,
    prompt: str,
    summarized: Container[str],
) -> AgentConversation | None:
    """Find the conversation of the task, and name those that compactions or restarts ended.

    `summarized` has the keys of conversations that begin with a summary. Returns None if there is
    no conversation.
    """
    candidates = [one for one in conversations if not one.is_follow_up]
    candidates = [one for one in candidates if _plain_api(one, threads) is None] or candidates
    if not candidates:
        return None
    main = _most_likely_main(candidates, prompt)
    while later := _find_continuation(main, candidates, threads, prompt, summarized):
        is_repeated = _opening(later) == _opening(main)
        main.name = EARLIER if is_repeated else BEFORE_COMPACTION
        main = later
    return main


def _most_likely_main(conversations: Sequence[AgentConversation], prompt: str) -> AgentConversation:
    candidates = [_Candidate(one, _similarity(one, prompt)) for one in conversations]
    # A call without tools may only ask for a title and quote the task, so without tools the task
    # counts only if no conversation offers any.
    if any(one.tools for one in conversations):
        is_task_known = any(one.begins_with_task_and_tools for one in candidates)
    else:
        is_task_known = any(one.similarity for one in candidates)
    rank = _Candidate.rank_by_task if is_task_known else _Candidate.rank_by_length
    return max(candidates, key=rank).conversation


def _similarity(conversation: AgentConversation, prompt: str) -> int:
    """Return how clearly the user's first messages hold the prompt.

    3: as whole lines; 2: in quotes; 1: within a line; 0: not at all.
    """
    prompt = prompt.strip()
    best = 0
    for text in _opening(conversation):
        if prompt not in text:
            continue
        if f"\n{prompt}\n" in f"\n{text.strip()}\n":
            return 3
        is_quoted = any(f"{mark}{prompt}{mark}" in text for mark in "\"'`")
        best = max(best, 2 if is_quoted else 1)
    return best


def _opening(conversation: AgentConversation) -> list[str]:
    """The texts of the user before the first reply."""
    first = conversation.replies[0].position
    messages = conversation.messages[:first]
    return [message["content"] for message in messages if message["role"] == "user"]


def _find_continuation(
    ended: AgentConversation,
    conversations: Sequence[AgentConversation],
    threads: Threads,
    prompt: str,
    summarized: Container[str],
) -> AgentConversation | None:
    """Find the conversation that continues `ended` from a summary, or repeats it from its start.

    Its calls follow the last one of `ended` and offer the same tools; it may keep the latest
    messages. It starts with the text of an earlier reply; or it has the same system prompt, and
    starts with the prompt or with a summary. Returns None if there is no such conversation.
    """
    numbers = set(ended.call_numbers)
    for other in sorted(conversations, key=lambda other: other.call_numbers[0]):
        kept = [number for number in other.call_numbers if number in numbers]
        first_new = next((number for number in other.call_numbers if number not in numbers), -1)
        if first_new <= ended.call_numbers[-1] or kept not in (
            [],
            ended.call_numbers[1:][-len(kept) :],
        ):
            continue
        if not ended.tools or ended.tools != other.tools:
            continue
        if _repeats_reply(other, threads, first_new):
            return other
        begins_anew = other.key in summarized or (not kept and _similarity(other, prompt) > 0)
        if begins_anew and _system_prompt(ended) == _system_prompt(other):
            return other
    return None


def _system_prompt(conversation: AgentConversation) -> str:
    """The text of its system message; "" if it has none."""
    first = conversation.messages[0]
    return first["content"] if first["role"] == "system" else ""


def _repeats_reply(conversation: AgentConversation, threads: Threads, end: int) -> bool:
    """Whether the user's first messages hold the text of a reply to a call before number `end`.

    The text between the last tags of a reply counts, too: agents ask for summaries in tags.
    """
    opening = [" ".join(text.split()) for text in _opening(conversation)]
    for event in threads.exchanges[:end]:
        text = " ".join(event["reply"]["message"]["content"].split())
        enclosed = [part.strip() for part in _TAG.split(text) if part.strip()][-1:]
        for quote in (text, *enclosed):
            if len(quote) >= _MIN_QUOTED_CHARS and any(quote in text for text in opening):
                return True
    return False


def _plain_api(conversation: AgentConversation, threads: Threads) -> str | None:
    """The API of a conversation that is no chat, such as embeddings; None for a chat."""
    dialect = threads.exchanges[conversation.call_numbers[0]]["dialect"]
    return dialect if dialect in NON_CHAT_CALLS else None


def _kind(conversation: AgentConversation, trunk: Set[int]) -> str:
    """The kind of a conversation other than the main one; `trunk` has the calls of that."""
    if not conversation.has_tools:
        return SIDE
    return SUBAGENT if trunk.isdisjoint(conversation.call_numbers) else BRANCH
