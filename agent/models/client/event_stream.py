"""Server-sent events: their data, and their exact bytes."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import NamedTuple

_LINE_END = rb"(?:\r\n|\r(?!\n|\Z)|\n)"
"""A trailing carriage return may be half of a line end."""
_EVENT_END = re.compile(_LINE_END + _LINE_END)
_LINES = re.compile("\r\n|\r|\n")


class ServerEvent(NamedTuple):
    """One event of a stream."""

    raw: bytes
    """Its bytes, with the empty line at its end."""
    data: str | None
    """None for events without data, such as comments that keep a connection alive."""


class EventTooLarge(Exception):
    """An event is larger than the maximum."""


class EventSplitter:
    """Splits a stream into its events; the bytes of all events are those of the stream."""

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        """The last bytes, which may be the start of an event's end."""

    def feed(self, part: bytes) -> list[ServerEvent]:
        """The events that end in this part of the stream.

        Raises `EventTooLarge`, and `UnicodeDecodeError` for data that is not UTF-8.
        """
        self._parts.append(part)
        self._size += len(part)
        seen = self._tail + part
        self._tail = seen[-1:]
        # Parts without an end are not joined: a large event may come in many.
        if b"\n\n" not in seen and b"\r" not in seen:
            if self._size > self._max_event_bytes:
                raise EventTooLarge
            return []
        text = b"".join(self._parts)
        if b"\r" in text:
            starts = [0, *(end.end() for end in _EVENT_END.finditer(text))]
            events = [_event(text[a:b]) for a, b in pairwise(starts)]
            rest = text[starts[-1] :]
        else:
            *whole, rest = text.split(b"\n\n")
            events = [_event(piece + b"\n\n") for piece in whole]
        self._parts, self._size, self._tail = [rest], len(rest), rest[-1:]
        if self._size > self._max_event_bytes:
            raise EventTooLarge
        return events

    def check_text(self) -> None:
        """Raise `UnicodeDecodeError` if what came after the last event is not UTF-8."""
        b"".join(self._parts).decode()


def _event(raw: bytes) -> ServerEvent:
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return ServerEvent(raw, raw[6:-2].decode())
    data_lines = []
    for line in _LINES.split(raw.decode()):
        name, _, value = line.partition(":")
        if name == "data":
            data_lines.append(value.removeprefix(" "))
    return ServerEvent(raw, "\n".join(data_lines) if data_lines else None)
