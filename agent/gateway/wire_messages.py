"""Anthropic messages, as agents speak it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from agent.gateway.canonical import CallsInOrder
from agent.gateway.reading import (
    Layout,
    Schemas,
    function_tool,
    message_of,
    objects_in,
    path_of,
    read_request,
)
from agent.gateway.wire import NOTHING_VOLATILE, Operation, Volatile, WireError, WireRequest
from agent.gateway.writing import lower_of, passed_on, remove_server_tools, sse, type_of
from agent.messages import Message
from agent.models.dialects.anthropic_messages import API, read_blocks
from agent.models.dialects.registry import DIALECTS
from toolsets import exact_json

_READ_ELSEWHERE = frozenset({"model", "messages", "system", "tools", "stream", "metadata"})

_RUN_BY_AGENTS = ("bash_", "text_editor_", "computer_", "memory_", "tool_search_tool_")
"""Beginnings of the types of tools that Anthropic defines and that do not reach out of its API."""

_HEADERS = frozenset({"anthropic-beta", "anthropic-version"})


class MessagesWire:
    """See `Wire`."""

    api = API
    keepalive = sse({"type": "ping"}, event="ping")

    def operation(self, method: str, path: str) -> Operation | None:
        """See `Wire.operation`."""
        plain = path_of(path)
        if plain.endswith("/messages/count_tokens"):
            return "count_tokens" if method == "POST" else "other"
        if plain.endswith("/messages"):
            return "call" if method == "POST" else "other"
        return "other" if "/messages/" in plain else None

    def read(
        self,
        path: str,
        body: Mapping[str, Any],
        volatile: Volatile = NOTHING_VOLATILE,
        before: Sequence[WireRequest] = (),
    ) -> WireRequest:
        """See `Wire.read`."""
        del path
        system = [("system", body["system"])] if body.get("system") else []
        return read_request(
            _LAYOUT,
            body,
            model=body.get("model"),
            pieces=[*system, *objects_in(body.get("messages"), "messages")],
            first=len(system),
            tools=_tools_of(body),
            is_stream=body.get("stream") is True,
            max_tokens=body.get("max_tokens"),
            volatile=volatile,
            before=before,
        )

    def rewritten(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
        without_server_tools: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """See `Wire.rewritten`."""
        new = dict(body)
        if model is not None:
            new["model"] = model
        if max_tokens is not None:
            new["max_tokens"] = lower_of(max_tokens, new.get("max_tokens"))
        if without_server_tools:
            new.pop("mcp_servers", None)
            remove_server_tools(new, _read_tool, automatic={"type": "auto"})
        return path, new

    def upstream_path(self, path: str) -> str:
        """See `Wire.upstream_path`."""
        plain, mark, query = path.partition("?")
        counts = "/count_tokens" if plain.rstrip("/").endswith("/count_tokens") else ""
        return DIALECTS[API].path + counts + mark + query

    def request_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """See `Wire.request_headers`."""
        return passed_on(headers, _HEADERS)

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.whole`."""
        return exact_json.dumps({"stop_sequence": None, **body})

    def stream_of(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.stream_of`."""
        return [sse(event, event=event["type"]) for event in _events_of(body)]

    def last_event(self, data: str) -> bool:
        """See `Wire.last_event`. The event before the last has the stop reason."""
        if '"message_stop"' not in data and '"message_delta"' not in data:
            return False
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        return isinstance(event, dict) and event.get("type") in ("message_delta", "message_stop")

    def error(self, status: int, kind: str, words: str) -> bytes:
        """See `Wire.error`."""
        error = {"type": type_of(status), "message": f"{words} ({kind})"}
        return exact_json.dumps({"type": "error", "error": error})

    def stream_error(self, kind: str, words: str) -> bytes:
        """See `Wire.stream_error`."""
        error = {"type": type_of(400), "message": f"{words} ({kind})"}
        return sse({"type": "error", "error": error}, event="error")


def _tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = objects_in(body.get("tools") or [], "tools")
    servers = objects_in(body.get("mcp_servers") or [], "mcp_servers")
    return [*tools, *servers]


def _events_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    ends = {key: body.get(key) for key in ("stop_reason", "stop_sequence")}
    empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**body, **empty}}
    for n, block in enumerate(body.get("content") or ()):
        start, deltas = _start_and_deltas(block)
        yield {"type": "content_block_start", "index": n, "content_block": start}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": n, "delta": delta}
        yield {"type": "content_block_stop", "index": n}
    yield {"type": "message_delta", "delta": ends, "usage": body.get("usage")}
    yield {"type": "message_stop"}


def _start_and_deltas(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and what is then added to it."""
    start, deltas = dict(block), []
    match block:
        case {"type": "text", "text": str(text)}:
            start["text"] = ""
            deltas.append({"type": "text_delta", "text": text})
            if citations := start.pop("citations", None):
                deltas += [{"type": "citations_delta", "citation": one} for one in citations]
        case {"type": "thinking", "thinking": str(thought)}:
            start["thinking"] = ""
            deltas.append({"type": "thinking_delta", "thinking": thought})
            if "signature" in block:
                start["signature"] = ""
                deltas.append({"type": "signature_delta", "signature": block["signature"]})
        case {"input": given} if given:
            start["input"] = {}
            text = given if isinstance(given, str) else exact_json.dumps(given).decode()
            deltas.append({"type": "input_json_delta", "partial_json": text})
    return start, deltas


def _read_part(raw: Any, calls: CallsInOrder) -> list[Message]:
    if isinstance(raw, tuple):
        return [message_of(API, "system", raw[1])]
    match raw.get("role"):
        case "system":
            return [message_of(API, "system", raw.get("content"))]
        case "user":
            return _read_user(raw.get("content"), calls)
        case "assistant":
            content = raw.get("content")
            if isinstance(content, str):
                return [Message(role="assistant", content=content)]
            return [read_blocks(objects_in(content, "content"))]
        case role:
            raise WireError(f"its role is {role!r}; known: user, assistant, system")


def _read_user(content: Any, calls: CallsInOrder) -> list[Message]:
    """Results, and what is said between and after them."""
    if isinstance(content, str):
        return [Message(role="user", content=content)]
    messages: list[Message] = []
    said: list[dict[str, Any]] = []
    for block in objects_in(content, "content"):
        if block.get("type") != "tool_result":
            said.append(block)
            continue
        if said:
            messages.append(message_of(API, "user", said))
            said = []
        messages.append(_read_result(block, calls))
    if said or not messages:
        messages.append(message_of(API, "user", said))
    return messages


def _read_result(block: Mapping[str, Any], calls: CallsInOrder) -> Message:
    id = str(block.get("tool_use_id") or "")
    said = message_of(API, "tool", block.get("content") or "")
    result = Message(
        role="tool",
        tool_call_id=id,
        name=calls.name(id),
        content=said["content"],
        is_error=bool(block.get("is_error")),
    )
    if "provider_blocks" in said:
        result["provider_blocks"] = said["provider_blocks"]
    return result


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    kind, name = str(tool.get("type") or "custom"), str(tool.get("name") or "")
    if kind != "custom" and not kind.startswith(_RUN_BY_AGENTS):
        return name or kind
    return [function_tool(name, tool.get("description"), tool.get("input_schema"))]


_LAYOUT = Layout(API, _read_part, _read_tool, _READ_ELSEWHERE, "messages")
