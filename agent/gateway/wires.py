"""The dialects that agents speak, by name."""

from __future__ import annotations

from collections.abc import Mapping

from agent.gateway.wire_base import Wire
from agent.gateway.wire_chat import ChatWire
from agent.gateway.wire_gemini import GeminiWire
from agent.gateway.wire_messages import MessagesWire
from agent.gateway.wire_responses import ResponsesWire

WIRES: Mapping[str, Wire] = {
    wire.api: wire for wire in (ChatWire(), MessagesWire(), ResponsesWire(), GeminiWire())
}
"""By `ModelSettings.api`."""
