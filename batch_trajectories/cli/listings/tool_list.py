"""List all toolsets with their tools, and whether they work here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agent.session import run_here
from batch_trajectories.basics.text import clip
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.config.toolsets import catalog_of
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
    found = run_here(list_servers(config.mcp or {}))
    failed = {name: str(error) for name, error in found.items() if isinstance(error, McpError)}
    listed = {name: server for name, server in found.items() if isinstance(server, McpServer)}
    config = config.model_copy(update={"mcp": {**(config.mcp or {}), **listed}})
    return [
        _entry(
            toolset,
            failed.get(name) or toolset.problem() or (sandbox if toolset.needs_sandbox else None),
        )
        for name, toolset in sorted(catalog_of(config).items())
    ]


def as_text(toolsets: Sequence[dict[str, Any]]) -> str:
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
