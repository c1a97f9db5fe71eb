"""The lists that `tools` and `endpoints` print: what works here, and which keys are set."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agent.models.providers import NO_KEY, PROVIDERS, Provider
from agent.session import run_here
from batch_trajectories.basics.text import clip
from batch_trajectories.config.endpoint_config import EndpointConfig
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.toolsets import build_catalog
from toolsets.catalog.registry import Toolset
from toolsets.mcp.mcp_settings import McpError, McpServer
from toolsets.mcp.servers import list_servers
from toolsets.sandbox.factory import sandbox_problem

_LINE_CHARS = 100


def tool_list(config: RunConfig) -> list[dict[str, Any]]:
    """All toolsets that a config can name, sorted, JSON-ready.

    Keys: `name`, `description`, `available`, `problem` (why not, and what to do) and `tools` (the
    schemas that a model gets). Raises `ValueError` if a start would refuse the config.
    """
    sandbox = sandbox_problem(config.sandbox)
    servers = run_here(list_servers(config.mcp or {}))
    failed = {name: str(error) for name, error in servers.items() if isinstance(error, McpError)}
    listed = {name: server for name, server in servers.items() if isinstance(server, McpServer)}
    config = config.model_copy(update={"mcp": {**(config.mcp or {}), **listed}})
    return [
        _entry(
            toolset,
            failed.get(name) or toolset.problem() or (sandbox if toolset.needs_sandbox else None),
        )
        for name, toolset in sorted(build_catalog(config).items())
    ]


def tools_as_text(toolsets: Sequence[dict[str, Any]]) -> str:
    """The list for a terminal: one line per toolset and tool."""
    lines = []
    for toolset in toolsets:
        lines.append(f"{toolset['name']}: {_first_sentence(toolset['description'])}")
        if toolset["problem"]:
            lines.append(f"  not available: {toolset['problem']}")
        width = max((len(tool["name"]) for tool in toolset["tools"]), default=0)
        lines += [
            f"  {tool['name']:<{width}}  {_first_sentence(tool['description'])}"
            for tool in toolset["tools"]
        ]
    return "\n".join(lines)


def _entry(toolset: Toolset, problem: str | None) -> dict[str, Any]:
    tools = sorted(toolset.tools, key=lambda tool: tool.name)
    return {
        "name": toolset.name,
        "description": toolset.description,
        "available": problem is None,
        "problem": problem,
        "tools": [tool.schema["function"] for tool in tools],
    }


def _first_sentence(text: str) -> str:
    line = " ".join(text.split("\n\n")[0].split())
    return clip(line.partition(". ")[0].rstrip("."), max_chars=_LINE_CHARS).replace("\n", " ")


_HEADINGS = ("prefix", "endpoint", "key from", "is set")


def endpoint_list(own: Mapping[str, EndpointConfig]) -> list[dict[str, Any]]:
    """All prefixes that a model can have, as JSON has them; those of a config come first.

    `variables` says of each environment variable whether it is set, and never its value.
    """
    known = [
        _describe_provider(prefix, row) for prefix, row in PROVIDERS.items() if prefix not in own
    ]
    return [_own(prefix, entry) for prefix, entry in own.items()] + known


def endpoints_as_text(endpoints: Sequence[Mapping[str, Any]]) -> str:
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


def _describe_provider(prefix: str, row: Provider) -> dict[str, Any]:
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
        "base_url": entry.url,
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


_CONSEQUENCES = {
    "retry": "retried with growing pauses; then the attempt fails",
    "end": "the conversation ends and counts as done",
    "fail_task": "the attempt fails; the next start makes another",
    "stop_run": "the run stops (exit 4); finished work is safe",
}

_NEVER = "; if the endpoint has never answered, the run stops (exit 4)"


def errors_as_text() -> str:
    """Describe each kind of error: its meaning, its effect, what to do, and its known words."""
    from agent.models.endpoint_words import load_tables
    from agent.models.errors import ENDPOINT_FAILURES, RULES

    tables = load_tables()
    lines = []
    for kind, rule in RULES.items():
        never = _NEVER if kind in ENDPOINT_FAILURES else ""
        lines += [f"{kind} - {rule.meaning}", f"  -> {_CONSEQUENCES[rule.action]}{never}"]
        lines += [f"  what to do: {rule.remedy}"]
        lines += _words_as_lines("code", tables["codes"].get(kind, {}))
        lines += _words_as_lines("says", tables["phrases"].get(kind, {}))
    return "\n".join(lines)


def endings_as_text() -> str:
    """Describe each way in which a reply can end, with the words by which servers say so."""
    from agent.models.endpoint_words import load_tables

    lines = ["Why a reply ended (another word counts as a usual end, and the record has it):"]
    for ending, words in load_tables()["ends"].items():
        lines += [f"{ending}", *_words_as_lines("word", words)]
    return "\n".join(lines)


def _words_as_lines(label: str, words: Mapping[str, str]) -> list[str]:
    width = min(48, max(map(len, words), default=0))
    return [f"     {label}  {word:<{width}}  {source}" for word, source in words.items()]
