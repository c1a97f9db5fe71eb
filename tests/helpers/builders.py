"""Builders of what tests speak about: messages, calls, results, replies and whole records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from agent.messages.message import Message, Usage
from agent.models.model import Completion

TEMP: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "temp",
        "description": "Air temperature now",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "source": {"type": "string"}},
            "required": ["city"],
        },
    },
}
"""The schema of the tool that `call` calls."""

RESERVED: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("cannot_complete", "final_answer")
]

OFFERED = [RESERVED[0], TEMP, RESERVED[1]]
"""`temp` and the tools that end a conversation."""


def user(content: str = "Go.") -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": content}


def call(arguments: str = "{}", *, id: str = "c1", name: str = "temp") -> dict[str, Any]:
    """A call, as messages of an assistant have it; `arguments` are its JSON text."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def assistant(content: str = "", *calls: dict[str, Any], reasoning: str = "") -> dict[str, Any]:
    """A message of the assistant."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def result(content: str, *, id: str = "c1", is_error: bool = False) -> dict[str, Any]:
    """A result of the call `id`; readers of records take the tool's name from the call."""
    return {
        "role": "tool",
        "tool_call_id": id,
        "name": "not read",
        "content": content,
        "is_error": is_error,
    }


def record_of(*messages: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A record of a conversation that had the tool `temp`, with `changes` of its keys."""
    replies = sum(message["role"] == "assistant" for message in messages)
    return {
        "id": "row-1-0",
        "row": {"prompt": "Go.", "source": "mine", "long": "y" * 2000, "rows": [1]},
        "messages": list(messages),
        "tools": [TEMP],
        "status": "completed",
        "error": None,
        "turns": [
            {"usage": None, "finish_reason": "stop", "started_at": 1.5, "duration_s": 0.25}
            for _ in range(replies)
        ],
        "api_calls": replies,
        "usage": {"input_tokens": 10, "output_tokens": None},
        "model": "m",
        "model_returned": "m-2026",
        "api": "openai_chat",
        "toolsets": ["weather"],
        "sample": 0,
        "seed": 7,
        "sandbox": None,
        "prompt_id": "row-1",
        "resumes": [{"interrupted": []}],
        "config_digest": "d1",
        "schema_version": 1,
    } | changes


def final(answer: str, *, id: str = "f") -> dict[str, Any]:
    """The call that ends a conversation with `answer`."""
    return call(json.dumps({"answer": answer}), id=id, name="final_answer")


def ended_by(turn: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A record of one call of `temp` and then `turn`, whose calls are answered."""
    results = [result("ok", id=one["id"]) for one in turn.get("tool_calls", ())]
    messages = (user(), assistant("", call()), result("r"), turn, *results)
    return record_of(*messages, **{"tools": OFFERED, **changes})


def chat_reply(message: str | Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The body of a reply of the chat API, with `more` keys; a text is a message of that text.

    It ends with `tool_calls` if the message has any, else with `stop`.
    """
    if isinstance(message, str):
        message = {"role": "assistant", "content": message}
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {"choices": [{"message": message, "finish_reason": reason}], **more}


def completion(
    content: str = "Yes.", *, usage: Mapping[str, int | None] | None = None, **more: Any
) -> Completion:
    """What a model client returns for a reply of this text, with `more` of its fields."""
    counts: Any = None if usage is None else {**dict.fromkeys(Usage.__annotations__), **usage}
    fields: dict[str, Any] = {"finish_reason": "stop", "model": None, "response_id": None, **more}
    return Completion(message=Message(role="assistant", content=content), usage=counts, **fields)
