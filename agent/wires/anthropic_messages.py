"""The server side of Anthropic's messages API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.messages.message import Message
from agent.models.dialects.anthropic_messages import API, read_blocks
from agent.wires.base import MadeCall, Wire, error_type, sse
from agent.wires.reading import (
    CallsInOrder,
    Layout,
    Schemas,
    function_tool,
    make_message,
    require_objects,
    split_results,
)
from agent.wires.wire import WireError
from batch_trajectories.basics import exact_json

_READ_ELSEWHERE = frozenset({"model", "messages", "system", "tools", "stream", "metadata"})

_AGENT_TOOL_PREFIXES = ("bash_", "text_editor_", "computer_", "memory_", "tool_search_tool_")
"""Beginnings of the types of tools that Anthropic defines and the agent runs."""


class MessagesWire(Wire):
    """Anthropic's messages API; see `Wire`."""

    api = API
    keepalive = sse({"type": "ping"}, event="ping")
    call_path = "/messages"
    count_path = "/count_tokens"
    headers = frozenset({"anthropic-beta", "anthropic-version"})
    limits = ("max_tokens",)
    server_field = "mcp_servers"
    automatic: Mapping[str, Any] = {"type": "auto"}
    closing = sse({"type": "message_stop"}, event="message_stop")
    ends = ("message_delta", "message_stop")  # the former has the stop reason

    def __init__(self) -> None:
        self.layout = Layout(
            api=API,
            read_part=_read_part,
            read_tool=_read_tool,
            read_elsewhere=_READ_ELSEWHERE,
            messages="messages",
        )

    def split_messages(self, body: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """See `Wire.split_messages`."""
        return body.get("system"), require_objects(body.get("messages"), "messages")

    def collect_tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Wire.collect_tools`."""
        tools = require_objects(body.get("tools") or [], "tools")
        return [*tools, *require_objects(body.get("mcp_servers") or [], "mcp_servers")]

    def upstream_path(self, path: str) -> str:
        """See `Wire.upstream_path`. Passes the query on."""
        _, mark, query = path.partition("?")
        return super().upstream_path(path) + mark + query

    def is_closing(self, data: str) -> bool:
        """See `Wire.is_closing`."""
        return '"message_stop"' in data

    def write_whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.write_whole`."""
        return exact_json.dumps({"stop_sequence": None, **body})

    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.write_stream`."""
        return [sse(event, event=event["type"]) for event in _stream_events(body)]

    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """See `Wire.write_reply`."""
        blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
            for call in calls
        ]
        return {
            "id": id,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": blocks,
            "stop_reason": "tool_use" if calls else "end_turn",
            "stop_sequence": None,
            "usage": {"input_tokens": 10, "output_tokens": 10},
        }

    def write_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_error`."""
        return exact_json.dumps(_error(status, kind, message))

    def write_stream_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_stream_error`."""
        return sse(_error(status, kind, message), event="error")


def _error(status: int, kind: str, message: str) -> dict[str, Any]:
    return {
        "type": "error",
        "error": {"type": error_type(status), "message": f"{message} ({kind})"},
    }


def _stream_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
    """Return a block as it begins, and the deltas that complete it."""
    start, deltas = dict(block), []
    match block:
        case {"type": "text", "text": str(text)}:
            start["text"] = ""
            deltas.append({"type": "text_delta", "text": text})
            cited = start.pop("citations") if isinstance(start.get("citations"), list) else []
            deltas += [{"type": "citations_delta", "citation": one} for one in cited]
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
        _, system = raw  # the field `system`, which stands before the messages
        return [make_message(API, "system", system)]
    match raw.get("role"):
        case "system":
            return [make_message(API, "system", raw.get("content"))]
        case "user":
            return _read_user(raw.get("content"), calls)
        case "assistant":
            content = raw.get("content")
            if isinstance(content, str):
                return [Message(role="assistant", content=content)]
            return [read_blocks(require_objects(content, "content"))]
        case role:
            raise WireError(f"its role is {role!r}; known: user, assistant, system")


def _read_user(content: Any, calls: CallsInOrder) -> list[Message]:
    if isinstance(content, str):
        return [Message(role="user", content=content)]

    def read_result(block: Mapping[str, Any], _: int) -> Message | None:
        if block.get("type") != "tool_result":
            return None
        id, is_error = str(block.get("tool_use_id") or ""), bool(block.get("is_error"))
        content = make_message(API, "tool", block.get("content") or "")
        result = Message(role="tool", tool_call_id=id, name=calls.name(id), content="")
        return {**result, "is_error": is_error, **content}

    return split_results(API, require_objects(content, "content"), read_result)


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    kind, name = str(tool.get("type") or "custom"), str(tool.get("name") or "")
    if kind != "custom" and not kind.startswith(_AGENT_TOOL_PREFIXES):
        return name or kind
    return [function_tool(name, tool.get("description"), tool.get("input_schema"))]


WIRE = MessagesWire()
