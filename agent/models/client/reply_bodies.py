"""Reads the body of a reply, which may come whole or as a stream, whatever was asked for.

Some servers answer a request for a stream in one piece, some stream without being asked, some give
a wrong content type. So the bytes of the body decide how it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
import orjson

from agent.models.client.direct_requests import Response
from agent.models.client.relayed import OnEvent
from agent.models.dialects.dialect import Assembly, is_usable, read_paid
from agent.models.error_bodies import error_behind_200, find_error, quote, says_error
from agent.models.errors import ModelError
from agent.models.keys import Key
from agent.models.parsing import load_object
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

# Server-sent events: their data, and their exact bytes.

_LINE_END = rb"(?:\r\n|\r(?!\n|\Z)|\n)"
"""A line end; a carriage return as the last byte does not count, as it may be half of one."""
_EVENT_END = re.compile(_LINE_END + _LINE_END)
_COMMENT = b":\n\n"
_BARE_ERROR = re.compile(r'\s*\{\s*"error"')
_LINES = re.compile("(?<=\n)|(?<=\r)(?!\n)")


class ServerEvent(NamedTuple):
    """One event of a stream."""

    raw: bytes
    """The bytes of the event, with the empty line at its end."""
    data: str | None
    """The data; None for an event without data, such as one that keeps the connection alive."""


class EventTooLarge(Exception):
    """An event is larger than the maximum."""


class EventSplitter:
    """Splits a stream into its events.

    The events together have the bytes of the stream, with three repairs for stricter readers: a
    missing empty line after an event is added, empty data becomes a comment, and bytes that are
    not UTF-8 become U+FFFD.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        """The last byte, which may begin the end of an event."""

    def feed(self, part: bytes) -> list[ServerEvent]:
        """Take the next part of the stream; returns the events that end in it.

        Raises `EventTooLarge`.
        """
        self._parts.append(part)
        self._size += len(part)
        seen = self._tail + part
        self._tail = seen[-1:]
        # Parts without an end are not joined: a large event may come in many.
        if b"\n\n" not in seen and b"\r" not in seen:
            if self._size > self._max_event_bytes:
                raise EventTooLarge
            return []
        text = b"".join(self._parts)
        if b"\r" in text:
            starts = [0, *(end.end() for end in _EVENT_END.finditer(text))]
            raws = [text[a:b] for a, b in pairwise(starts)]
            rest = text[starts[-1] :]
        else:
            *whole, rest = text.split(b"\n\n")
            raws = [piece + b"\n\n" for piece in whole]
        self._parts, self._size, self._tail = [rest], len(rest), rest[-1:]
        if self._size > self._max_event_bytes:
            raise EventTooLarge
        return [event for raw in raws for event in _split_events(raw)]

    def end(self) -> list[ServerEvent]:
        """End the stream; returns the last event if the empty line after it is missing.

        The line is added, so that other readers take the event, too.
        """
        rest = b"".join(self._parts)
        self._parts, self._size, self._tail = [], 0, b""
        return _split_events(rest.rstrip(b"\r\n") + b"\n\n") if rest.strip() else []


def _split_events(raw: bytes) -> list[ServerEvent]:
    """The event in these bytes; several if a server separates events by single line ends."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        text = raw.decode(errors="replace")
        raw = text.encode()
    if text.startswith("data: {") and text.find("\n") == len(text) - 2 and "\r" not in text:
        return [ServerEvent(raw, text[6:-2])]
    parts: list[tuple[str, str]] = []
    """One entry per line with data: the lines up to it, and the data."""
    begun = ""
    is_empty = is_error = False
    for line in _LINES.split(text):
        begun += line
        name, _, value = line.rstrip("\r\n").partition(":")
        is_error |= name == "event" and value.strip() == "error"
        if name == "data" and value.strip():
            parts.append((begun, value.removeprefix(" ")))
            begun = ""
        elif name == "error" and value.strip():  # llama.cpp
            parts.append((begun, _wrap_error(value)))
            begun = ""
        elif _BARE_ERROR.match(line):  # Ollama
            parts.append((begun, line.strip()))
            begun = ""
        else:
            is_empty |= name == "data"
    if len(parts) > 1 and all(_is_whole_event(data) for _, data in parts):
        return [ServerEvent(lines.rstrip("\r\n").encode() + b"\n\n", data) for lines, data in parts]
    data = "\n".join(data for _, data in parts)
    if is_error and data:
        data = _wrap_error(data)
    # Proxies keep connections alive by empty data, and by comments that they wrap into data.
    if data.lstrip().startswith(":") or (is_empty and not data):
        return [ServerEvent(_COMMENT, None)]
    return [ServerEvent(raw, data or None)]


def _wrap_error(data: str) -> str:
    """The data of an event that is an error, as an object with the key `error`."""
    if '"error"' in data or data.startswith(_END_OF_STREAM):
        return data
    return f'{{"error":{data if _is_whole_event(data.strip()) else json.dumps(data.strip())}}}'


def _is_whole_event(data: str) -> bool:
    """Whether a line of data is an event of its own: a whole JSON object, or the end."""
    if data.startswith("[DONE]"):
        return True
    if not (data.startswith("{") and data.rstrip().endswith("}")):
        return False
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        return False
    return True


log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 64 * 2**20
"""Maximum bytes of one unpacked reply; real ones are a hundred times smaller."""

_MAX_EVENT_BYTES = 8 * 2**20
"""Maximum bytes of one event of a stream."""

_TAIL_S = 0.1
"""Seconds to wait for the end of a stream after its last event, so that the connection can be
reused."""

_COUNTS_S = 3.0
"""Seconds to wait for the token counts after a stream has said why the reply ended.

Some servers then keep the connection open, and send only comments.
"""

_END_OF_STREAM = "[DONE]"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_JSON_STARTS = (b"{", b"[")
_EVENT_START = re.compile(rb"\s*(?:data|event|id|retry|error)?:")

_CONTENT_FIELDS = frozenset({"choices", "candidates", "type", "usageMetadata"})
"""Fields of the parts that the dialects read; a part without any of them may be an error."""


async def read_whole(response: Response) -> bytes:
    """Read the body of a reply. Raises `ModelError("malformed")` if it is too large."""
    content = response.content
    if content.is_eof() and content.total_bytes <= MAX_REPLY_BYTES:
        return content.read_nowait()
    parts = []
    left = MAX_REPLY_BYTES
    while part := await content.readany():
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise _too_large()
    return b"".join(parts)


async def read_document(response: Response, parts: list[bytes], api: str) -> bytes:
    """Read the body of a reply of `api`, of which `parts` have arrived; adds the later ones to it.

    Some servers leave the connection open. So a reply in one JSON document also ends when nothing
    follows it for `_COUNTS_S` seconds. Raises `ModelError("malformed")` if the body is too large.
    """
    content = response.content
    left = MAX_REPLY_BYTES - sum(map(len, parts))
    part: bytes | None = parts[-1]
    while part:
        may_end = part.rstrip()[-1:] == b"}" and not content.is_eof()
        part = await _read_part(response, _COUNTS_S if may_end else None)
        if part is None and not is_usable(api, b"".join(parts)):
            part = await content.readany()
        if part:
            parts.append(part)
            left -= len(part)
            if left < 0:
                raise _too_large()
    return b"".join(parts)


async def read_error_body(response: Response) -> bytes:
    """Read the body of an error, up to the maximum size, a break or a silence; ignore the rest."""
    parts: list[bytes] = []
    left = MAX_REPLY_BYTES
    with contextlib.suppress(aiohttp.ClientError):
        while part := await _read_part(response, _COUNTS_S if parts else None):
            left -= len(part)
            if left < 0:
                break
            parts.append(part)
    return b"".join(parts)


async def _read_part(response: Response, wait_s: float | None) -> bytes | None:
    """Read the next part of a body; b"" at its end, None if none comes in `wait_s` seconds."""
    if wait_s is None:
        return await response.content.readany()
    try:
        async with asyncio.timeout(wait_s):
            return await response.content.readany()
    except TimeoutError:
        return None


async def read_first(response: Response) -> bytes:
    """Read the first bytes of a body until they are more than white space, without a BOM."""
    first = b""
    while part := await response.content.readany():
        first += part
        if _BYTE_ORDER_MARK.startswith(first):
            continue
        first = first.removeprefix(_BYTE_ORDER_MARK)
        if first.strip() or len(first) > MAX_REPLY_BYTES:
            break
    return first


def begins_as_json(first: bytes) -> bool:
    """Whether a body with these first bytes is a JSON document, and no stream of events."""
    return first.lstrip()[:1] in _JSON_STARTS


def begins_as_events(first: bytes) -> bool:
    """Whether a body with these first bytes is a stream of events, whatever its type says."""
    return _EVENT_START.match(first) is not None


def is_object(body: bytes) -> bool:
    """Whether a body is one whole JSON object."""
    try:
        load_object(body)
    except ModelError:
        return False
    return True


def convert_to_json(body: bytes, assembly: Callable[[], Assembly] | None, api: str) -> bytes:
    """Convert the body of a whole reply into one JSON document.

    Servers send JSON, events, JSON with events after it, or one object a line, each perhaps after a
    byte order mark. `assembly` makes the assembly of a stream of `api`; None: a stream is left as
    it is. Raises `ModelError`.
    """
    # Nearly always: one document. A compact or indented document has no object that begins a line.
    end = body[-1:] if body[-1:] == b"}" else body.rstrip()[-1:]
    if body[:1] == b"{" and end == b"}" and b"}\n{" not in body:
        return body
    body = body.removeprefix(_BYTE_ORDER_MARK)
    if assembly is None or _is_document(body):
        return body
    whole = assembly()
    has_parts = False
    try:
        for part in _parts_in(body):
            if (reported := _error_in(part)) is not None:
                reported.had_begun = has_parts or reported.kind == "overloaded"
                raise reported
            whole.add(part)
            has_parts = True
    except (ValueError, RecursionError, ModelError) as error:
        if not isinstance(error, ModelError):
            error = ModelError(
                "malformed", f"in the stream: {type(error).__name__}: {error}: {quote(body)}"
            )
        return finish_broken_stream(whole, error, api)
    return whole.finish() if has_parts else body


def finish_broken_stream(assembly: Assembly, error: ModelError, api: str) -> bytes:
    """The body of a reply whose stream ended with `error`, if the reply was whole before it.

    Otherwise raises `error`, with the cost that the parts report.
    """
    has_reason = assembly.has_reason
    body = assembly.finish()
    if not (has_reason and is_usable(api, body)):
        error.paid = read_paid(api, body)
        raise error
    log.debug("A stream was broken after the end of its reply, which is complete: %s", error)
    return body


def _is_document(body: bytes) -> bool:
    """Whether a body is one JSON document; a list is not, as Gemini sends the parts of a stream."""
    try:
        return not isinstance(orjson.loads(body), list)
    except orjson.JSONDecodeError:
        return False


def _parts_in(body: bytes) -> Iterator[dict[str, Any]]:
    """The objects in a body that is not one JSON document: bare objects, lists, or events."""
    text = body.decode(errors="replace").lstrip()
    decoder = json.JSONDecoder(strict=False)  # which takes control characters in a text
    while text[:1] in ("{", "["):
        try:
            value, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            return
        yield from objects_among(value if isinstance(value, list) else [value])
        text = text[end:].lstrip()
    splitter = EventSplitter(_MAX_EVENT_BYTES)
    with contextlib.suppress(EventTooLarge):
        for event in splitter.feed(text.encode(errors="replace") + b"\n\n"):
            if event.data is None or event.data.startswith(_END_OF_STREAM):
                continue
            part = exact_json.loads_part(event.data)
            if isinstance(part, dict):
                yield part


def _error_in(part: dict[str, Any], request: bytes = b"") -> ModelError | None:
    """The error that a part of a stream reports; None if it reports none."""
    if says_error(part):
        return error_behind_200(part, "the stream", request)
    if _CONTENT_FIELDS.isdisjoint(part) and (error := find_error(part)) is not None:
        return error_behind_200(error, "the stream", request)
    return None


class StreamReader:
    """Reads one stream of events into its assembly."""

    def __init__(
        self,
        response: Response,
        assembly: Assembly,
        *,
        idle_timeout_s: float,
        key: Key,
        clean: Callable[[bytes, Key], bytes],
        request: bytes,
    ) -> None:
        """Read nothing yet.

        `key` is removed from all events, by `clean` from their bytes. `request` is the body that
        was sent, which errors may quote.
        """
        self._response = response
        self._assembly = assembly
        self._idle_timeout_s = idle_timeout_s
        self._key = key
        self._clean = clean
        self._request = request
        self._has_begun = False
        """A part of the reply has arrived."""

    async def read_reply(self, first: bytes, on_event: OnEvent | None, api: str) -> bytes:
        """Read the stream of `api`, of which `first` has arrived; returns the body of the reply.

        Raises `ModelError` as `read` does, unless the reply was whole before the failure.
        """
        try:
            await self.read(first, on_event)
        except ModelError as error:
            return finish_broken_stream(self._assembly, error, api)
        return self._assembly.finish()

    async def read(self, first: bytes, on_event: OnEvent | None) -> None:
        """Read the stream, of which `first` has arrived, to the end of the reply.

        The idle timeout starts with the first bytes, because a model may queue or think long before
        them; until then only the attempt's timeout applies. Once the stream has said why the reply
        ended, the reply is whole, even if the connection fails. Raises `ModelError`.
        """
        clock = asyncio.get_running_loop()
        assembly = self._assembly
        silence = asyncio.timeout(None)

        def on_part() -> None:
            # Called for bytes, not for events: comments that keep a connection alive count, too.
            if not assembly.has_reason:
                silence.reschedule(clock.time() + self._idle_timeout_s)

        is_ending = False
        try:
            async with silence, contextlib.aclosing(self._events(first, on_part)) as events:
                async for raw, data in events:
                    is_over = self._take(raw, data, on_event)
                    if is_over:
                        break
                    if assembly.has_reason != is_ending:
                        is_ending = assembly.has_reason
                        wait_s = _COUNTS_S if is_ending else self._idle_timeout_s
                        silence.reschedule(clock.time() + wait_s)
        except (ValueError, RecursionError) as error:
            raise ModelError(
                "malformed", f"in the stream: {type(error).__name__}: {error}"
            ) from error
        except TimeoutError as error:
            if not silence.expired():
                raise
            if not assembly.has_reason:
                raise ModelError(
                    "timeout", f"the stream was silent for {self._idle_timeout_s:g} s"
                ) from error
            log.debug("A stream was left open after the end of its reply, which is complete.")
            return
        except aiohttp.ClientError as error:
            if not assembly.has_reason:
                raise
            log.debug("A stream was cut after the end of its reply, which is complete: %s", error)
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_TAIL_S):
                await self._response.content.readany()

    def _take(self, raw: bytes, data: str | None, on_event: OnEvent | None) -> bool:
        """Add one event to the reply; returns whether it was the last one."""
        is_end = data is not None and data.startswith(_END_OF_STREAM)
        if data is not None and not is_end:
            data = self._key.remove_from_text(data)
            part = exact_json.loads_part(data)
            if isinstance(part, dict):
                if (error := _error_in(part, self._request)) is not None:
                    error.had_begun = self._has_begun or error.kind == "overloaded"
                    raise error
                self._assembly.add(part)
                self._has_begun = True
        if on_event is not None:
            on_event(self._clean(raw, self._key), data)
        return is_end or self._assembly.is_over

    async def _events(
        self, first: bytes, on_part: Callable[[], None]
    ) -> AsyncGenerator[ServerEvent, None]:
        """Read the events of the stream; `on_part` is called whenever bytes arrive.

        Raises `ModelError("malformed")`.
        """
        splitter = EventSplitter(_MAX_EVENT_BYTES)
        left = MAX_REPLY_BYTES
        part = first
        try:
            while part:
                left -= len(part)
                if left < 0:
                    raise _too_large()
                on_part()
                for event in splitter.feed(part):
                    yield event
                part = await self._response.content.readany()
        except EventTooLarge as error:
            raise ModelError(
                "malformed", f"an event of more than {_MAX_EVENT_BYTES // 2**20} MiB in the stream"
            ) from error
        for event in splitter.end():
            yield event


def _too_large() -> ModelError:
    return ModelError("malformed", f"the reply is larger than {MAX_REPLY_BYTES // 2**20} MiB")
