"""The dialects that agents speak, by name."""

from __future__ import annotations

from collections.abc import Mapping

from agent.wires.wire_base import Wire
from agent.wires.wire_chat import ChatWire
from agent.wires.wire_gemini import GeminiWire
from agent.wires.wire_messages import MessagesWire
from agent.wires.wire_responses import ResponsesWire

WIRES: Mapping[str, Wire] = {
    wire.api: wire for wire in (ChatWire(), MessagesWire(), ResponsesWire(), GeminiWire())
}
"""By `ModelSettings.api`."""
