"""Shared by the dialects: parsing replies, and the errors that endpoints report."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import orjson

from agent.messages.message import MOST_TOKENS, FunctionCall, ToolCall, Usage
from agent.models.errors import ModelError, kind_of
from batch_trajectories.basics import exact_json

_SHOWN = 500
"""Characters of a foreign text that an error message repeats."""


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
        raise error_behind_200(reply["error"], "a 200 reply")
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
            raise ModelError("malformed", f"not JSON: {_excerpt(body)}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", f"not a JSON object: {_excerpt(body)}")
    return reply


_STATUS_OF: Mapping[str, int] = {
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "authentication_error": 401,
    "invalid_api_key": 401,
    "billing_error": 402,
    "insufficient_quota": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "model_not_found": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
    "api_error": 500,
    "server_error": 500,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""The status that each API gives to its errors, which those inside a stream come without."""


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """How long the endpoint asks to wait: milliseconds, seconds or an HTTP date.

    None where it asks for nothing usable, such as a moment that has passed.
    """
    milliseconds = _finite(headers.get("retry-after-ms", ""))
    if milliseconds is not None:
        return milliseconds / 1000
    value = headers.get("retry-after", "")
    seconds = _finite(value)
    if seconds is None:
        try:
            when = parsedate_to_datetime(value)
        except (ValueError, OverflowError):
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return seconds if seconds >= 0 else None


def _finite(value: str) -> float | None:
    """The number that is written there, None for what cannot be waited for."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def object_of(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`, an empty one where there is none."""
    value = raw.get(key)
    return value if isinstance(value, dict) else {}


def make_call(id: Any, name: Any, arguments: Any) -> ToolCall:
    """A call as a record holds it; missing parts are "", missing arguments `{}`.

    Some servers send the arguments as an object; the text form is the one that is recorded. Others
    send nothing where a tool needs none, and refuse a history whose arguments are no JSON.
    """
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        arguments = "{}"
    elif not isinstance(arguments, str):
        arguments = exact_json.dumps(arguments).decode()
    function = FunctionCall(name=str(name or ""), arguments=arguments)
    return ToolCall(id=str(id or ""), type="function", function=function)


RAW_ARGUMENTS = "raw_arguments"
"""The key of an object in which arguments travel that are no object; the record keeps them."""


def input_object(arguments: str) -> dict[str, Any] | None:
    """The object that the arguments of a call are; None if they are none."""
    try:
        parsed = exact_json.loads(arguments or "{}")
        exact_json.dumps(parsed)  # which refuses a nesting that reading takes
    except (exact_json.JSONDecodeError, TypeError):
        return None
    return parsed if isinstance(parsed, dict) else None


def count_or_none(value: Any) -> int | None:
    """`value` if it can be a count of tokens, else None; some servers write 12 as 12.0.

    Counts that earlier versions took over are read back through here too.
    """
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_TOKENS:
        return value
    return None


def read_usage(raw: Any, *, given: str, made: str) -> Usage | None:
    """Usage in OpenAI's APIs; `given` and `made` are their names for input and output."""
    if not isinstance(raw, dict):
        return None
    of_input = object_of(raw, f"{given}_tokens_details")
    of_output = object_of(raw, f"{made}_tokens_details")
    return Usage(
        input_tokens=count_or_none(raw.get(f"{given}_tokens")),
        output_tokens=count_or_none(raw.get(f"{made}_tokens")),
        cache_read_tokens=count_or_none(of_input.get("cached_tokens")),
        cache_write_tokens=count_or_none(of_input.get("cache_write_tokens")),
        reasoning_tokens=count_or_none(of_output.get("reasoning_tokens")),
    )


def text_or_none(value: Any) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None


def refusal_of(status: int, headers: Mapping[str, str], body: bytes) -> ModelError:
    """The error that a reply reports by its status."""
    if 300 <= status < 400:
        place = headers.get("location", "another place")
        message = f"HTTP {status}: it has moved to {place}; give that as the base URL"
        return ModelError("not_found", message)
    error = _read_error(body.decode(errors="replace"))
    return ModelError(
        kind_of(status, error.codes, error.message),
        f"HTTP {status}: {error.message}",
        retry_after_s=retry_after_s(headers),
        code=error.code,
        param=error.param,
    )


def error_behind_200(error: Any, place: str) -> ModelError:
    """An error reported after the status was sent; its code or type replaces the status.

    Routers put the provider's error into the body, and streams have no other way. `place` is
    where it stood.
    """
    refusal = _read_error(json.dumps({"error": error}))
    statuses = [
        int(code) if code.isdecimal() else _STATUS_OF.get(code, 0) for code in refusal.codes
    ]
    status = next((status for status in statuses if 400 <= status < 600), None)
    kind = kind_of(status, refusal.codes, refusal.message)
    message = f"error in {place}: {refusal.message}"
    return ModelError(kind, message, code=refusal.code, param=refusal.param)


class _ErrorBody(NamedTuple):
    codes: tuple[str, ...]
    """What names the cause, the narrowest first: a code in its details, its code, its type."""
    message: str
    param: str = ""
    """The field of the request that is meant; "" for none."""

    @property
    def code(self) -> str:
        return self.codes[0] if self.codes else ""


def _read_error(body: str) -> _ErrorBody:
    """What an error body says in either dialect; for any other body, its beginning.

    As the clients of both APIs read it: the error may also be the body itself.
    """
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _ErrorBody((), body[:_SHOWN].strip() or "(empty body)")
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else None
    if not isinstance(error, dict):
        return _ErrorBody((), body[:_SHOWN])
    message = error.get("message")
    shown = message if isinstance(message, str) else orjson.dumps(error, default=str).decode()
    named = (object_of(error, "details").get("error_code"), error.get("code"), error.get("type"))
    codes = tuple(str(code) for code in named if isinstance(code, str | int) and code)
    return _ErrorBody(codes, shown[:_SHOWN], str(error.get("param") or ""))


def _excerpt(body: bytes) -> str:
    return repr(body[:200].decode(errors="replace")) if body else "an empty body"


def reported_cost(reply: Mapping[str, Any]) -> float | None:
    """What a reply's body says that it cost; None where it says nothing that can be."""
    cost = object_of(reply, "usage").get("cost")
    if isinstance(cost, bool) or not isinstance(cost, int | float):
        return None
    return float(cost) if math.isfinite(cost) and cost >= 0 else None
