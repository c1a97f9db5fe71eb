"""The server side of OpenAI's Responses API."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agent.messages.message import EARLIER_RESPONSE, Message, Role
from agent.models.dialects.openai_responses import API, conversation_id_in, read_output
from agent.models.errors import ModelError
from agent.wires.base import SERVER_ERROR, MadeCall, Wire, sse
from agent.wires.reading import (
    CallsInOrder,
    Layout,
    Schemas,
    custom_tool,
    function_tool,
    make_message,
    placeholder,
    require_objects,
    unknown_earlier_message,
)
from agent.wires.wire import WireError, WireRequest
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_READ_ELSEWHERE = frozenset(
    {
        "model",
        "input",
        "instructions",
        "tools",
        "stream",
        "stream_options",
        # The following identify the caller and control where prompts and replies are stored.
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
        # The messages that these name are read in their place.
        "previous_response_id",
        "conversation",
    }
)

_REFERENCE_TYPE = "item_reference"

_PROVIDER_TOOL_PREFIXES = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "mcp",
    "tool_search",
)
"""Beginnings of the types of tools that the provider runs."""


class ResponsesWire(Wire):
    """OpenAI's Responses API; see `Wire`. The last event of a stream has the whole reply."""

    api = API
    call_path = "/responses"
    count_path = "/input_tokens"
    headers = frozenset({"openai-beta"})
    limits = ("max_output_tokens",)
    ends = ("response.completed", "response.incomplete", "response.failed", "error")

    def __init__(self) -> None:
        self.layout = Layout(
            api=API,
            read_part=_read_part,
            read_tool=_read_tool,
            read_elsewhere=_READ_ELSEWHERE,
            messages="input",
            has_instructions=True,
        )

    def split_messages(self, body: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """See `Wire.split_messages`."""
        given = body.get("input") or []
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        return body.get("instructions"), _group_replies(require_objects(given, "input"))

    def insert_items(
        self, body: Mapping[str, Any], items: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """See `Wire.insert_items`."""
        # The AI SDK sends only the ids of items that the endpoint has stored.
        given = body.get("input")
        if not isinstance(given, list) or not any(map(_referenced_id, given)):
            return body
        return {**body, "input": [items.get(_referenced_id(item), item) for item in given]}

    def continued_id(self, body: Mapping[str, Any]) -> str:
        """See `Wire.continued_id`. A conversation may be an id or an object with the id."""
        conversation = body.get("conversation")
        if isinstance(conversation, dict):
            conversation = conversation.get("id")
        id = body.get("previous_response_id") or conversation or ""
        if not isinstance(id, str):
            raise WireError("previous_response_id, conversation: it must be an id")
        return id

    def has_read_earlier(self, request: WireRequest, reply: Mapping[str, Any]) -> bool:
        """See `Wire.has_read_earlier`."""
        # Servers that ignore the id do not repeat it, or give null.
        repeated_ids = reply.get("previous_response_id", request.follows), conversation_id_in(reply)
        return not request.follows or request.follows in repeated_ids

    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.write_stream`."""
        return [
            sse({**event, "sequence_number": n}, event=event["type"])
            for n, event in enumerate(_stream_events(body))
        ]

    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """See `Wire.write_reply`."""
        part = {"type": "output_text", "text": text, "annotations": []}
        message = {"type": "message", "id": f"msg_{id}", "status": "completed", "role": "assistant"}
        output: list[dict[str, Any]] = [{**message, "content": [part]}] if text else []
        output += [
            {
                "type": "function_call",
                "id": f"fc_{call.id}",
                "status": "completed",
                "call_id": call.id,
                "name": call.name,
                "arguments": exact_json.dumps(call.arguments).decode(),
            }
            for call in calls
        ]
        return {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "status": "completed",
            "error": None,
            "incomplete_details": None,
            "output": output,
            "usage": {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20},
        }

    def write_stream_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_stream_error`."""
        # Codex repeats calls that fail with most other codes.
        code = SERVER_ERROR if status >= 500 else "invalid_prompt"
        error = {"code": code, "message": f"{message} ({kind})"}
        reply = {"id": "", "object": "response", "status": "failed", "error": error, "output": []}
        event = {"type": "response.failed", "response": reply, "sequence_number": 0}
        return sse(event, event="response.failed")


def _stream_events(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**body, "status": "in_progress", "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for n, item in enumerate(body.get("output") or ()):
        yield {"type": "response.output_item.added", "output_index": n, "item": _begin_item(item)}
        for event in _item_events(item):
            yield {"item_id": item.get("id", ""), "output_index": n, **event}
        yield {"type": "response.output_item.done", "output_index": n, "item": item}
    yield {"type": f"response.{body.get('status', 'completed')}", "response": dict(body)}


_EMPTY_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "message": {"content": [], "status": "in_progress"},
    "reasoning": {"summary": []},
    "function_call": {"arguments": "", "status": "in_progress"},
    "custom_tool_call": {"input": ""},
}
"""The fields of an item, by its type, that are empty when it begins."""


def _begin_item(item: Mapping[str, Any]) -> dict[str, Any]:
    return {**item, **_EMPTY_FIELDS.get(str(item.get("type")), {})}


def _item_events(item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    match item:
        case {"type": "message", "content": list(parts)}:
            for n, part in enumerate(objects_among(parts)):
                field = "refusal" if part.get("type") == "refusal" else "text"
                kind = "refusal" if field == "refusal" else "output_text"
                text, place = str(part.get(field) or ""), {"content_index": n}
                yield {"type": "response.content_part.added", **place, "part": {**part, field: ""}}
                logprobs: dict[str, Any] = {} if kind == "refusal" else {"logprobs": []}
                yield {"type": f"response.{kind}.delta", **place, "delta": text, **logprobs}
                yield {"type": f"response.{kind}.done", **place, field: text, **logprobs}
                yield {"type": "response.content_part.done", **place, "part": part}
        case {"type": "reasoning"}:
            for n, part in enumerate(objects_among(item.get("summary"))):
                text, place = str(part.get("text") or ""), {"summary_index": n}
                added = {**part, "text": ""}
                yield {"type": "response.reasoning_summary_part.added", **place, "part": added}
                yield {"type": "response.reasoning_summary_text.delta", **place, "delta": text}
                yield {"type": "response.reasoning_summary_text.done", **place, "text": text}
                yield {"type": "response.reasoning_summary_part.done", **place, "part": part}
            for n, part in enumerate(objects_among(item.get("content"))):
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


def _referenced_id(item: Any) -> str:
    """The id of the item that a reference names; "" if `item` is no reference."""
    if not isinstance(item, dict) or item.get("type") != _REFERENCE_TYPE:
        return ""
    return str(item.get("id") or "")


def _group_replies(items: Sequence[dict[str, Any]]) -> list[Any]:
    """Put the items of each reply together in a list."""
    pieces: list[Any] = []
    for item in items:
        if not is_reply_item(item):
            pieces.append(item)
        elif pieces and isinstance(pieces[-1], list):
            pieces[-1].append(item)
        else:
            pieces.append([item])
    return pieces


def is_reply_item(item: Mapping[str, Any]) -> bool:
    """Whether an item is part of a model's reply."""
    kind = item.get("type")
    if kind is None or kind == "message":
        return item.get("role") == "assistant"
    return kind == "reasoning" or str(kind).endswith("_call")


def _read_part(raw: Any, calls: CallsInOrder) -> list[Message]:
    if isinstance(raw, tuple):
        kind, given = raw
        return [
            unknown_earlier_message(API, given)
            if kind == EARLIER_RESPONSE
            else _message("system", given)
        ]
    if isinstance(raw, list):
        try:
            return [read_output([{"type": "message", **item} for item in raw])]
        except ModelError as error:
            raise WireError(str(error)) from error
    kind = raw.get("type")
    if kind is None or kind == "message":
        match raw.get("role"):
            case "system" | "developer":
                return [_message("system", raw.get("content"))]
            case "user":
                return [_message("user", raw.get("content"))]
            case role:
                known = "user, assistant, system, developer"
                raise WireError(f"its role is {role!r}; known: {known}")
    if str(kind).endswith("_output"):
        id = str(raw.get("call_id") or raw.get("id") or "")
        content = _message("tool", raw.get("output") or "")
        result = Message(role="tool", tool_call_id=id, name=calls.name(id), content="")
        return [{**result, "is_error": False, **content}]
    if kind == _REFERENCE_TYPE:
        return [unknown_earlier_message(API, _referenced_id(raw))]
    message = Message(role="user", content=_placeholder(raw))
    message["provider_blocks"] = {"api": API, "blocks": [raw]}
    return [message]


def _message(role: Role, content: Any) -> Message:
    parts = [content] if isinstance(content, dict) else content
    return make_message(API, role, parts, _placeholder)


def _placeholder(item: Mapping[str, Any]) -> str:
    return placeholder({key: value for key, value in item.items() if key != "id"})


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    kind, name = str(tool.get("type")), str(tool.get("name") or "")
    if kind == "custom":
        return [custom_tool(tool)]
    if kind == "namespace":
        nested = [_read_tool(one) for one in require_objects(tool.get("tools") or [], "tools")]
        return [schema for schemas in nested if not isinstance(schemas, str) for schema in schemas]
    if kind.startswith(_PROVIDER_TOOL_PREFIXES):
        return str(tool.get("server_label") or kind)
    return [function_tool(name or kind, tool.get("description"), tool.get("parameters"))]


WIRE = ResponsesWire()
