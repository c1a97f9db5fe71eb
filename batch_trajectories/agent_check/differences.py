"""Where two requests of one agent differ, and how its file says that it does not matter."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from agent.wires.canonical import cut, head_of
from agent.wires.wire import Volatile
from batch_trajectories.agent_check.endpoint import AnsweredCall
from batch_trajectories.basics.text import clip

_TEXTS = frozenset({"messages", "tools"})
"""`volatile.texts` is for these, `volatile.fields` for all others."""

_CONTEXT = 16
"""How many characters before a word identify it."""

_WORD = r"[^\s\"'<>,;]+"
_BEFORE_WORDS = frozenset(" \n\t\r\"'<>,;=(")

_NOTHING = object()


class Difference(NamedTuple):
    """A value that is not the same in two requests."""

    path: str
    """Dotted; items of lists by their numbers."""
    before: str
    after: str
    advice: str
    """The line of the agent's file that has it ignored."""


def what_decides(request: AnsweredCall, volatile: Volatile) -> dict[str, Any]:
    """What decides whether a later request is the same: see `agent.wires.canonical`."""
    read = request.read
    messages = [
        {
            "role": message["role"],
            "content": cut(message["content"], volatile.texts),
            "calls": [call["function"] for call in message.get("tool_calls") or ()],
        }
        for message in read.messages
    ]
    head = head_of(request.body, request.wire.layout.read_elsewhere, volatile.fields)
    return {**head, "tools": read.tools, "messages": messages}


def differences(before: Any, after: Any, path: str = "") -> Iterator[Difference]:
    """Compare two JSON values, in the order of the first."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys((*before, *after)):
            inner = f"{path}.{key}" if path else key
            yield from differences(before.get(key, _NOTHING), after.get(key, _NOTHING), inner)
    elif isinstance(before, list) and isinstance(after, list):
        for n, (one, other) in enumerate(zip_longest(before, after, fillvalue=_NOTHING)):
            yield from differences(one, other, f"{path}.{n}")
    elif before != after:
        if path.partition(".")[0] not in _TEXTS:
            yield Difference(path, _shown(before), _shown(after), f"volatile.fields: [{path}]")
        elif isinstance(before, str) and isinstance(after, str):
            yield from _in_texts(path, before, after)
        else:
            yield Difference(path, _shown(before), _shown(after), "")


def _in_texts(path: str, before: str, after: str) -> Iterator[Difference]:
    """The words that differ, until the rest is equal."""
    while before != after:
        start = _equal_chars(before, after)
        # A time differs as a word, not from the digit on that is another one.
        while start and before[start - 1] not in _BEFORE_WORDS:
            start -= 1
        known = before[max(0, start - _CONTEXT) : start]
        pattern = re.escape(known).replace("\\ ", " ") + _WORD
        is_distinct = re.search(r"\w\w", known) is not None
        advice = f"volatile.texts: [{json.dumps(pattern)}]" if is_distinct else ""
        yield Difference(path, _from(known, before, start), _from(known, after, start), advice)
        if not is_distinct:
            return
        before, after = (re.sub(pattern, "", text) for text in (before, after))


def _equal_chars(one: str, other: str) -> int:
    """How many characters the beginnings of two texts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))


def _from(known: str, text: str, start: int) -> str:
    match = re.match(_WORD, text[start:])
    return repr(known + (match[0] if match else ""))


def _shown(value: Any) -> str:
    if value is _NOTHING:
        return "(nothing)"
    return clip(json.dumps(value, ensure_ascii=False), max_chars=80)
