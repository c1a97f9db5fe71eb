"""Checks and completes the messages that a caller gives as history."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

from agent.messages.message import Message

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of content parts that are text, in all APIs."""


def plain_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A chat message in our form: role `system` instead of `developer`, content as one text.

    A list of text parts becomes their texts, joined by newlines. Other contents do not change.
    """
    content = message.get("content")
    is_list = isinstance(content, list) and bool(content) and all(map(is_text_part, content))
    is_developer = message.get("role") == "developer"
    if not is_list and not is_developer:
        return message
    return {
        **message,
        **({"role": "system"} if is_developer else {}),
        **({"content": "\n".join(part["text"] for part in content or ())} if is_list else {}),
    }


def is_text_part(part: Any) -> bool:
    """Whether a part of a message's content is text, in any API's form."""
    return (
        isinstance(part, Mapping)
        and part.get("type", "text") in _TEXT_PARTS
        and isinstance(part.get("text"), str)
    )


def complete_history(messages: Sequence[Message]) -> list[Message]:
    """A copy of `messages` with the keys that callers may omit.

    Raises `ValueError` as `check_history` does.
    """
    given: list[Any] = copy.deepcopy(list(messages))
    copies: list[Message] = [
        cast(Message, dict(plain_message(message))) if isinstance(message, dict) else message
        for message in given
    ]
    for message in copies:
        # Other programs write null for absent keys.
        if isinstance(message, dict):
            for key in [key for key, value in message.items() if value is None]:
                del message[key]  # type: ignore[misc]
            message.setdefault("content", "")
    check_history(copies)
    names = {
        call["id"]: call["function"]["name"]
        for message in copies
        for call in message.get("tool_calls", ())
    }
    for message in copies:
        if message["role"] == "tool":
            message.setdefault("is_error", False)
            message.setdefault("name", names[message["tool_call_id"]])
    return copies


def check_history(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` naming the message unless a new prompt can follow `messages`.

    Roles must be known, texts must not be empty, and the results of tool calls must come before
    any other message.
    """
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"message {n} of the history is a {type(message).__name__}")
    waiting: set[str] = set()
    roles = [message.get("role") for message in messages if message.get("role") != "system"]
    if roles[:1] == ["assistant"]:
        raise ValueError("the history begins with an assistant message; it must be the user's")
    for n, message in enumerate(messages):
        where = f"message {n} of the history"
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise ValueError(f"{where}: its role is {role!r}; known: system, user, assistant, tool")
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                raise ValueError(f"{where}: a tool result without an open call")
            waiting.remove(message["tool_call_id"])
        elif waiting:
            raise ValueError(f"{where}: the calls {sorted(waiting)} before it have no result")
        if role == "system" and n:
            raise ValueError(f"{where}: a system message must be the first message")
        calls = message.get("tool_calls") or ()
        content = message.get("content")
        if not isinstance(content, str) or (role in ("system", "user") and not content.strip()):
            raise ValueError(f"{where}: its content must be text that is not blank")
        if role == "assistant":
            waiting = {_call_id(call, where) for call in calls}
    if waiting:
        raise ValueError(f"the history ends with calls that have no result: {sorted(waiting)}")


def _call_id(call: Any, where: str) -> str:
    try:
        name, arguments, id = call["function"]["name"], call["function"]["arguments"], call["id"]
    except (KeyError, TypeError):
        raise ValueError(f"{where}: a call needs an id and a function with arguments") from None
    if not all(isinstance(text, str) for text in (name, arguments, id)):
        raise ValueError(f"{where}: the id, name and arguments of a call must be strings")
    return str(id)
