"""The fingerprint of a config: the options that affect the data, and their digest.

All starts of a run need the same fingerprint, so data of different configs are never mixed
unnoticed. Its key in run.json is `meaning`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from runs.config.run_config import RunConfig
from toolsets import exact_json
from toolsets.mcp.mcp_settings import McpServer


def meaning_of(config: RunConfig) -> dict[str, Any]:
    """The fields of a config that affect the data, JSON-ready and normalized.

    A script counts by its content, tools by the schemas that a model sees; the order in which
    toolsets are named does not count.
    """
    fields = {name: value for name, value in config.to_json().items() if _is_meaning(name)}
    if config.script_file is not None:
        fields["script_file"] = hashlib.sha256(config.script_file.read_bytes()).hexdigest()
    if (distribution := config.toolset_percentages()) is not None:
        fields["distribution"] = dict(sorted(distribution.items()))
    if config.tools is not None:
        fields["tools"] = _digests_of_tools(config.tools)
    if config.mcp is not None:
        fields["mcp"] = {
            name: _meaning_of_server(server) for name, server in config.mcp.items() if server.listed
        }
    for name in ("enabled_toolsets", "disabled_toolsets"):
        fields[name] = fields[name] and sorted(set(fields[name]))
    if config.models is not None:
        del fields["model"]
    if config.agent is not None:
        fields["agent"] = config.agent.meaning()
    used = config.model_prefixes()
    fields["endpoints"] = {
        name: endpoint.meaning()
        for name, endpoint in sorted(config.endpoints.items())
        if name in used
    }
    return fields


def default_meaning() -> dict[str, Any]:
    """`meaning_of` a config with default values; fields without a default are left out."""
    return {
        name: field.get_default(call_default_factory=True)
        for name, field in RunConfig.model_fields.items()
        if _is_meaning(name) and not field.is_required()
    } | {"endpoints": {}}


def digest_of(meaning: Mapping[str, Any]) -> str:
    """16 hex digits over `meaning_of` a config."""
    canonical = exact_json.dumps(meaning, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()[:16]


def _is_meaning(name: str) -> bool:
    extra = RunConfig.model_fields[name].json_schema_extra
    return isinstance(extra, dict) and bool(extra.get("meaning"))


def _digests_of_tools(places: tuple[str, ...]) -> dict[str, str]:
    """The digest of the schemas of each of the user's own toolsets."""
    from toolsets.catalog.custom import load_own, schemas_digest

    return {toolset.name: schemas_digest(toolset.tools) for toolset in load_own(places)}


def _meaning_of_server(server: McpServer) -> dict[str, Any]:
    """The settings of an MCP server that affect the data: not its environment or its address."""
    tools = [
        [tool.name, tool.description, tool.input_schema]
        for tool in sorted(server.listed or (), key=lambda tool: tool.name)
    ]
    schemas = exact_json.dumps(tools, option=orjson.OPT_SORT_KEYS)
    return {
        "command": list(server.argv),
        "per_task": server.is_per_task,
        "tools": hashlib.sha256(schemas).hexdigest(),
    }
