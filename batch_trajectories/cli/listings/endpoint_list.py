"""The list that `endpoints` prints: where models can be asked, and which keys are set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.models.providers import NO_KEY, PROVIDERS, Provider
from batch_trajectories.runs.config.endpoint_config import EndpointConfig

_HEADINGS = ("prefix", "endpoint", "key from", "is set")


def endpoint_list(own: Mapping[str, EndpointConfig]) -> list[dict[str, Any]]:
    """All prefixes that a model can have, as JSON has them; those of a config come first.

    `variables` says of each environment variable whether it is set, and never its value.
    """
    known = [_known(prefix, row) for prefix, row in PROVIDERS.items() if prefix not in own]
    return [_own(prefix, entry) for prefix, entry in own.items()] + known


def as_text(endpoints: Sequence[Mapping[str, Any]]) -> str:
    """The list for a terminal: one line per prefix."""
    rows = [_HEADINGS, *map(_line, endpoints)]
    widths = [max(len(row[n]) for row in rows) for n in range(len(_HEADINGS))]
    lines = (
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def _line(endpoint: Mapping[str, Any]) -> tuple[str, ...]:
    variables = endpoint["variables"]
    sources = [*variables]
    if endpoint["credentials"]:
        sources.append(endpoint["credentials"])
    where = endpoint["base_url"] or f"client {endpoint['client']}"
    if not variables:
        said = ""
    elif all(variables.values()):
        said = "yes"
    else:
        said = "no" if not any(variables.values()) else "in part"
    return endpoint["prefix"], where, " or ".join(sources) or "no key", said


def _known(prefix: str, row: Provider) -> dict[str, Any]:
    return {
        "prefix": prefix,
        "base_url": row.base_url or None,
        "client": row.client,
        "api": row.api,
        "variables": _are_set([row.key_env]),
        "credentials": row.other_credentials or None,
        "reasoning_field": row.reasoning_field if row.api == "openai_chat" else None,
        "max_tokens_name": row.max_tokens_name if row.api == "openai_chat" else None,
        "prices": row.prices,
        "batch_api": row.has_batches,
    }


def _own(prefix: str, entry: EndpointConfig) -> dict[str, Any]:
    endpoint = entry.to_endpoint()
    known = entry.provider_row
    command = f"key_command {entry.key_command[0]}" if entry.key_command else None
    return {
        "prefix": prefix,
        "base_url": entry.base_url,
        "client": entry.client,
        "api": endpoint.api,
        "variables": _are_set([endpoint.key_env, *entry.headers_env.values()]),
        "credentials": command or (known.other_credentials if known and entry.client else None),
        "reasoning_field": endpoint.options.get("reasoning_field"),
        "max_tokens_name": endpoint.options.get("usual_max_tokens_name"),
        "prices": endpoint.provider,
        "batch_api": known.has_batches if known else None,
    }


def _are_set(names: Iterable[str]) -> dict[str, bool]:
    return {name: bool(os.environ.get(name, "").strip()) for name in names if name != NO_KEY}
