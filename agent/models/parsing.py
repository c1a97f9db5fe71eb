"""Functions that the dialects share to parse replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.messages.message import FunctionCall, ToolCall
from agent.models.error_bodies import error_behind_200, find_error, quote, says_error
from agent.models.errors import ModelError
from batch_trajectories.basics import exact_json


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a reply body that must be a JSON object.

    Lone surrogate escapes (an emoji cut in half by a token limit) and bytes that are not UTF-8 are
    replaced, control characters in texts are kept, and numbers that no type can hold become text:
    to refuse them would mean to pay twice. Raises `ModelError("malformed")` for any other body, and
    the error that the body reports.
    """
    reply = load_object(body)
    if exact_json.is_nested_too_deep(body):
        raise ModelError("malformed", f"nested deeper than {exact_json.MAX_NESTING} levels")
    if says_error(reply):
        raise error_behind_200(reply, "a 200 reply")
    if "base_resp" in reply and (error := find_error(reply)) is not None:
        raise error_behind_200(error, "a 200 reply")
    return reply


def load_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object as `parse_object` does, but ignore errors that it reports."""
    try:
        reply = exact_json.loads(body)
    except exact_json.JSONDecodeError:
        try:
            reply = exact_json.loads_leniently(body)
            exact_json.dumps(reply)  # a reply that cannot be written again must not be accepted
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError("malformed", f"not JSON: {quote(body)}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", f"not a JSON object: {quote(body)}")
    return reply


def get_object(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`; an empty one if there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def make_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """Make a call as a record holds it; missing parts are "", missing arguments `{}`."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        # Some servers send no arguments, but refuse a history whose arguments are no JSON.
        arguments = "{}"
    elif not isinstance(arguments, str):
        # Some servers send an object; records have its text.
        arguments = exact_json.dumps(arguments).decode()
    elif arguments.startswith('"'):
        # Some servers encode the arguments as JSON twice.
        arguments = _decode_once(arguments)
    function = FunctionCall(name=str(name or ""), arguments=arguments)
    return ToolCall(id=str(id or ""), type="function", function=function)


def _decode_once(arguments: str) -> str:
    """Decode arguments that were encoded as JSON twice; other texts do not change."""
    try:
        inner = exact_json.loads(arguments)
        if isinstance(inner, str) and isinstance(exact_json.loads(inner), dict):
            return inner
    except (exact_json.JSONDecodeError, TypeError):
        pass  # a text that is no JSON is the model's own
    return arguments


RAW_ARGUMENTS = "raw_arguments"
"""Key of the object that carries arguments that are no object themselves, as APIs demand one."""


def input_object(arguments: str) -> dict[str, Any] | None:
    """Parse the arguments of a call; None if they are no object."""
    try:
        parsed = exact_json.loads(_decode_once(arguments) if arguments else "{}")
        exact_json.dumps(parsed)  # refuses deep nesting that `loads` accepts
    except (exact_json.JSONDecodeError, TypeError):
        return None
    return parsed if isinstance(parsed, dict) else None


def text_or_none(value: Any) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None
