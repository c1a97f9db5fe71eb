"""Reads the errors by which endpoints refuse requests: with a status, inside a 200, in a stream.

Every API, router and server has its own form. This module reads all of them into codes and a
message, and `agent.models.errors.classify_error` classifies these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

from agent.models.connection import strip_call_path
from agent.models.endpoint_words import load_words, own_words
from agent.models.errors import ModelError, classify_error
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

_MAX_MESSAGE_CHARS = 500
"""Maximum characters of an endpoint's text in an error message."""

_MAX_QUOTED_CHARS = 200
"""Maximum characters of an unreadable reply in an error message."""

_MAX_DEPTH = 6
"""Maximum depth to which errors are searched for inside errors."""

_MESSAGES = (
    "message",
    "msg",
    "error_msg",
    "status_msg",
    "errorMessage",
    "Message",
    "detail",
    "error_description",
    "title",
    "faultstring",
)
"""Fields with the message of an error, the first of which counts.

FastAPI and DashScope have `msg`, Baidu `error_msg`, MiniMax `status_msg`, AWS `Message`, RFC 9457
`title` and `detail`.
"""

_CODES = ("error_code", "code", "type", "error_type", "status", "reason", "Code", "__type")
"""Fields that name the cause of an error, the narrowest first.

TGI has `error_type`, Google `status` and `reason`, AWS `__type`.
"""

_INSIDE = ("error", "errors", "innererror", "details", "detail", "message", "fault", "base_resp")
"""Fields that may hold the error itself; any other field may hold the request."""

_CODE_IN_TEXT = re.compile(r"""['"](?:code|type)['"]: ?['"]([\w.-]+)['"]""")
"""A code in an error that a gateway has written into a message as JSON or as Python."""

_RETRY_DELAY = re.compile(rb'"retryDelay": ?"(\d+(?:\.\d+)?)s"')
"""The pause in Google's `RetryInfo`."""


class ErrorBody(NamedTuple):
    """The content of an error, whatever its form."""

    codes: tuple[str, ...]
    """Codes and types, the narrowest first: of the provider behind a router, of an inner error, and
    then of the error itself."""
    message: str
    """The message for people: the router's, then the provider's own."""
    param: str = ""
    """The field of the request that the error is about; "" for none."""

    @property
    def code(self) -> str:
        """The narrowest code; "" for none."""
        return self.codes[0] if self.codes else ""


def read_refusal(
    status: int, headers: Mapping[str, str], body: bytes, request: bytes = b""
) -> ModelError:
    """Read the error of a reply with an error status; `request` is the body that was refused."""
    if 300 <= status < 400:
        place = strip_call_path(headers.get("location", "another place"))
        message = f"HTTP {status}: it has moved to {place}; give that as the base URL"
        return ModelError("not_found", message)
    error = read_error(body)
    delay = _RETRY_DELAY.search(body)
    wait_s = retry_after_s(headers)
    return ModelError(
        classify_error(status, error.codes, error.message, request),
        f"HTTP {status}: {error.message[:_MAX_MESSAGE_CHARS]}",
        retry_after_s=float(delay[1]) if wait_s is None and delay else wait_s,
        code=error.code,
        param=error.param,
    )


def error_behind_200(reply: Any, place: str, request: bytes = b"") -> ModelError:
    """Read an error in a reply whose status is 200.

    `reply` is the object that holds it (see `find_error`), `place` says where that stood. Routers
    put a provider's error into the body, and streams have sent their status before.
    """
    # The codes in the body replace the status.
    error = _read(reply)
    statuses = load_words().statuses
    codes = [code.lower() for code in error.codes]
    given = [int(code) if code.isdecimal() else statuses.get(code, 0) for code in codes]
    status = next((one for one in given if 400 <= one < 600), None)
    kind = classify_error(status, error.codes, error.message, request)
    message = f"error in {place}: {error.message[:_MAX_MESSAGE_CHARS]}"
    return ModelError(kind, message, code=error.code, param=error.param)


def says_error(reply: Mapping[str, Any]) -> bool:
    """Whether a reply, or a part of one, has an `error` that says something.

    Some servers send an empty error with each reply.
    """
    error = reply.get("error")
    return bool(error) and _has_words(error)


def _has_words(error: Any) -> bool:
    if isinstance(error, dict):
        error = list(error.values())
    if isinstance(error, list):
        return any(map(_has_words, error))
    return bool(error.strip() if isinstance(error, str) else error)


def find_error(reply: Mapping[str, Any]) -> Any:
    """Find the part of a 200 reply, or of a stream, that reports an error; None if none does.

    Only for replies without usable content, as objects that merely look like errors count, too.
    """
    if says_error(reply) or reply.get("errors"):
        return reply
    base = reply.get("base_resp")
    if isinstance(base, dict) and base.get("status_code") not in (None, 0, "0"):
        return {"base_resp": base}
    for choice in objects_among(reply.get("choices")):
        if says_error(choice):
            return choice
    looks_so = "error" in (reply.get("object"), reply.get("type")) or reply.get("success") is False
    if looks_so or not reply.keys().isdisjoint(("detail", "error_code", "error_msg", "fault")):
        return reply
    codes = isinstance(reply.get("code"), str | int) and reply.get("code") not in (0, "0", "200")
    return reply if codes and isinstance(reply.get("message") or reply.get("msg"), str) else None


def read_error(body: bytes) -> ErrorBody:
    """Read the body of an error; a body that is no JSON is the message."""
    text = body.removeprefix(b"\xef\xbb\xbf").decode(errors="replace")
    try:
        parsed = exact_json.loads_part(text)
    except (ValueError, RecursionError):
        return ErrorBody((), text.strip() or "(empty body)")
    return _read(parsed)


def quote(body: bytes) -> str:
    """The beginning of a reply that cannot be read, for a message."""
    return repr(body[:_MAX_QUOTED_CHARS].decode(errors="replace")) if body else "an empty body"


def retry_after_s(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Seconds that the endpoint asks to wait, given as milliseconds, seconds or an HTTP date.

    None if it asks for no pause, or if the value is unusable, such as a date that has passed.
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
    """Read a number of seconds; None for values for which one cannot wait."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def _read(parsed: Any) -> ErrorBody:
    found = _Found()
    found.take(parsed)
    # The outermost message comes first, and messages that inner errors repeat are left out.
    messages: list[str] = []
    for text in found.messages:
        if not any(text in earlier for earlier in messages):
            messages.append(text)
    message = ": ".join(messages) or json.dumps(parsed, default=str, ensure_ascii=False)
    codes = [*reversed(found.codes), *_CODE_IN_TEXT.findall(own_words(message))]
    return ErrorBody(tuple(dict.fromkeys(codes)), message, found.param)


class _Found:
    """The codes and messages found in an error so far, from the outside in."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        """Codes and types, the broadest first."""
        self.messages: list[str] = []
        self.param = ""

    def take(self, value: Any, depth: int = 0, prefix: str = "") -> None:
        """Read an error or a part of one; `prefix` is put before its message."""
        if depth > _MAX_DEPTH:
            return
        if isinstance(value, str):
            self._take_text(value, depth, prefix)
        elif isinstance(value, list):
            for one in value[:_MAX_DEPTH]:
                self.take(one, depth + 1)
        elif isinstance(value, dict):
            self._take_object(value, depth, prefix)

    def _take_text(self, text: str, depth: int, prefix: str) -> None:
        if text.lstrip()[:1] in ("{", "["):
            try:
                self.take(exact_json.loads_part(text), depth + 1, prefix)
            except (ValueError, RecursionError):
                pass  # a text that begins like JSON is a text
            else:
                return
        if text.strip():
            self.messages.append(prefix + text.strip())

    def _take_object(self, error: Mapping[str, Any], depth: int, prefix: str) -> None:
        self.codes += reversed([code for key in _CODES if (code := _read_code(error.get(key)))])
        if not self.param and isinstance(error.get("param"), str):
            self.param = error["param"]
        text = next((error[key] for key in _MESSAGES if isinstance(error.get(key), str)), "")
        if text:
            self._take_text(text, depth, prefix + _location_prefix(error))
        self._take_place(error)
        for key in _INSIDE:
            inner = error.get(key)
            if isinstance(inner, dict | list) or (key == "error" and isinstance(inner, str)):
                self.take(_name_code(key, inner), depth + 1, "" if text else prefix)
        # OpenRouter: the provider's own error, mostly as a text.
        metadata = error.get("metadata")
        if isinstance(metadata, dict) and metadata.get("raw"):
            name = metadata.get("provider_name")
            self.take(metadata["raw"], depth + 1, f"{name}: " if isinstance(name, str) else "")

    def _take_place(self, error: Mapping[str, Any]) -> None:
        # FastAPI names the field of the request as a path that begins with "body".
        path = error.get("loc")
        if not self.param and isinstance(path, list) and len(path) > 1:
            self.param = str(path[1])


def _location_prefix(error: Mapping[str, Any]) -> str:
    path = error.get("loc")
    return ".".join(map(str, path)) + ": " if isinstance(path, list) else ""


def _name_code(key: str, inner: Any) -> Any:
    # MiniMax has small numbers for codes, which mean other things at other providers.
    if key != "base_resp" or not isinstance(inner, dict):
        return inner
    return {**inner, "code": f"base_resp:{inner.get('status_code')}"}


def _read_code(value: Any) -> str:
    return str(value) if isinstance(value, str | int) and not isinstance(value, bool) else ""
