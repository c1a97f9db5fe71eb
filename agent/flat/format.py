"""The flat format: a session is a list of small messages, in a form of no provider.

    {"role": "system" | "user" | "assistant", "content": text}
    {"type": "thinking", "content": text}                        may have "signature": text
    {"type": "tool_call", "name": text, "id": text, "input": object}
    {"type": "tool_result", "id": text, "output": any JSON}      may have "is_error": true
    {"type": "opaque", "block": object}                          may have "api": text

Any of them may have `ts`, the time it was made: UTC, ISO 8601, seconds, `Z`. Any other block of an
API is opaque and is sent back unchanged, only to that API (`api`; without it, Anthropic's). If the
model did not write an object as `input`, it is the JSON value that it wrote, or else its text.
A session has JSON values only: written as JSON and read again, it is the same.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from agent.models.dialects.anthropic_messages import API
from batch_trajectories.basics import exact_json

FlatMessage = dict[str, Any]
"""One message in one of the shapes above."""


class FlatSession(TypedDict):
    """A conversation in the flat format."""

    messages: list[FlatMessage]


_TEXT_FIELD = {"content": str}
_FIELDS: Mapping[str, Mapping[str, Mapping[str, type]]] = {
    "role": {"system": _TEXT_FIELD, "user": _TEXT_FIELD, "assistant": _TEXT_FIELD},
    "type": {
        "thinking": _TEXT_FIELD,
        "tool_call": {"name": str, "id": str, "input": object},
        "tool_result": {"id": str, "output": object},
        "opaque": {"block": dict},
    },
}
"""The fields that a message must have besides its role or type."""

_OPTIONAL: Mapping[str, Mapping[str, type]] = {
    "thinking": {"signature": str},
    "tool_result": {"is_error": bool},
    "opaque": {"api": str},
}
"""The fields that it may have besides these and `ts`."""

_TYPE_NAMES = {str: "text", bool: "true or false", dict: "an object"}

_ASSISTANT_TYPES = ("thinking", "tool_call", "opaque")


def init_session(system_prompt: str | None, user_prompt: str) -> FlatSession:
    """A new session; without a system message if `system_prompt` is None."""
    session = FlatSession(messages=[])
    if system_prompt is not None:
        extend_session(session, {"role": "system", "content": system_prompt})
    return send(session, user_prompt)


def extend_session(session: FlatSession, message: FlatMessage) -> FlatSession:
    """Append a copy of `message`, with a time if it has none; returns the same session.

    Raises `ValueError` if the message itself is wrong; `check_messages` checks the order.
    """
    _check_shape(message)
    session["messages"].append(with_time(copy.deepcopy(message)))
    return session


def send(session: FlatSession, user_message: str) -> FlatSession:
    """Append a user message; returns the same session."""
    return extend_session(session, {"role": "user", "content": user_message})


def fork_session(session: FlatSession) -> FlatSession:
    """An independent copy of the session."""
    return copy.deepcopy(session)


def response(session: FlatSession) -> FlatMessage | None:
    """The last text of the assistant, or None; a thought is not a text."""
    texts = (m for m in reversed(session["messages"]) if m.get("role") == "assistant")
    return next(texts, None)


def with_time(message: FlatMessage, at: float | None = None) -> FlatMessage:
    """The message with the time `at` (epoch seconds, or now), unless it has a time."""
    if "ts" in message:
        return message
    return {**message, "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))}


def _check_shape(message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"it must be a dict, not {type(message).__name__}")
    key = next((key for key in _FIELDS if key in message), None)
    if key is None:
        raise ValueError("it has neither a role nor a type")
    kind, known = message[key], _FIELDS[key]
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"its {key} is {kind!r}; known: {', '.join(known)}")
    optional = {"ts": str, **_OPTIONAL.get(kind, {})}
    for field, kind_of_value in {**known[kind], **optional}.items():
        if field not in message and field not in optional:
            raise ValueError(f"its {field!r} is missing")
        if field in message and not isinstance(message[field], kind_of_value):
            raise ValueError(f"its {field!r} must be {_TYPE_NAMES[kind_of_value]}")
    if unknown := message.keys() - {key, *known[kind], *optional}:
        raise ValueError(f"it has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
    for field, value in message.items():
        if not _is_json(value):
            raise ValueError(f"its {field!r} holds what JSON cannot hold, or would alter")
    if kind == "opaque" and not is_foreign(message):
        block_type = message["block"].get("type")
        if not isinstance(block_type, str) or block_type in ("text", "thinking", "tool_use"):
            raise ValueError(f"a block of type {block_type!r} is not opaque")


def _is_json(value: Any) -> bool:
    try:
        written = exact_json.dumps(value)
    except TypeError:
        return False
    return not exact_json.is_nested_too_deep(written) and bool(exact_json.loads(written) == value)


def check_messages(flat: Sequence[FlatMessage]) -> None:
    """Raise `ValueError` naming the first message with a wrong form or at a wrong place.

    The system message must be the first, a result must be for an open call, call ids must be
    unique, and only the missing results may follow the first result of a turn.
    """
    waiting: set[str] = set()
    ids: set[str] = set()
    before = None
    for n, item in enumerate(flat):
        where = f"message {n} of the session"
        try:
            _check_shape(item)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        kind = item.get("type")
        if item.get("role") == "system" and n:
            raise ValueError(f"{where}: the only system message must be the first message")
        if kind == "tool_result":
            if item["id"] not in waiting:
                raise ValueError(f"{where}: a tool result without an open call")
            waiting.remove(item["id"])
        elif waiting and (before == "tool_result" or not is_assistants(item) or is_foreign(item)):
            raise ValueError(f"{where}: the calls {sorted(waiting)} before it have no result")
        if kind == "tool_call":
            if item["id"] in ids:
                raise ValueError(f"{where}: an earlier call has the id {item['id']!r}, too")
            ids.add(item["id"])
            waiting.add(item["id"])
        before = kind


def is_assistants(item: Mapping[str, Any]) -> bool:
    """Whether it is part of an assistant message."""
    return item.get("role") == "assistant" or item.get("type") in _ASSISTANT_TYPES


def is_foreign(item: Mapping[str, Any]) -> bool:
    """Whether it is a block of another API than Anthropic's."""
    return bool(item.get("api", API) != API)
