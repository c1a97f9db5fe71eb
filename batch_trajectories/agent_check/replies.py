"""Replies of a model in each API that agents speak."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from agent.models.dialects import anthropic_messages, gemini, openai_chat, openai_responses
from batch_trajectories.basics import exact_json

_COMMAND_FIELDS = ("command", "cmd", "commands", "script")
"""What tools call the command that they run."""

_FILLERS: Mapping[str, Any] = {
    **{"string": "check", "boolean": False, "integer": 10_000, "number": 10_000},
    **{"array": [], "object": {}},
}
"""Values of further required arguments, by their types. As a number: milliseconds to wait."""


class MadeCall(NamedTuple):
    """A call that a reply makes."""

    id: str
    name: str
    arguments: dict[str, Any]


def new_call(name: str, arguments: dict[str, Any]) -> MadeCall:
    """A call with an id as no other has, like those of real models."""
    return MadeCall(f"call_{secrets.token_hex(8)}", name, arguments)


def command_call(tools: Sequence[Mapping[str, Any]], command: str) -> MadeCall | None:
    """The call that runs a command; None if no tool (OpenAI form) takes one."""
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        field = next((name for name in _COMMAND_FIELDS if name in properties), None)
        if field is None:
            continue
        is_list = properties[field].get("type") == "array"
        arguments: dict[str, Any] = {field: ["bash", "-c", command] if is_list else command}
        for name in schema.get("required") or ():
            if name not in arguments:
                arguments[name] = _filler(properties.get(name) or {})
        return new_call(function["name"], arguments)
    return None


def _filler(schema: Mapping[str, Any]) -> Any:
    if choices := schema.get("enum"):
        return choices[0]
    kind = schema.get("type")
    return _FILLERS.get(kind if isinstance(kind, str) else "string", "check")


def reply_body(api: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    """The whole body of a reply with a text and calls."""
    return _BODIES[api](f"check_{secrets.token_hex(8)}", model, text, calls)


def _chat(id: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": _json(given)}}
            for id, name, given in calls
        ]
    finish = "tool_calls" if calls else "stop"
    return {
        **{"id": id, "object": "chat.completion", "created": int(time.time()), "model": model},
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 10, "total_tokens": 20},
    }


def _messages(id: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}
        for call in calls
    ]
    return {
        **{"id": id, "type": "message", "role": "assistant", "model": model, "content": blocks},
        **{"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None},
        "usage": {"input_tokens": 10, "output_tokens": 10},
    }


def _responses(id: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    said = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "id": f"msg_{id}", "status": "completed", "role": "assistant"}
    output: list[dict[str, Any]] = [{**message, "content": [said]}] if text else []
    output += [
        {
            **{"type": "function_call", "id": f"fc_{call.id}", "status": "completed"},
            **{"call_id": call.id, "name": call.name, "arguments": _json(call.arguments)},
        }
        for call in calls
    ]
    return {
        **{"id": id, "object": "response", "created_at": int(time.time()), "model": model},
        **{"status": "completed", "error": None, "incomplete_details": None, "output": output},
        "usage": {"input_tokens": 10, "output_tokens": 10, "total_tokens": 20},
    }


def _gemini(id: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    parts: list[dict[str, Any]] = [{"text": text}] if text else []
    parts += [{"functionCall": {"name": call.name, "args": call.arguments}} for call in calls]
    content = {"role": "model", "parts": parts}
    return {
        "candidates": [{"content": content, "finishReason": "STOP", "index": 0}],
        "usageMetadata": {
            **{"promptTokenCount": 10, "candidatesTokenCount": 10, "totalTokenCount": 20},
        },
        **{"modelVersion": model, "responseId": id},
    }


def _json(value: Any) -> str:
    return exact_json.dumps(value).decode()


_BODIES = {
    openai_chat.API: _chat,
    anthropic_messages.API: _messages,
    openai_responses.API: _responses,
    gemini.API: _gemini,
}
