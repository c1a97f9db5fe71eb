"""The server side of OpenAI's chat completions API."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import Message
from agent.models.dialects.openai_chat import API, flat_text, read_message
from agent.models.errors import ModelError
from agent.models.parsing import get_object
from agent.wires.base import SERVER_ERROR, MadeCall, Wire, sse
from agent.wires.reading import (
    CallsInOrder,
    Layout,
    Schemas,
    custom_tool,
    function_tool,
    placeholder,
    require_objects,
)
from agent.wires.wire import WireError
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_READ_ELSEWHERE = frozenset(
    {
        "model",
        "messages",
        "tools",
        "stream",
        "stream_options",
        # The following identify the caller and control where prompts are cached or stored.
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "store",
        "user",
    }
)
_REASONING = ("reasoning_content", "reasoning")


class ChatWire(Wire):
    """OpenAI's chat completions; see `Wire`."""

    api = API
    call_path = "/chat/completions"
    headers = frozenset({"openai-beta"})
    limits: tuple[str, ...] = ("max_completion_tokens", "max_tokens")
    server_field = "web_search_options"
    closing = b"data: [DONE]\n\n"
    ends = ("finish_reason",)

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
        return None, require_objects(body.get("messages"), "messages")

    def collect_tools(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """See `Wire.collect_tools`."""
        tools = require_objects(body.get("tools") or [], "tools")
        return [*tools, {"type": "web_search_options"}] if self.server_field in body else tools

    def write_whole(self, body: Mapping[str, Any]) -> bytes:
        """See `Wire.write_whole`."""
        # Clients expect two fields that a reply put together from a stream does not have.
        return exact_json.dumps({"object": "chat.completion", "created": 0, **body})

    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """See `Wire.write_stream`."""
        head = {"id": body.get("id", ""), "created": 0, **body, "object": "chat.completion.chunk"}
        usage, choices = head.pop("usage", None), objects_among(head.pop("choices", []))
        deltas = [delta for choice in choices for delta in _write_deltas(choice)]
        events = [sse({**head, "choices": [delta]}) for delta in deltas]
        for choice in choices:
            ends = {"index": choice.get("index", 0), "finish_reason": choice.get("finish_reason")}
            events.append(sse({**head, "choices": [{**ends, "delta": {}}]}))
        if usage is not None:
            events.append(sse({**head, "choices": [], "usage": usage}))
        return [*events, self.closing]

    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """See `Wire.write_reply`."""
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            message["tool_calls"] = [
                {
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": exact_json.dumps(given).decode()},
                }
                for id, name, given in calls
            ]
        finish = "tool_calls" if calls else "stop"
        return {
            "id": id,
            "object": "chat.completion",
            "created": int(time.time()),
            "model": model,
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
        }

    def ends_reply(self, data: str) -> bool:
        """See `Wire.ends_reply`."""
        # Clients can act on the finish reason before the closing event.
        return self.is_closing(data) or super().ends_reply(data)

    def is_closing(self, data: str) -> bool:
        """See `Wire.is_closing`."""
        return data.strip() == "[DONE]"

    def is_end(self, event: Any) -> bool:
        """See `Wire.is_end`."""
        return any(choice.get("finish_reason") for choice in event.get("choices") or [])

    def write_stream_error(self, status: int, kind: str, message: str) -> bytes:
        """See `Wire.write_stream_error`."""
        # opencode repeats calls that fail with `SERVER_ERROR`.
        code = SERVER_ERROR if status >= 500 else kind
        return b"data: " + self.write_error(status, code, message) + b"\n\n"


def _write_deltas(choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Write a choice as the parts of a stream, without the finish reason."""
    # Clients read the reasoning of a part first. A text that came before the reasoning gets a part
    # of its own, because agents keep the order in their summaries.
    message = dict(get_object(choice, "message"))
    if calls := objects_among(message.get("tool_calls")):
        message["tool_calls"] = [{"index": n, **call} for n, call in enumerate(calls)]
    others = {key: choice[key] for key in choice if key not in ("message", "finish_reason")}
    order = [key for key in message if key in ("content", *_REASONING) and message[key]]
    deltas = [message]
    if order[0:1] == ["content"] and len(order) > 1:
        deltas = [{"role": "assistant", "content": message.pop("content")}, message]
    place = {"index": choice.get("index", 0)}
    first, *rest = ({**place, "delta": delta, "finish_reason": None} for delta in deltas)
    return [{**others, **first}, *rest]


def _read_part(raw: dict[str, Any], calls: CallsInOrder) -> list[Message]:
    match raw.get("role"):
        case "system" | "developer":
            return [_add_content(Message(role="system", content=""), raw.get("content"))]
        case "user":
            return [_add_content(Message(role="user", content=""), raw.get("content"))]
        case "assistant":
            try:
                return [read_message(raw)]
            except ModelError as error:
                raise WireError(str(error)) from error
        case "tool":
            id = str(raw.get("tool_call_id") or "")
            result = Message(
                role="tool", tool_call_id=id, name=calls.name(id), content="", is_error=False
            )
            return [_add_content(result, raw.get("content"))]
        case role:
            raise WireError(f"its role is {role!r}; known: system, user, assistant, tool")


def _add_content(message: Message, content: Any) -> Message:
    """Add the content, a text or a list of parts, to a message."""
    if isinstance(content, list) and (others := [part for part in content if _is_no_text(part)]):
        content = [placeholder(part) if _is_no_text(part) else part for part in content]
        message["provider_blocks"] = {"api": API, "blocks": others}
    message["content"] = flat_text(content, between="\n")
    return message


def _is_no_text(part: Any) -> bool:
    return isinstance(part, dict) and not isinstance(part.get("text"), str)


def _read_tool(tool: Mapping[str, Any]) -> Schemas:
    """Read a function, or a custom tool, whose input is free text."""
    match tool.get("type"):
        case "function":
            function = get_object(tool, "function")
            name, description = str(function.get("name") or ""), function.get("description")
            schema = function_tool(name, description, function.get("parameters"))
            return [{**schema, "function": {**function, **schema["function"]}}]
        case "custom":
            return [custom_tool(get_object(tool, "custom"))]
        case kind:
            return str(kind)


WIRE = ChatWire()
