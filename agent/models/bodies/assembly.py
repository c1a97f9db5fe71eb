"""A reply that arrives in parts: passing them on and putting them together.

An assembly gives the very body that the endpoint would have sent in one piece. So there is one
way to read a reply, and records do not depend on streaming.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import orjson


class Assembly(Protocol):
    """Puts one streamed reply together."""

    has_reason: bool
    """The parts so far say why the reply ended; only counts of tokens may follow."""
    is_over: bool
    """The stream has said that nothing more follows."""

    def add(self, part: Mapping[str, Any]) -> None:
        """Take the next part, which may also be a whole reply."""
        ...

    def finish(self) -> bytes:
        """The body of the whole reply.

        If the stream was cut, it reads as cut. If a part cannot be understood, it is an error that
        says so: a reply never has less than its stream.
        """
        ...


def incomplete(reason: str, reply: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a reply that cannot be put together; `reply` says what it cost."""
    costs = {key: reply[key] for key in ("id", "model", "usage") if reply.get(key)}
    return {**costs, "error": {"code": "malformed_stream", "message": reason}}


class Growing:
    """A JSON object whose texts arrive in parts: adding to a text must not copy what is there."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self.fields = dict(fields)
        self._texts: dict[str, list[str]] = {}

    def append(self, key: str, text: str) -> None:
        """Add to the text under `key`; one that was there from the start is its beginning."""
        if key not in self._texts:
            start = self.fields.get(key)
            self._texts[key] = [start] if isinstance(start, str) else []
        self._texts[key].append(text)

    def build(self) -> dict[str, Any]:
        """The object as it is now."""
        return self.fields | {key: "".join(parts) for key, parts in self._texts.items()}


def to_body(reply: Mapping[str, Any]) -> bytes:
    """The body; where parts held halves of an emoji, escaped to ASCII, which joins them."""
    try:
        return orjson.dumps(reply)
    except TypeError:
        return json.dumps(reply).encode()
