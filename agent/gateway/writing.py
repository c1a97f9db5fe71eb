"""Shared by the dialects: events of streams, errors, and headers that are passed on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from agent.gateway.reading import Schemas
from toolsets import exact_json

COMMENT = b": keepalive\n\n"
"""A comment between the events of a stream, which clients ignore."""

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def sse(data: Any, *, event: str = "") -> bytes:
    """One server-sent event: JSON data, and its name if the API names its events."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + exact_json.dumps(data) + b"\n\n"


def type_of(status: int) -> str:
    """The type of an error with this status, as OpenAI and Anthropic name it."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def error_object(status: int, kind: str, words: str) -> dict[str, Any]:
    """An error as OpenAI's APIs describe it."""
    return {"message": words, "type": type_of(status), "param": None, "code": kind}


def passed_on(
    headers: Mapping[str, str], names: Collection[str], prefixes: tuple[str, ...] = ()
) -> dict[str, str]:
    """The headers with these lower-case names or beginnings of names."""
    lowered = ((name.lower(), value) for name, value in headers.items())
    return {
        name: value
        for name, value in lowered
        if name in names or (prefixes and name.startswith(prefixes))
    }


def lower_of(limit: int, given: Any) -> int:
    """The limit on a reply where a body asks for at most `given`, if that is a number."""
    return min(limit, given) if type(given) is int else limit


def remove_server_tools(
    body: dict[str, Any], read_tool: Callable[[Mapping[str, Any]], Schemas], *, automatic: Any
) -> None:
    """Remove the tools that the provider would run.

    `automatic` replaces the choice of a tool that is gone.
    """
    tools = body.get("tools") or []
    kept = [tool for tool in tools if not isinstance(read_tool(tool), str)]
    if len(kept) == len(tools):
        return
    if not kept:
        for key in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(key, None)
        return
    body["tools"] = kept
    chosen = _chosen(body.get("tool_choice"))
    if chosen is not None and chosen not in map(_name, kept):
        body["tool_choice"] = automatic


def _chosen(choice: Any) -> str | None:
    """The tool that a choice prescribes; None if it leaves the choice to the model."""
    if not isinstance(choice, dict) or choice.get("type") in ("auto", "any", "none"):
        return None
    return _name(choice)


def _name(tool: Mapping[str, Any]) -> str:
    """A tool's name: in OpenAI's chat API it is one level down."""
    inner = tool.get(str(tool.get("type")))
    named = inner if isinstance(inner, dict) else tool
    return str(named.get("name") or named.get("type") or "")
