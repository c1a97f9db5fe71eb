"""The APIs that agents speak, found by name: `agent/wires/NAME.py` is the server's half of one."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib import import_module

from agent.models.dialects.dialect import RELAYED
from agent.wires.base import Wire
from agent.wires.openai_completions import CompletionsWire, EmbeddingsWire

WIRES: Mapping[str, Wire] = {api: import_module(f"{__package__}.{api}").WIRE for api in RELAYED}
"""By `ModelSettings.api`."""

_BESIDE = (CompletionsWire(), EmbeddingsWire())


def wires_of(apis: Collection[str]) -> list[Wire]:
    """The wires of agents that speak these APIs."""
    is_openai = any(api.startswith("openai") for api in apis)
    return [*(WIRES[api] for api in apis), *(_BESIDE if is_openai else ())]
