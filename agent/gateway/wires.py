"""The dialects that agents speak, by name and by path."""

from __future__ import annotations

from collections.abc import Mapping

from agent.gateway.wire import Wire
from agent.gateway.wire_chat import ChatWire
from agent.gateway.wire_gemini import GeminiWire
from agent.gateway.wire_messages import MessagesWire
from agent.gateway.wire_responses import ResponsesWire

WIRES: Mapping[str, Wire] = {
    wire.api: wire for wire in (ChatWire(), MessagesWire(), ResponsesWire(), GeminiWire())
}
"""By `ModelSettings.api`."""


def wire_for(method: str, path: str) -> Wire | None:
    """The dialect whose request this is; None if it is not known."""
    found = (wire for wire in WIRES.values() if wire.operation(method, path) is not None)
    return next(found, None)
