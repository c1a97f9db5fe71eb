"""OpenAI Responses, as agents speak it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from agent.gateway.canonical import CallsInOrder
from agent.gateway.reading import (
    Layout,
    Schemas,
    custom_tool,
    function_tool,
    message_of,
    objects_in,
    path_of,
    placeholder,
    read_request,
)
from agent.gateway.wire import NOTHING_VOLATILE, Operation, Volatile, WireError, WireRequest
from agent.gateway.writing import (
    COMMENT,
    error_object,
    lower_of,
    passed_on,
    remove_server_tools,
    sse,
)
from agent.messages import Message, Role
from agent.models.dialects.openai_responses import API, read_output
from agent.models.dialects.registry import DIALECTS
from agent.models.errors import ModelError
from toolsets import exact_json

_READ_ELSEWHERE = frozenset(
    {
        *("model", "input", "instructions", "tools", "stream", "stream_options"),
        # What follows says who asks, and where prompts and replies are kept.
        *("client_metadata", "metadata", "prompt_cache_key", "prompt_cache_retention"),
        *("safety_identifier", "store", "user"),
    }
)

_RUN_BY_PROVIDER = (
    *("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search"),
)
"""Beginnings of the types of tools that the agent does not run."""

_HEADERS = frozenset({"openai-beta"})

_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


class ResponsesWire:
    """See `Wire`."""

    api = API
    keepalive = COMMENT

    def operation(self, method: str, path: str) -> Operation | None:
        """See `Wire.operation`."""
        plain = path_of(path)
        if plain.endswith("/responses/input_tokens"):
            return "count_tokens" if method == "POST" else "other"
        if plain.endswith("/responses"):
            return "call" if method == "POST" else "other"
        return "other" if "/responses/" in plain else None

    def read(
        self,
        path: str,
        body: Mapping[str, Any],
        volatile: Volatile = NOTHING_VOLATILE,
        before: Sequence[WireRequest] = (),
    ) -> WireRequest:
        """See `Wire.read`."""
        del path
        given = body.get("input") or []
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        system = [("system", body["instructions"])] if body.get("instructions") else []
        return read_request(
            _LAYOUT,
            body,
            model=body.get("model"),
            pieces=[*system, *_grouped(objects_in(given, "input"))],
            first=len(system),
            tools=body.get("tools"),
            is_stream=body.get("stream") is True,
            max_tokens=body.get("max_output_tokens"),
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
            new["max_output_tokens"] = lower_of(max_tokens, new.get("max_output_tokens"))
        if without_server_tools:
            remove_server_tools(new, _read_tool, automatic="auto")
        return path, new

    def upstream_path(self, path: str) -> str:
        """See `Wire.upstream_path`."""
        plain = path_of(path)
        return DIALECTS[API].path + ("/input_tokens" if plain.endswith("/input_tokens") else "")

    def request_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """See `Wire.request_headers`."""
        return passed_on(headers, _HEADERS)

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.whole`. The last event of a stream has all of it."""
        return exact_json.dumps(body)

    def stream_of(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.stream_of`."""
        return [
            sse({**event, "sequence_number": n}, event=event["type"])
            for n, event in enumerate(_events_of(body))
        ]

    def last_event(self, data: str) -> bool:
        """See `Wire.last_event`."""
        if not any(f'"{kind}"' in data for kind in _ENDS):
            return False
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            return False
        return isinstance(event, dict) and event.get("type") in _ENDS

    def error(self, status: int, kind: str, words: str) -> bytes:
        """See `Wire.error`."""
        return exact_json.dumps({"error": error_object(status, kind, words)})

    def stream_error(self, kind: str, words: str) -> bytes:
        """See `Wire.stream_error`. Codex repeats calls that fail with most other codes."""
        error = {"code": "invalid_prompt", "message": f"{words} ({kind})"}
        reply = {"id": "", "object": "response", "status": "failed", "error": error, "output": []}
        event = {"type": "response.failed", "response": reply, "sequence_number": 0}
        return sse(event, event="response.failed")


def _events_of(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for n, item in enumerate(body.get("output") or ()):
        yield {"type": "response.output_item.added", "output_index": n, "item": _begun(item)}
        for event in _events_of_item(item):
            yield {"item_id": item.get("id", ""), "output_index": n, **event}
        yield {"type": "response.output_item.done", "output_index": n, "item": item}
    yield {"type": f"response.{body.get('status', 'completed')}", "response": dict(body)}


_EMPTY: Mapping[str, Mapping[str, Any]] = {
    "message": {"content": [], "status": "in_progress"},
    "reasoning": {"summary": []},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": ""},
}
"""What an item has at its beginning."""


def _begun(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, **_EMPTY.get(str(item.get("type")), {})}


def _events_of_item(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    match item:
        case {"type": "message", "content": list(parts)}:
            for n, part in enumerate(parts):
                field = "refusal" if part.get("type") == "refusal" else "text"
                kind = "refusal" if field == "refusal" else "output_text"
                text, place = str(part.get(field) or ""), {"content_index": n}
                yield {"type": "response.content_part.added", **place, "part": {**part, field: ""}}
                logprobs: dict[str, Any] = {} if kind == "refusal" else {"logprobs": []}
                yield {"type": f"response.{kind}.delta", **place, "delta": text, **logprobs}
                yield {"type": f"response.{kind}.done", **place, field: text, **logprobs}
                yield {"type": "response.content_part.done", **place, "part": part}
        case {"type": "reasoning"}:
            for n, part in enumerate(item.get("summary") or ()):
                text, place = str(part.get("text") or ""), {"summary_index": n}
                added = {**part, "text": ""}
                yield {"type": "response.reasoning_summary_part.added", **place, "part": added}
                yield {"type": "response.reasoning_summary_text.delta", **place, "delta": text}
                yield {"type": "response.reasoning_summary_text.done", **place, "text": text}
                yield {"type": "response.reasoning_summary_part.done", **place, "part": part}
            for n, part in enumerate(item.get("content") or ()):
                text, place = str(part.get("text") or ""), {"content_index": n}
                yield {"type": "response.reasoning_text.delta", **place, "delta": text}
                yield {"type": "response.reasoning_text.done", **place, "text": text}
        case {"type": "function_call", "arguments": str(text)}:
            name = item.get("name")
            yield {"type": "response.function_call_arguments.delta", "delta": text}
            yield {
                "type": "response.function_call_arguments.done",
                "arguments": text,
                "name": name,
            }
        case {"type": "custom_tool_call", "input": str(text)}:
            yield {"type": "response.custom_tool_call_input.delta", "delta": text}
            yield {"type": "response.custom_tool_call_input.done", "input": text}


def _grouped(items: Sequence[dict[str, Any]]) -> list[Any]:
    """The items, with those of one reply together in a list."""
    pieces: list[Any] = []
    for item in items:
        if not _is_assistants(item):
            pieces.append(item)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(item)
        else:
            pieces.append([item])
    return pieces


def _is_assistants(item: Mapping[str, Any]) -> bool:
    kind = item.get("type")
    if kind is None or kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or str(kind).endswith("_call")


def _read_part(raw: Any, calls: CallsInOrder) -> list[Message]:
    if isinstance(raw, tuple):
        return [_said("system", raw[1])]
    if isinstance(raw, list):
        try:
            return [read_output([{"type": "message", **item} for item in raw])]
        except ModelError as error:
            raise WireError(str(error)) from error
    kind = raw.get("type")
    if kind is None or kind == "message":
        match raw.get("role"):
            case "system" | "developer":
                return [_said("system", raw.get("content"))]
            case "user":
                return [_said("user", raw.get("content"))]
            case role:
                known = "user, assistant, system, developer"
                raise WireError(f"its role is {role!r}; known: {known}")
    if str(kind).endswith("_output"):
        id = str(raw.get("call_id") or raw.get("id") or "")
        said = _said("tool", raw.get("output") or "")
        result = Message(role="tool", tool_call_id=id, name=calls.name(id), content="")
        return [{**result, "is_error": False, **said}]
    message = Message(role="user", content=_placeholder(raw))
    message["provider_blocks"] = {"api": API, "blocks": [raw]}
    return [message]


def _said(role: Role, content: Any) -> Message:
    parts = [content] if isinstance(content, dict) else content
    return message_of(API, role, parts, _placeholder)


def _placeholder(item: Mapping[str, Any]) -> str:
    return placeholder({key: value for key, value in item.items() if key != "id"})


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    kind, name = str(tool.get("type")), str(tool.get("name") or "")
    if kind == "custom":
        return [custom_tool(tool)]
    if kind == "namespace":
        read = [_read_tool(one) for one in objects_in(tool.get("tools") or [], "tools")]
        return [schema for one in read if not isinstance(one, str) for schema in one]
    if kind.startswith(_RUN_BY_PROVIDER):
        return str(tool.get("server_label") or kind)
    return [function_tool(name or kind, tool.get("description"), tool.get("parameters"))]


_LAYOUT = Layout(API, _read_part, _read_tool, _READ_ELSEWHERE, "input")
