"""Events for a caller while a conversation runs.

The record of a conversation is the same with and without a handler.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal, Required, TypedDict

_log = logging.getLogger(__name__)

StreamEventType = Literal[
    "turn_start",
    "text_delta",
    "thinking_delta",
    "tool_use_start",
    "tool_use_delta",
    "tool_use_stop",
    "tool_result",
]


class StreamEvent(TypedDict, total=False):
    """One event; the keys besides `type` depend on the type.

    turn_start       turn_index (from 0; not sent for the first turn)
    text_delta, thinking_delta   text: the next part
    tool_use_start   tool_id, tool_name
    tool_use_delta   tool_id, tool_input: the next part of the arguments' JSON
    tool_use_stop    tool_id, tool_name
    tool_result      tool_id, tool_name, tool_output, is_error, duration_ms
    """

    type: Required[StreamEventType]
    turn_index: int
    text: str
    tool_id: str
    tool_name: str
    tool_input: str
    tool_output: str
    is_error: bool
    duration_ms: int


StreamHandler = Callable[[StreamEvent], None]
"""Called in the event loop; it must not block."""


def guarded(handler: StreamHandler) -> StreamHandler:
    """`handler`, no longer called once it has raised: its failure must not lose a paid reply."""
    has_failed = False

    def forward(event: StreamEvent) -> None:
        nonlocal has_failed
        if has_failed:
            return
        try:
            handler(event)
        except Exception:
            has_failed = True
            _log.exception("the stream handler failed and is not called again")

    return forward


def ignored(event: StreamEvent) -> None:
    """A handler that ignores all events."""
