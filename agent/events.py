"""How events are made, in one place, for the loop and for taking up after a crash."""

from __future__ import annotations

import time
from typing import Any

from agent.messages import Message, NoteEvent, ResultEvent, ToolCall
from toolsets.tool import ToolResult


def result_event(
    turn: int, n: int, call: ToolCall, result: ToolResult, started_at: float, duration_s: float
) -> ResultEvent:
    """The result of call number `n` of turn `turn`."""
    message = Message(
        role="tool",
        tool_call_id=call["id"],
        name=call["function"]["name"],
        content=result.content,
        is_error=result.is_error,
    )
    if result.details:
        message["details"] = dict(result.details)
    return ResultEvent(
        kind="result",
        turn=turn,
        call=n,
        message=message,
        started_at=started_at,
        duration_s=duration_s,
    )


def note_event(turn: int, reason: str, text: str, details: dict[str, Any] | None) -> NoteEvent:
    """A note after turn `turn`; see `NoteEvent`."""
    event = NoteEvent(kind="note", turn=turn, reason=reason, text=text, at=time.time())
    if details is not None:
        event["details"] = details
    return event
