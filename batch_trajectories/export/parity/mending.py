"""The options of an export after which a template trains what inference saw.

Rows are changed as the options would change them, and rendered again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from batch_trajectories.export.rows.messages import EMPTY_THINK
from batch_trajectories.export.templates.contexts import LearntTurn, Message, ParityCounts, Shown
from batch_trajectories.export.templates.rendering import Chat

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


_TRIED = 3
"""Rows that try all choices, and choices that are tried on all rows of the sample."""
NOTHING = Mend((), ())
_REASONING = ("reasoning_content", "reasoning", "thinking")


def mend_for(chat: Chat, sample: Sequence[Shown], *, is_cut: bool) -> Mend:
    """The fewest options that have nothing differ in a sample of rows, or the best ones found.

    `is_cut`: rows already show single views or turns.
    """
    choices = [
        Mend(options, changes)
        for options, changes in _choices(is_cut=is_cut)
        if not changes or any(_changes(changes, row) for row in sample[:_TRIED])
    ]
    bad = [_badness(_tally(chat, choice, sample[:_TRIED])) for choice in choices]
    order = sorted(range(len(choices)), key=lambda n: (bad[n], len(choices[n].options)))
    tallies = [(choices[n], _tally(chat, choices[n], sample)) for n in order[:_TRIED]]
    return min(tallies, key=lambda it: _badness(it[1]))[0]


def _choices(*, is_cut: bool) -> Iterator[tuple[tuple[str, ...], tuple[Change, ...]]]:
    """All options that go together, in the order in which an export applies them."""
    forms = [_subset(_FORMS, n) for n in range(1 << len(_FORMS))]
    for form, key in product(forms, ({}, *({name: _KEYS[name]} for name in _KEYS))):
        cuts = {} if is_cut else _INLINE_CUTS if _INLINE in key else _CUTS
        for cut, empty in product(({}, *({name: cuts[name]} for name in cuts)), ({}, _EMPTY)):
            chosen = {**form, **cut, **key, **empty}
            yield (*chosen,), (*chosen.values(),)


def _subset(choices: Mapping[str, Change], bits: int) -> Mapping[str, Change]:
    return {name: choices[name] for n, name in enumerate(choices) if bits >> n & 1}


def _changes(changes: Sequence[Change], row: Shown) -> bool:
    """Whether each of them changes something in a row."""
    for change in changes:
        rows = [*change(row)]
        if [one.messages for one in rows] == [row.messages]:
            return False
    return True


def _tally(chat: Chat, choice: Mend, rows: Sequence[Shown]) -> ParityCounts:
    tally = ParityCounts()
    for row in rows:
        tally.add(chat, choice.rows(row), lambda _: None)
    return tally


def _badness(tally: ParityCounts) -> tuple[float, ...]:
    """What is worse: refused rows, then lost reasoning, then other contexts."""
    turns, thoughts = max(1, tally.turns), max(1, tally.with_reasoning)
    lost = tally.reasoning_lost / thoughts
    return (
        tally.refused.total() / max(1, tally.rows),
        lost,
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


def _call_text(row: Shown) -> Iterator[Shown]:
    def change(message: Message) -> Message:
        text = message.get("content")
        if not message.get("tool_calls") or not text:
            return message
        key = next((name for name in _REASONING if name in message), _REASONING[0])
        thought = "\n\n".join(filter(None, (message.get(key), text)))
        return {**message, "content": "", key: thought}

    for changed in _each(row, change):
        turns = [
            turn._replace(reasoning=_reasoning_of(changed.messages[turn.at]))
            for turn in changed.turns
        ]
        yield changed._replace(turns=turns)


def _reasoning_of(message: Message) -> str:
    return next((message[key] for key in _REASONING if message.get(key)), "")


def _empty_think(row: Shown) -> Iterator[Shown]:
    def change(message: Message) -> Message:
        if message["role"] != "assistant" or _reasoning_of(message):
            return message
        text = message["content"]
        return message if "<think>" in text else {**message, "content": EMPTY_THINK + text}

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
    return {name: value for name, value in message.items() if name not in _REASONING}


def _per_turn_since_user(row: Shown) -> Iterator[Shown]:
    return (one for part in _since_user(row) for one in _per_turn(part))


def _per_turn(row: Shown) -> Iterator[Shown]:
    """A row for each turn."""
    for turn in row.turns:
        yield row._replace(messages=row.messages[: turn.at + 1], turns=[turn])


_FORMS: Mapping[str, Change] = {
    "--arguments text": _arguments_as_text,
    "--parallel_calls split": _split_calls,
    "--call_text reasoning": _call_text,
}
_INLINE = "--reasoning inline"
_KEYS: Mapping[str, Change] = {
    "--reasoning_key thinking": _with_key("thinking"),
    "--reasoning_key reasoning": _with_key("reasoning"),
    _INLINE: _inline,
}
_CUTS: Mapping[str, Change] = {
    "--segments --reasoning since_user": _since_user,
    "--per_turn --reasoning field": _per_turn,
}
_INLINE_CUTS: Mapping[str, Change] = {"--per_turn": _per_turn_since_user}
_EMPTY: Mapping[str, Change] = {"--empty_think text": _empty_think}
