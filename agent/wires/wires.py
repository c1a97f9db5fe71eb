"""The APIs that agents speak, by name: `agent/wires/NAME.py` is the server side of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from agent.models.dialects.dialect import RELAYED
from agent.wires.base import Wire
from agent.wires.openai_completions import CompletionsWire, EmbeddingsWire

WIRES: Mapping[str, Wire] = {api: import_module(f"{__package__}.{api}").WIRE for api in RELAYED}
"""A wire for each `ModelSettings.api` that can be relayed."""

_WITHOUT_CHAT = (CompletionsWire(), EmbeddingsWire())


def find_wires(apis: Collection[str]) -> list[Wire]:
    """Return the wires for an agent that speaks these APIs."""
    is_openai = any(api.startswith("openai") for api in apis)
    return [*(WIRES[api] for api in apis), *(_WITHOUT_CHAT if is_openai else ())]
