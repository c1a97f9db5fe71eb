"""Calls joined into segments, as long as each one only adds to what the one before was shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from batch_trajectories.export.segments.views import ShownPart, View
from batch_trajectories.runs.store.record_types import StoredMessage, StoredTurn, Tools

_OPEN = 8
"""Segments that a call may continue: agents keep few conversations in turns."""

START = "start"


@dataclass(slots=True)
class Segment:
    """What a few calls of a conversation were shown, and their replies."""

    messages: Sequence[StoredMessage]
    """Those of the last request, and its reply."""
    learnt: dict[int, StoredTurn]
    """The replies that are learnt here, by their positions: each one is so in one segment."""
    tools: Tools
    why: str
    """Why it begins: `start`, or what changed otherwise than by messages at the end (`tools`,
    `system`, `reasoning`, `messages`)."""


def segments_of(part: ShownPart) -> list[Segment]:
    """The segments of a conversation, in the order of their first calls."""
    found: list[Segment] = []
    for view in part.views:
        shown = view.messages
        continued = next((one for one in reversed(found[-_OPEN:]) if _adds_to(one, view)), None)
        if continued is None:
            why = _why(found[-1], view) if found else START
            continued = Segment((), {}, view.tools, why)
            found.append(continued)
        continued.learnt[len(shown)] = view.turn
        continued.messages = [*shown, view.reply]
    return found


def _adds_to(segment: Segment, view: View) -> bool:
    known = segment.messages
    if len(known) > len(view.messages) or segment.tools != view.tools:
        return False
    return view.messages[: len(known)] == known


def _why(before: Segment, view: View) -> str:
    if before.tools != view.tools:
        return "tools"
    pairs = zip(before.messages, view.messages, strict=False)
    was, now = next(((a, b) for a, b in pairs if a != b), (None, None))
    if was is None or now is None:
        return "messages"
    if was.role == now.role == "system":
        return "system"
    if was.role == "assistant" and _words(was) == _words(now):
        return "reasoning"
    return "messages"


def _words(message: StoredMessage) -> tuple[object, ...]:
    return message.role, message.content, message.tool_calls
