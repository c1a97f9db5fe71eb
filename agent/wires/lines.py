"""Which conversations the threads of an agent make up, and what each of them is.

A line is a thread up to its last call that counts. Threads that another one continues, and those
whose replies another one repeats behind changed messages, are no lines of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from agent.messages.message import PLAIN, ExchangeEvent, Message, split_inline_reasoning
from agent.wires.thread import Thread
from agent.wires.threads import Threads

BEFORE_COMPACTION = "before compaction"
BRANCH = "branch"
EARLIER = "earlier attempt"
SIDE = "side"
SUBAGENT = "subagent"

_TAG = re.compile(r"</?\w+>")
_LONG = 20
"""Characters of a text that can be recognized in another."""


@dataclass(slots=True)
class Line:
    """One conversation of an agent."""

    thread: Thread
    messages: list[Message]
    replies: list[tuple[int, int]]
    """The position and the number of each recorded reply among the messages."""
    tools: list[dict[str, Any]]
    """All that its calls offered; of several with one name, the latest."""
    has_tools: bool
    """Its last call offered some."""
    name: str = ""
    """Its kind; "" for the main conversation."""
    is_about: bool = False
    """It ends with a call about another line that had already ended."""
    own: set[int] = field(default_factory=set)
    """The calls that are part of no line before this one."""

    @property
    def key(self) -> str:
        """Its name within the record."""
        return f"thread#{self.thread.number}"

    @property
    def numbers(self) -> list[int]:
        """The numbers of its calls."""
        return [number for _, number in self.replies]

    def final_text(self) -> str:
        """The text of the last reply; "" if it has calls."""
        last = self.messages[-1]
        return "" if last.get("tool_calls") else split_inline_reasoning(last["content"]).rest


@dataclass(frozen=True, slots=True)
class Rewritten:
    """Calls that were shown other messages in the place of some of their line."""

    calls: list[int]
    line: Line
    start: int
    end: int
    messages: list[Message]
    """The messages shown instead of those of the line from `start` to before `end`."""
    until: int
    """The position in the line of the reply to the last of them."""
    shown: Line
    """The same calls, with what they were shown."""


@dataclass(frozen=True, slots=True)
class Lines:
    """The conversations of an agent."""

    main: Line | None
    """None if the agent made no call."""
    others: list[Line]
    rewritten: list[Rewritten]
    set_aside: list[ExchangeEvent]
    """Calls before the last restart that are part of no line."""


def lines_of(threads: Threads, prompt: str) -> Lines:
    """The conversations of an agent whose task is `prompt`."""
    lines, changed = _divided(_all_lines(threads))
    lines.sort(key=lambda line: line.replies[-1][1])
    summarized = {one.line.key for one in changed if _is_whole(one)}
    main = _main(lines, threads, prompt, summarized)
    counted: set[int] = set()
    if main is not None:
        lines.remove(main)
        lines.sort(key=lambda line: line.replies[0][1])
        # What a compaction keeps is the work of the line before it.
        before = [line for line in lines if line.name == BEFORE_COMPACTION]
        for line in (*before, main, *(line for line in lines if line not in before)):
            line.own = set(line.numbers) - counted
            counted |= line.own
        trunk = {*main.numbers, *(n for line in lines if line.name for n in line.numbers)}
        for line in lines:
            line.name = line.name or _plain(line, threads) or _name_of(line, trunk)
    aside = [event for event in threads.exchanges if event["number"] not in counted]
    return Lines(main, lines, changed, aside)


def _all_lines(threads: Threads) -> list[Line]:
    """Each thread up to its last call of this start."""
    last = {threads.end_of(number)[0].number: number for number in sorted(threads.live)}
    lines = []
    for number in last.values():
        thread, end = threads.end_of(number)
        replies = [reply for reply in thread.replies if reply[0] < end]
        offered = [threads.tools_of(number) for _, number in replies]
        tools = _union(offered)
        lines.append(
            Line(
                thread=thread,
                messages=thread.messages[:end],
                replies=replies,
                tools=tools,
                has_tools=bool(offered[-1]),
            )
        )
    return lines


def _union(offered: Sequence[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    if all(tools is offered[0] for tools in offered):
        return offered[0]
    by_name = {str(tool["function"].get("name")): tool for tools in offered for tool in tools}
    return [*by_name.values()]


def _divided(lines: Sequence[Line]) -> tuple[list[Line], list[Rewritten]]:
    """The lines that others do not continue, and what those were shown that others repeat."""
    having: defaultdict[int, list[Line]] = defaultdict(list)
    for line in lines:
        for number in line.numbers:
            having[number].append(line)
    same, changed = [], []
    for line in lines:
        numbers = set(line.numbers)
        repeating = [
            other
            for other in having[line.numbers[-1]]
            if other is not line and numbers.issubset(other.numbers)
        ]
        later = [other for other in repeating if not _is_about(other, line)]
        for other in repeating:
            other.is_about = other.is_about or _is_about(other, line)
        if not later:
            same.append(line)
            continue
        longest = max(later, key=lambda other: len(other.replies))
        if longest.messages[: len(line.messages)] != line.messages:
            changed.append(_difference(line, longest))
    return same, changed


def _is_about(other: Line, line: Line) -> bool:
    """Whether a line that continues another one only ends with a call about its answer."""
    is_answer = line.has_tools and not line.messages[-1].get("tool_calls")
    return is_answer and not other.has_tools


def _difference(line: Line, later: Line) -> Rewritten:
    """What the calls of a line were shown where the later line has something else."""
    at = next(at for at, number in later.replies if number == line.numbers[-1])
    shown, instead = line.messages[:-1], later.messages[:at]
    start = _common(shown, instead)
    alike = _common(shown[start:][::-1], instead[start:][::-1])
    calls = [number for position, number in line.replies if position >= start]
    different = shown[start : len(shown) - alike]
    return Rewritten(
        calls=calls,
        line=later,
        start=start,
        end=at - alike,
        messages=different,
        until=at,
        shown=line,
    )


def _common(one: Sequence[Message], other: Sequence[Message]) -> int:
    """How many first messages two lists have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (left, right) in pairs if left != right), min(len(one), len(other)))


def _is_whole(changed: Rewritten) -> bool:
    """Whether its line begins with the reply to one call that was shown another conversation."""
    is_first = changed.calls == changed.line.numbers[:1]
    return is_first and changed.start <= 1 and changed.end == changed.until


def _main(
    lines: Sequence[Line], threads: Threads, prompt: str, summarized: Container[str]
) -> Line | None:
    """The line of the task itself, up to its end: what follows a compaction belongs to it.

    `summarized` has the keys of lines that begin with a reply to another conversation.
    """
    lines = [line for line in lines if not line.is_about]
    lines = [line for line in lines if _plain(line, threads) is None] or lines
    if not lines:
        return None
    graded = [(line, _grade(line, prompt)) for line in lines]
    # The words of a call for a title are no task where another line has tools.
    offers = any(line.tools for line in lines)
    if any(grade and (line.tools or not offers) for line, grade in graded):
        main = max(
            graded,
            key=lambda it: (
                bool(it[1] and it[0].tools),
                it[1],
                -it[0].numbers[0],
                len(it[0].replies),
            ),
        )[0]
    else:
        main = max(lines, key=lambda line: (bool(line.tools), len(line.replies), -line.numbers[0]))
    while later := _after_compaction(main, lines, threads, prompt, summarized):
        is_repeated = _opening(later) == _opening(main)
        main.name = EARLIER if is_repeated else BEFORE_COMPACTION
        main = later
    return main


def _grade(line: Line, prompt: str) -> int:
    """How clearly the prompt is in what the line starts with: as it is, in quotes, or within."""
    prompt = prompt.strip()
    best = 0
    for text in _opening(line):
        if prompt not in text:
            continue
        if f"\n{prompt}\n" in f"\n{text.strip()}\n":
            return 3
        quoted = any(f"{mark}{prompt}{mark}" in text for mark in "\"'`")
        best = max(best, 2 if quoted else 1)
    return best


def _opening(line: Line) -> list[str]:
    """What the user says before the first reply."""
    first = line.replies[0][0]
    return [message["content"] for message in line.messages[:first] if message["role"] == "user"]


def _after_compaction(
    line: Line, lines: Sequence[Line], threads: Threads, prompt: str, summarized: Container[str]
) -> Line | None:
    """The line that continues another one with a summary, or repeats it from the beginning.

    It has the same tools, its calls follow the last one, and it may keep the latest messages. It
    starts with the text of an earlier reply; or its system prompt is the same, and it starts with
    the prompt or with the reply to another conversation.
    """
    numbers = set(line.numbers)
    for other in sorted(lines, key=lambda other: other.numbers[0]):
        kept = [number for number in other.numbers if number in numbers]
        begin = next((number for number in other.numbers if number not in numbers), -1)
        if begin <= line.numbers[-1] or kept not in ([], line.numbers[1:][-len(kept) :]):
            continue
        if not line.tools or line.tools != other.tools:
            continue
        starts_so = other.key in summarized or (not kept and _grade(other, prompt))
        if _repeats_a_reply(other, threads, begin) or (
            starts_so and _system(line) == _system(other)
        ):
            return other
    return None


def _system(line: Line) -> str:
    first = line.messages[0]
    return first["content"] if first["role"] == "system" else ""


def _repeats_a_reply(line: Line, threads: Threads, before: int) -> bool:
    """Whether the user's first words hold such a text, or what its last tags enclose."""
    opening = [" ".join(said.split()) for said in _opening(line)]
    for event in threads.exchanges[:before]:
        text = " ".join(event["reply"]["message"]["content"].split())
        enclosed = [part.strip() for part in _TAG.split(text) if part.strip()][-1:]
        for words in (text, *enclosed):
            if len(words) >= _LONG and any(words in said for said in opening):
                return True
    return False


def _plain(line: Line, threads: Threads) -> str | None:
    """The kind of a line that is not a chat; None for a chat."""
    dialect = threads.exchanges[line.numbers[0]]["dialect"]
    return dialect if dialect in PLAIN else None


def _name_of(line: Line, trunk: Set[int]) -> str:
    if not line.has_tools:
        return SIDE
    return SUBAGENT if trunk.isdisjoint(line.numbers) else BRANCH
