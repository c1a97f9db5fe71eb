"""What the adapters share: reading a reply's bytes, and turning SDK failures into `ModelError`."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx2
import orjson

from agent.models.errors import ModelError, kind_of_status

_SHOWN = 500
"""Characters of a foreign text that an error message repeats."""


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a reply body that must be a JSON object.

    Lone surrogate escapes (an emoji cut in half by a token limit) are replaced rather than
    refused: asking again would pay twice for the same answer.

    Raises `ModelError("malformed")` for anything else.
    """
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            text = json.dumps(json.loads(body.decode()), ensure_ascii=False)
            reply = json.loads(text.encode("utf-16", "surrogatepass").decode("utf-16", "replace"))
        except (ValueError, RecursionError) as error:
            raise ModelError("malformed", f"not JSON: {_excerpt(body)}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", f"not a JSON object: {_excerpt(body)}")
    if reply.get("error"):
        raise _error_in_reply(reply["error"])
    return reply


async def guarded(call: Awaitable[Any], *, timeout_s: float) -> bytes:
    """Await an SDK call that gives a raw response; return its body.

    Both SDKs are generated from one template and name their errors alike, so that one place
    can classify them without importing either.
    """
    try:
        async with asyncio.timeout(timeout_s):
            response = await call
            body: bytes = response.content
            return body
    except TimeoutError as error:
        raise ModelError("timeout", f"no complete reply within {timeout_s:g} s") from error
    except httpx2.HTTPError as error:
        raise ModelError("connection", f"{type(error).__name__}: {error}") from error
    except Exception as error:
        raise _sdk_error(error) from error


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """How long the endpoint asks to wait: seconds or an HTTP date; None where unusable."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = parsedate_to_datetime(value)
        except ValueError:
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=UTC)
        seconds = (when - (now or datetime.now(UTC))).total_seconds()
    return seconds if math.isfinite(seconds) and seconds >= 0 else None


def count_or_none(value: Any) -> int | None:
    """`value` if it is a whole number, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text_or_none(value: Any) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None


def _sdk_error(error: Exception) -> ModelError:
    status = getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    if isinstance(status, int) and response is not None:
        body = response.text
        return ModelError(
            kind_of_status(status, body),
            f"HTTP {status}: {_message_in(body)}",
            retry_after_s=retry_after_s(response.headers),
        )
    names = {base.__name__ for base in type(error).__mro__}
    if "APITimeoutError" in names:
        return ModelError("timeout", str(error))
    if "APIConnectionError" in names:
        return ModelError("connection", f"{error} ({error.__cause__ or 'no cause given'})")
    if isinstance(error, OSError):
        return ModelError("connection", f"{type(error).__name__}: {error}")
    raise error


def _error_in_reply(error: Any) -> ModelError:
    """Some routers answer 200 and put the provider's error in the body."""
    code = error.get("code") if isinstance(error, dict) else None
    text = orjson.dumps(error, default=str).decode()
    if isinstance(code, int) and 400 <= code < 600:
        return ModelError(kind_of_status(code, text), f"error in a 200 reply: {text[:_SHOWN]}")
    return ModelError("malformed", f"error in a 200 reply: {text[:_SHOWN]}")


def _message_in(body: str) -> str:
    """The message of an error body in either dialect, else the body's start."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:_SHOWN].strip() or "(empty body)"
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        return str(error["message"])[:_SHOWN]
    return body[:_SHOWN]


def _excerpt(body: bytes) -> str:
    return repr(body[:200].decode(errors="replace")) if body else "an empty body"
