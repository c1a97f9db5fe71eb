"""Digests of messages and requests, without what changes from start to start.

The digest of a message covers its role, its text, its calls (names and parsed arguments) and, for a
result, which call of the conversation it answers. It does not cover ids, reasoning, signatures or
marks for the cache: agents make new ids, drop thoughts, write arguments again, and move the marks.
Results that follow one reply have their digests in the order of its calls: agents put results in
the order in which they came, which is another one when recorded replies are given again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import orjson

from agent.messages.message import Message, ToolCall
from agent.wires.wire import Part, Volatile
from batch_trajectories.basics import exact_json

_SIZE = 16
_NEVER = frozenset({"cache_control"})
"""Keys that never decide a reply, wherever they are."""


def digest_of(value: Any) -> bytes:
    """The digest of a JSON value; the order of keys does not matter."""
    return digest_of_bytes(exact_json.dumps(value, option=orjson.OPT_SORT_KEYS))


def digest_of_bytes(written: bytes) -> bytes:
    """The digest of bytes."""
    return blake2b(written, digest_size=_SIZE).digest()


class CallsInOrder:
    """The tool calls of a conversation in order, by their ids; a later call can repeat an id."""

    def __init__(self, earlier: Sequence[Part] = ()) -> None:
        """`earlier` are the parts that come first, whose calls are only looked up if needed."""
        self._earlier = earlier
        self._known: dict[str, tuple[int, str]] = {}
        self._latest: Sequence[ToolCall] = ()
        self.count = earlier[-1].first_call + len(earlier[-1].calls) if earlier else 0
        """How many there are."""

    def add(self, calls: Iterable[ToolCall]) -> None:
        """Take the calls of the next message."""
        calls = [*calls]
        self._latest = calls or self._latest
        for call in calls:
            self._known[call["id"]] = self.count, call["function"]["name"]
            self.count += 1

    def rank(self, id: str) -> int | None:
        """Which call of the conversation the id means, from 0."""
        call = self._find(id)
        return None if call is None else call[0]

    def name(self, id: str) -> str:
        """The tool that the call is for; "" if there is no such call."""
        call = self._find(id)
        return "" if call is None else call[1]

    def latest(self) -> Sequence[ToolCall]:
        """The calls of the last message that has any."""
        earlier = (part.calls for part in reversed(self._earlier) if part.calls)
        return self._latest or next(earlier, ())

    def _find(self, id: str) -> tuple[int, str] | None:
        if id in self._known:
            return self._known[id]
        for part in reversed(self._earlier):
            for n, call in enumerate(reversed(part.calls), 1):
                if call["id"] == id:
                    return part.first_call + len(part.calls) - n, call["function"]["name"]
        return None


def message_digest(message: Message, calls: CallsInOrder, volatile: Volatile) -> bytes:
    """The digest of a message that follows `calls`."""
    form: list[Any] = [message["role"], cut(message["content"], volatile.texts).strip()]
    if made := message.get("tool_calls"):
        form += [
            [call["function"]["name"], _arguments(call["function"]["arguments"])] for call in made
        ]
    elif message["role"] == "tool":
        form += [calls.rank(message["tool_call_id"]), message.get("is_error", False)]
    return digest_of(form)


def runs_of_results(messages: Sequence[Message], first: int = 0) -> Iterator[tuple[int, list[int]]]:
    """The results after one reply, where there are several, from position `first` on.

    Each is the position of the first of them, and for each which call of the reply it answers. Runs
    with results of other calls, or with two of one call, are left out.
    """
    start = first
    while start < len(messages):
        end = start
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        if end - start > 1 and start > 0:
            made = [call["id"] for call in messages[start - 1].get("tool_calls", ())]
            answered = [message["tool_call_id"] for message in messages[start:end]]
            if {*answered} <= {*made} and len({*answered}) == len(answered):
                yield start, [made.index(id) for id in answered]
        start = end + 1


def in_order_of_calls(
    messages: Sequence[Message], digests: Sequence[bytes], first: int = 0
) -> list[bytes]:
    """The digests of the messages from `first` on, with those of results in the order of calls.

    `digests` are those of all the messages, in the order of the messages.
    """
    ordered = list(digests[first:])
    for start, answered in runs_of_results(messages, first):
        pairs = sorted(zip(answered, digests[start : start + len(answered)], strict=True))
        ordered[start - first : start - first + len(pairs)] = [digest for _, digest in pairs]
    return ordered


def _arguments(arguments: str) -> Any:
    """What the arguments say; agents write an empty text as an empty object."""
    try:
        parsed = exact_json.loads(arguments.strip() or "{}")
        exact_json.dumps(parsed)  # refuses a nesting that reading takes
    except (exact_json.JSONDecodeError, TypeError):
        return arguments.strip()
    return parsed


def cut(text: str, patterns: tuple[str, ...]) -> str:
    """The text without what the patterns match."""
    for pattern in _compiled(patterns):
        text = pattern.sub("", text)
    return text


@lru_cache(maxsize=64)
def _compiled(patterns: tuple[str, ...]) -> tuple[re.Pattern[str], ...]:
    return tuple(re.compile(pattern) for pattern in patterns)


def head_of(
    body: Mapping[str, Any], read_elsewhere: frozenset[str], fields: Sequence[str]
) -> dict[str, Any]:
    """The body's other fields that decide the reply: without the volatile `fields`, and marks."""
    head = {key: value for key, value in body.items() if key not in read_elsewhere}
    for path in fields:
        head = _without(head, path.split("."))
    kept: dict[str, Any] = without_marks(head)
    return kept


def without_marks(value: Any) -> Any:
    """The value without the keys that never decide a reply, such as `cache_control`."""
    if isinstance(value, dict):
        return {key: without_marks(inner) for key, inner in value.items() if key not in _NEVER}
    if isinstance(value, list):
        return [without_marks(inner) for inner in value]
    return value


def _without(value: Any, path: Sequence[str]) -> Any:
    """A copy of the value without what the path names."""
    name, rest = path[0], path[1:]
    if isinstance(value, dict):
        if name != "*" and name not in value:
            return value
        named = value if name == "*" else {name}
        members = {key: inner for key, inner in value.items() if key not in named}
        return members | {key: _without(value[key], rest) for key in named} if rest else members
    if isinstance(value, list) and name == "*":
        return [_without(inner, rest) for inner in value] if rest else []
    return value
