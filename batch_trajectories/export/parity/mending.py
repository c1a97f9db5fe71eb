"""The options of an export after which a template trains what inference saw.

Rows are changed as the options would change them, and rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from batch_trajectories.export.dataset.rendering import Chat
from batch_trajectories.export.parity.contexts import LearntTurn, Message, ParityCounts, Shown

Change = Callable[[Shown], Iterator[Shown]]


class Mend(NamedTuple):
    """Options, and what they turn a row into."""

    options: tuple[str, ...]
    changes: tuple[Change, ...]

    def rows(self, row: Shown) -> list[Shown]:
        """The rows that one row becomes."""
        rows = [row]
        for change in self.changes:
            rows = [after for before in rows for after in change(before)]
        return rows


NOTHING = Mend((), ())


def mend_for(chat: Chat, sample: Sequence[Shown], *, is_cut: bool) -> Mend:
    """The first options that have nothing differ in a sample of rows, or the best ones found.

    `is_cut`: rows already show single views or turns.
    """
    mend = NOTHING
    cuts: Mapping[str, Change] = {} if is_cut else _CUTS
    for step in (_FORMS, cuts, _KEYS, cuts):
        choices = [mend]
        for options, change in step.items():
            if step is not cuts or not any(one in mend.options for one in cuts):
                choices.append(Mend((*mend.options, options), (*mend.changes, change)))
        found: list[tuple[float, ...]] = []
        for choice in choices:
            tally = ParityCounts()
            for row in sample:
                tally.add(chat, choice.rows(row), lambda _: None)
            if tally.is_clean:
                return choice
            found.append(_badness(tally))
        mend = choices[found.index(min(found))]
    return mend


def _badness(tally: ParityCounts) -> tuple[float, ...]:
    """What is worse: refused rows, then lost reasoning, then other contexts."""
    turns, thoughts = max(1, tally.turns), max(1, tally.with_reasoning)
    return (
        tally.refused.total() / max(1, tally.rows),
        tally.reasoning_lost / thoughts,
        (tally.turns - tally.same) / turns,
    )


def _each(row: Shown, change: Callable[[Message], Message]) -> Iterator[Shown]:
    """The row with its messages changed, also in the contexts of inference."""
    turns = [
        turn._replace(before=[change(message) for message in turn.before]) for turn in row.turns
    ]
    yield row._replace(messages=[change(message) for message in row.messages], turns=turns)


def _arguments_as_text(row: Shown) -> Iterator[Shown]:
    def change(message: Message) -> Message:
        if not message.get("tool_calls"):
            return message
        calls = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}

    return _each(row, change)


def _split_calls(row: Shown) -> Iterator[Shown]:
    """One call per turn, as `--parallel_calls split` divides them."""
    messages: list[Message] = []
    learnt = {turn.at: turn for turn in row.turns}
    turns: list[LearntTurn] = []
    for n, message in enumerate(row.messages):
        calls: list[Any] = message.get("tool_calls") or []
        answers = {}
        for result in row.messages[n + 1 :]:
            if result["role"] != "tool":
                break
            answers[result["tool_call_id"]] = result
        if message["role"] == "tool":
            continue
        parts: list[Message] = [message]
        if len(calls) > 1:
            first, *rest = calls
            parts = [{**message, "tool_calls": [first]}]
            parts += [{"role": "assistant", "content": "", "tool_calls": [one]} for one in rest]
        for number, part in enumerate(parts):
            if n in learnt:
                thought = learnt[n].reasoning if number == 0 else ""
                turns.append(LearntTurn(len(messages), [*messages], thought))
            messages.append(part)
            for call in part.get("tool_calls") or ():
                if call["id"] in answers:
                    messages.append(answers[call["id"]])
    yield row._replace(messages=messages, turns=turns)


def _with_key(key: str) -> Change:
    def change(message: Message) -> Message:
        if "reasoning_content" not in message:
            return message
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}
        return {**kept, key: message["reasoning_content"]}

    return lambda row: _each(row, change)


def _inline(row: Shown) -> Iterator[Shown]:
    def change(message: Message) -> Message:
        if not (thought := message.get("reasoning_content")):
            return message
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}
        text = f"<think>\n{thought}\n</think>\n\n{message['content']}".rstrip()
        return {**kept, "content": text}

    return _each(row, change)


def _since_user(row: Shown) -> Iterator[Shown]:
    """A row for each user message, as `--segments --reasoning since_user` makes them."""
    asked = [n for n, message in enumerate(row.messages) if message["role"] == "user"]
    for begin, end in zip(asked, [*asked[1:], len(row.messages)], strict=True):
        turns = [turn for turn in row.turns if begin < turn.at < end]
        if turns:
            earlier = [_without_reasoning(message) for message in row.messages[:begin]]
            last = turns[-1].at + 1
            yield row._replace(messages=[*earlier, *row.messages[begin:last]], turns=turns)


def _without_reasoning(message: Message) -> Message:
    names = ("reasoning_content", "reasoning", "thinking")
    return {name: value for name, value in message.items() if name not in names}


def _per_turn(row: Shown) -> Iterator[Shown]:
    """A row for each turn."""
    for turn in row.turns:
        yield row._replace(messages=row.messages[: turn.at + 1], turns=[turn])


_FORMS: Mapping[str, Change] = {
    "--format openai,parquet (arguments as text)": _arguments_as_text,
    "--parallel_calls split": _split_calls,
}
_KEYS: Mapping[str, Change] = {
    "--reasoning_key thinking": _with_key("thinking"),
    "--reasoning_key reasoning": _with_key("reasoning"),
    "--reasoning inline": _inline,
}
_CUTS: Mapping[str, Change] = {
    "--segments --reasoning since_user": _since_user,
    "--per_turn --reasoning field": _per_turn,
}
