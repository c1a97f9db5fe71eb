"""What the adapters share: reading a reply's bytes, and turning SDK failures into `ModelError`."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Awaitable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, Protocol

import aiohttp
import httpx2
import orjson

from agent.messages import FunctionCall, ToolCall
from agent.models.errors import ModelError, kind_of_status, redact
from agent.models.model import ModelSettings
from agent.models.receiving import MAX_EVENT_BYTES, ReceivedBytes
from agent.models.streaming import Assembly
from agent.nesting import MAX_NESTING, is_nested_deeper
from toolsets.errors import HOST_ERRNOS, HostError

_NEVER_SENT = (ConnectionRefusedError, socket.gaierror)
"""Failures to connect at all, in contrast to connections that were cut."""

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
            orjson.dumps(reply)  # what cannot be written again must not be taken in
        except (ValueError, TypeError, RecursionError) as error:
            raise ModelError("malformed", f"not JSON: {_excerpt(body)}") from error
    if not isinstance(reply, dict):
        raise ModelError("malformed", f"not a JSON object: {_excerpt(body)}")
    if is_nested_deeper(body, MAX_NESTING):
        raise ModelError("malformed", f"nested deeper than {MAX_NESTING} levels")
    if reply.get("error"):
        raise _error_behind_200(reply["error"], "a 200 reply")
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


class SdkClient(Protocol):
    """What the clients of both SDKs have in common."""

    def post(
        self, path: str, *, cast_to: type[Any], content: bytes, stream: bool
    ) -> Awaitable[Any]:
        """Send `content` and give the response as it came, or the SDK's stream of events."""


async def post(
    client: SdkClient,
    path: str,
    request: Mapping[str, Any],
    settings: ModelSettings,
    *,
    secret: str,
    assembly: Assembly | None = None,
) -> bytes:
    """Send one request; return the body of the reply, which must come in time.

    With an `assembly` the request must ask for a stream, whose parts it puts together. Raises
    `ModelError`, and `HostError` where this machine ran out of what a call needs. `secret` is
    taken out of what error messages quote, before they are cut to size. The HTTP client of
    `client` must have `bound_reply` as its hook.

    Both SDKs are generated from one template and name their errors alike, so that one place
    can classify them without importing either.
    """
    timeout_s = settings.attempt_timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            content = orjson.dumps(request)
            if assembly is not None:
                stream = await client.post(path, cast_to=object, content=content, stream=True)
                return await _assemble(stream, assembly, settings.idle_timeout_s)
            response = await client.post(
                path, cast_to=httpx2.Response, content=content, stream=False
            )
            body: bytes = response.content
            return body
    except ModelError:
        raise
    except TimeoutError as error:
        raise ModelError("timeout", f"no complete reply within {timeout_s:g} s") from error
    except (httpx2.HTTPError, aiohttp.ClientError) as error:
        # One SDK lets failures of its transport through that it has no names for: what came was
        # no HTTP, or had headers beyond measure.
        raise ModelError("connection", f"{type(error).__name__}: {error}") from error
    except Exception as error:
        raise _sdk_error(error, secret) from error


async def _assemble(stream: Any, assembly: Assembly, idle_timeout_s: float) -> bytes:
    """Read a stream to its end, unless it falls silent once it has begun.

    Until then only the attempt's time counts: who thinks or queues says nothing at first.
    """
    clock = asyncio.get_running_loop()
    silence = asyncio.timeout(None)
    unread = 0

    def on_part(size: int) -> None:
        # Bytes rather than events: what keeps a connection alive is often no event.
        silence.reschedule(clock.time() + idle_timeout_s)
        nonlocal unread
        unread += size
        if unread > MAX_EVENT_BYTES:
            raise ModelError("malformed", f"no event in {MAX_EVENT_BYTES // 2**20} MiB of a stream")

    try:
        async with stream, silence:
            # Some servers know no streams, or not for this model, and answer in one piece.
            if stream.response.headers.get("content-type", "").startswith("application/json"):
                body: bytes = await stream.response.aread()
                return body
            received: ReceivedBytes = stream.response.stream
            received.on_part = on_part
            async for part in stream:
                unread = 0
                if isinstance(part, dict):
                    assembly.add(part)
    except (ValueError, RecursionError) as error:
        raise ModelError("malformed", f"in the stream: {type(error).__name__}: {error}") from error
    except TimeoutError as error:
        if not silence.expired():
            raise
        words = f"the stream was silent for {idle_timeout_s:g} s"
        raise ModelError("timeout", words) from error
    return assembly.finish()


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
    """A call as a record holds it; missing parts are "".

    Some servers send the arguments as an object; the text form is the one that is recorded.
    """
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else orjson.dumps(arguments).decode()
    function = FunctionCall(name=str(name or ""), arguments=arguments)
    return ToolCall(id=str(id or ""), type="function", function=function)


def count_or_none(value: Any) -> int | None:
    """`value` if it can be a count of tokens, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63:
        return value
    return None


def text_or_none(value: Any) -> str | None:
    """`value` if it is text, else None."""
    return value if isinstance(value, str) else None


def _sdk_error(error: Exception, secret: str) -> ModelError:
    status = getattr(error, "status_code", None)
    response = getattr(error, "response", None)
    body = getattr(error, "body", None)
    if body is not None and (status is None or status < 400):
        error_told = body.get("error", body) if isinstance(body, dict) else body
        return _error_behind_200(error_told, "the stream", secret)
    if isinstance(status, int) and response is not None:
        code, message, param = _read_error(
            redact(response.content.decode(errors="replace"), secret)
        )
        return ModelError(
            kind_of_status(status, code, message),
            f"HTTP {status}: {message}",
            retry_after_s=retry_after_s(response.headers),
            code=code,
            param=param,
        )
    root = _root_of(error)
    if isinstance(root, ModelError):
        # One SDK takes our own limits for failures of its connection.
        return ModelError(root.kind, str(root))
    if isinstance(root, OSError) and root.errno in HOST_ERRNOS:
        raise HostError(f"model call: {root.strerror}") from error
    if isinstance(root, OSError) and not isinstance(root, TimeoutError):
        words = root.strerror or str(root) or type(root).__name__
        return ModelError("connection", words, was_sent=not isinstance(root, _NEVER_SENT))
    names = {base.__name__ for base in type(error).__mro__}
    if "APITimeoutError" in names and "Timeout" in type(root).__name__:
        return ModelError("timeout", str(error))
    if "APIConnectionError" in names or "APITimeoutError" in names:
        return ModelError("connection", f"{error} ({type(root).__name__}: {root})")
    raise error


def _root_of(error: BaseException) -> BaseException:
    """The first failure of a chain: the transport wraps it several times, by other names."""
    while not isinstance(error, TimeoutError):
        if (cause := error.__cause__ or error.__context__) is None:
            break
        error = cause
    return error


def _error_behind_200(error: Any, place: str, secret: str = "") -> ModelError:
    """An error that is told after the status was sent; its code or type stands for the status.

    Routers put the provider's error into the body, and streams have no other way. `place` is
    where it stood.
    """
    code, message, param = _read_error(redact(json.dumps({"error": error}), secret))
    fields = error if isinstance(error, dict) else {}
    names = [str(fields.get(name)) for name in ("code", "type")]
    statuses = [int(name) if name.isdecimal() else _STATUS_OF.get(name, 0) for name in names]
    status = next((status for status in statuses if 400 <= status < 600), None)
    kind = "malformed" if status is None else kind_of_status(status, code, message)
    return ModelError(kind, f"error in {place}: {message}", code=code, param=param)


class _ErrorBody(NamedTuple):
    code: str
    """The code, or else the type; "" for none."""
    message: str
    param: str
    """The field of the request that is meant; "" for none."""


def _read_error(body: str) -> _ErrorBody:
    """What an error body says in either dialect; where it is no such body, its start."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _ErrorBody("", body[:_SHOWN].strip() or "(empty body)", "")
    error = parsed.get("error") if isinstance(parsed, dict) else None
    if not isinstance(error, dict):
        return _ErrorBody("", body[:_SHOWN], "")
    message = error.get("message")
    shown = message if isinstance(message, str) else orjson.dumps(error, default=str).decode()
    code = str(error.get("code") or error.get("type") or "")
    return _ErrorBody(code, shown[:_SHOWN], str(error.get("param") or ""))


def _excerpt(body: bytes) -> str:
    return repr(body[:200].decode(errors="replace")) if body else "an empty body"
