"""Streams of the Responses dialect.

Their last event brings the whole reply, so the others are only passed on. A stream without it
was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from agent.models.bodies.assembly import to_body
from agent.models.stream_events import StreamHandler


class ResponsesAssembly:
    """Finds one reply among its events; see `Assembly`."""

    def __init__(self, on_delta: StreamHandler) -> None:
        self._tell = on_delta
        self._reply: dict[str, Any] = {}
        self._items: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, _Call] = {}
        self._places: dict[str, tuple[Any, ...]] = {}

    def add(self, part: Mapping[str, Any]) -> None:
        """See `Assembly.add`."""
        match part:
            case {
                "type": "response.output_text.delta" | "response.refusal.delta",
                "delta": str(text),
            }:
                self._tell_text("text_delta", text, part.get("output_index"))
            case {
                "type": "response.reasoning_summary_text.delta" | "response.reasoning_text.delta",
                "delta": str(text),
            }:
                keys = ("output_index", "type", "summary_index", "content_index")
                self._tell_text("thinking_delta", text, *map(part.get, keys))
            case {
                "type": "response.function_call_arguments.delta",
                "delta": str(text),
                "output_index": int(n),
            }:
                if call := self._calls.get(n):
                    self._tell_input(call, text)
            case {"type": "response.output_item.added", "output_index": int(n), "item": dict(item)}:
                self._begin(n, item)
            case {"type": "response.output_item.done", "output_index": int(n), "item": dict(item)}:
                self._end(n, item)
            case {
                "type": "response.completed" | "response.incomplete" | "response.failed",
                "response": dict(reply),
            }:
                self._reply = reply
            case {"type": "error"}:
                self._reply = {"status": "failed", "error": dict(part)}

    def finish(self) -> bytes:
        """See `Assembly.finish`. Some servers leave the items out of the last event."""
        output = self._reply.get("output") or [self._items[n] for n in sorted(self._items)]
        return to_body({**self._reply, "output": output})

    def _tell_text(
        self, kind: Literal["text_delta", "thinking_delta"], text: str, *place: Any
    ) -> None:
        """Texts of different places are paragraphs, as they are in the record."""
        if not text:
            return
        between = "\n\n" if self._places.get(kind, place) != place else ""
        self._places[kind] = place
        self._tell({"type": kind, "text": between + text})

    def _begin(self, n: int, item: Mapping[str, Any]) -> None:
        if item.get("type") == "function_call" and n not in self._calls:
            call = _Call(str(item.get("call_id") or ""), str(item.get("name") or ""))
            self._calls[n] = call
            self._tell({"type": "tool_use_start", "tool_id": call.id, "tool_name": call.name})

    def _end(self, n: int, item: dict[str, Any]) -> None:
        self._items[n] = item
        self._begin(n, item)
        if call := self._calls.get(n):
            arguments = item.get("arguments")
            if not call.is_passed_on and isinstance(arguments, str):
                self._tell_input(call, arguments)
            self._tell({"type": "tool_use_stop", "tool_id": call.id, "tool_name": call.name})

    def _tell_input(self, call: _Call, text: str) -> None:
        if text:
            call.is_passed_on = True
            self._tell({"type": "tool_use_delta", "tool_id": call.id, "tool_input": text})


class _Call:
    """A function call that has begun; `is_passed_on`: the handler gets its arguments."""

    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self.is_passed_on = False
