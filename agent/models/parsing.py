"""Shared by the dialects: parsing replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.messages.message import FunctionCall, ToolCall
from agent.models.error_bodies import error_behind_200, find_error, quote
from agent.models.errors import ModelError
from batch_trajectories.basics import exact_json


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a reply body that must be a JSON object.

    Lone surrogate escapes (an emoji cut in half by a token limit) are replaced and numbers that
    nothing holds are kept as text rather than refused: asking again would pay twice for the same
    answer.

    Raises `ModelError("malformed")` for anything else.
    """
    reply = load_object(body)
    if exact_json.is_nested_too_deep(body):
        raise ModelError("malformed", f"nested deeper than {exact_json.MAX_NESTING} levels")
    if reply.get("error"):
        raise error_behind_200(reply, "a 200 reply")
    if "base_resp" in reply and (error := find_error(reply)) is not None:
        raise error_behind_200(error, "a 200 reply")
    return reply


def load_object(body: bytes) -> dict[str, Any]:
    """Read a JSON object with no look at what it says; as `parse_object` otherwise."""
    try:
        reply = exact_json.loads(body)
    except exact_json.JSONDecodeError:
        try:
            reply = exact_json.loads_leniently(body)
            exact_json.dumps(reply)  # what cannot be written again must not be taken in
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError("malformed", f"not JSON: {quote(body)}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", f"not a JSON object: {quote(body)}")
    return reply


def object_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, an empty one where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def make_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call as a record holds it; missing parts are "", missing arguments `{}`.

    Some servers send the arguments as an object; the text form is the one that is recorded. Others
    send nothing where a tool needs none, and refuse a history whose arguments are no JSON. Parsers
    of some models write the JSON of a text that is the object's JSON.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = exact_json.dumps(arguments).decode()
    elif arguments.startswith('"'):
        arguments = _encoded_once(arguments)
    function = FunctionCall(name=str(name or ""), arguments=arguments)
    return ToolCall(id=str(id or ""), type="function", function=function)


def _encoded_once(arguments: str) -> str:
    """The arguments of which `arguments` is the JSON text; any other text as it is."""
    try:
        inner = exact_json.loads(arguments)
        if isinstance(inner, str) and isinstance(exact_json.loads(inner), dict):
            return inner
    except (exact_json.JSONDecodeError, TypeError):
        pass  # a text that is no JSON is the model's own
    return arguments


RAW_ARGUMENTS = "raw_arguments"
"""The key of an object in which arguments travel that are no object; the record keeps them."""


def input_object(arguments: str) -> dict[str, Any] | None:
    """The object that the arguments of a call are; None if they are none."""
    try:
        parsed = exact_json.loads(_encoded_once(arguments) if arguments else "{}")
        exact_json.dumps(parsed)  # which refuses a nesting that reading takes
    except (exact_json.JSONDecodeError, TypeError):
        return None
    return parsed if isinstance(parsed, dict) else None


def text_or_none(value: Any) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None
