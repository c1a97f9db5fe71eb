"""The fingerprint of a config: the options that affect the data, and their digest.

All starts of a run need the same fingerprint, so data of different configs are never mixed
unnoticed. Its key in run.json is `meaning`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args, get_origin

import orjson
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from agent.models.resolve import SCRIPTED
from agent.options import is_marked
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.option_names import FIXED, rename_former
from batch_trajectories.config.run_config import RunConfig

if TYPE_CHECKING:
    from toolsets.mcp.mcp_settings import McpServer


EARLIER_DEFAULTS: Mapping[str, Any] = {"expected_match": "exact", "expected_attempts": 3}
"""Options of runs by versions without `expected_match`: the defaults of that time."""


def data_options(config: RunConfig) -> dict[str, Any]:
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
        fields["agent"] = config.agent.data_fields()
    used = config.model_prefixes()
    fields["endpoints"] = {
        name: endpoint.meaning()
        for name, endpoint in sorted(config.endpoints.items())
        if name in used
    }
    return fields


def update_names(values: Mapping[str, Any], base_url: str | None) -> dict[str, Any]:
    """Update the names of options and models in a stored config or fingerprint.

    In earlier versions, a model without a provider was one of OpenRouter, unless a base URL was
    given.
    """
    renamed = rename_former(values, is_stored=True)
    if renamed.get("models"):
        renamed.pop("model", None)  # a default that was not used
    if base_url is None and isinstance(renamed.get("models"), dict):
        renamed["models"] = {
            _add_provider(name): weight for name, weight in renamed["models"].items()
        }
    elif base_url is None and renamed.get("model"):
        renamed["model"] = _add_provider(renamed["model"])
    return renamed


def _add_provider(model: str) -> str:
    prefix, colon, _ = model.partition(":")
    is_full = model == SCRIPTED or (colon and "/" not in prefix)
    return model if is_full else f"openrouter:{model}"


def stored_meaning(run: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprint in a run.json, in the form in which fingerprints are compared."""
    fixed = {name: run["meaning"][name] for name in FIXED.keys() & run["meaning"].keys()}
    meaning = update_names(run["meaning"], run["config"].get("base_url"))
    for name, value in EARLIER_DEFAULTS.items():
        meaning.setdefault(name, value)
    if "continues" not in (run["config"].get("agent") or {"continues": ()}):
        meaning["repeat_limit"] = 0  # agents had none then, whatever it says
    return fill_defaults(meaning | fixed)


def fill_defaults(meaning: Mapping[str, Any]) -> dict[str, Any]:
    """Add to a fingerprint the defaults of options that its version did not have.

    This also adds defaults to objects inside it, such as a subagent, and removes options that only
    earlier versions counted. Compare fingerprints only in this form: a run of an
    earlier version must not differ by a new option. For stored ones, see `stored_meaning`.
    """
    fields = {name: field for name, field in RunConfig.model_fields.items() if _is_meaning(name)}
    given = {"endpoints": {}, **FIXED, **_defaults(fields), **meaning}
    whole = {
        name: _fill_missing(value, fields[name].annotation) if name in fields else value
        for name, value in given.items()
    }
    if whole["agent"] is not None:
        from agent.gateway.command_agent import FIELDS_WITHOUT_EFFECT

        whole["agent"] = {
            name: value
            for name, value in whole["agent"].items()
            if name not in FIELDS_WITHOUT_EFFECT
        }
    return whole


def _defaults(fields: Mapping[str, FieldInfo]) -> dict[str, Any]:
    return {
        name: to_jsonable_python(field.get_default(call_default_factory=True))
        for name, field in fields.items()
        if not field.is_required()
    }


def _fill_missing(value: Any, annotation: Any) -> Any:
    """Add to a JSON value the defaults of the pydantic models that its type names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not isinstance(value, dict):
            return value
        fields = annotation.model_fields
        return {
            name: _fill_missing(item, fields[name].annotation) if name in fields else item
            for name, item in (_defaults(fields) | value).items()
        }
    parts = get_args(annotation)
    if get_origin(annotation) is dict and isinstance(value, dict):
        return {name: _fill_missing(item, parts[1]) for name, item in value.items()}
    if get_origin(annotation) is tuple and isinstance(value, list):
        return [_fill_missing(item, parts[0]) for item in value]
    for part in parts:
        value = _fill_missing(value, part)
    return value


def digest_options(meaning: Mapping[str, Any]) -> str:
    """16 hex digits over `data_options` a config."""
    canonical = exact_json.dumps(meaning, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(canonical).hexdigest()[:16]


def _is_meaning(name: str) -> bool:
    return is_marked(RunConfig.model_fields[name], "meaning")


def _digests_of_tools(places: tuple[str, ...]) -> dict[str, str]:
    """The digest of the schemas of each of the user's own toolsets."""
    from toolsets.catalog.custom import load_custom_toolsets, schemas_digest

    return {toolset.name: schemas_digest(toolset.tools) for toolset in load_custom_toolsets(places)}


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
