"""The dialects that agents speak, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agent.wires.anthropic_messages import MessagesWire
from agent.wires.base import Wire
from agent.wires.gemini import GeminiWire
from agent.wires.openai_chat import ChatWire
from agent.wires.openai_completions import CompletionsWire, EmbeddingsWire
from agent.wires.openai_responses import ResponsesWire

WIRES: Mapping[str, Wire] = {
    wire.api: wire for wire in (ChatWire(), MessagesWire(), ResponsesWire(), GeminiWire())
}
"""By `ModelSettings.api`."""

_BESIDE = (CompletionsWire(), EmbeddingsWire())


def wires_of(apis: Collection[str]) -> list[Wire]:
    """The wires of agents that speak these APIs."""
    is_openai = any(api.startswith("openai") for api in apis)
    return [*(WIRES[api] for api in apis), *(_BESIDE if is_openai else ())]
