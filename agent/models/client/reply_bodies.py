"""The body of a reply, whole or as a stream, whatever the endpoint was asked for.

Some servers answer in one piece where a stream was asked for, some stream although nothing asked
for it, some give a wrong content type. What came decides how it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import aiohttp
import orjson

from agent.models.client.relayed import OnEvent
from agent.models.dialects.dialect import Assembly, is_usable, paid_in
from agent.models.error_bodies import error_behind_200, find_error, quote
from agent.models.errors import ModelError
from agent.models.keys import Key
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.exact_json import objects_among

# Server-sent events: their data, and their exact bytes.

_LINE_END = rb"(?:\r\n|\r(?!\n|\Z)|\n)"
"""A trailing carriage return may be half of a line end."""
_EVENT_END = re.compile(_LINE_END + _LINE_END)
_COMMENT = b":\n\n"
_LINES = re.compile("(?<=\n)|(?<=\r)(?!\n)")


class ServerEvent(NamedTuple):
    """One event of a stream."""

    raw: bytes
    """Its bytes, with the empty line at its end."""
    data: str | None
    """None for events without data, such as those that keep a connection alive."""


class EventTooLarge(Exception):
    """An event is larger than the maximum."""


class EventSplitter:
    """Splits a stream into its events.

    The bytes of all events are those of the stream. What stricter readers would trip over is
    mended: the empty line after an event is added, and empty data is a comment.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._tail = b""
        """The last bytes, which may be the start of an event's end."""

    def feed(self, part: bytes) -> list[ServerEvent]:
        """The events that end in this part of the stream.

        Raises `EventTooLarge`, and `UnicodeDecodeError` for data that is not UTF-8.
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
        return [event for raw in raws for event in _events_in(raw)]

    def end(self) -> list[ServerEvent]:
        """The last event, if the stream ended without the empty line that ends an event.

        Its bytes have that line, so that other readers take the event too. Raises
        `UnicodeDecodeError` if it is not UTF-8.
        """
        rest = b"".join(self._parts)
        self._parts, self._size, self._tail = [], 0, b""
        return _events_in(rest.rstrip(b"\r\n") + b"\n\n") if rest.strip() else []


def _events_in(raw: bytes) -> list[ServerEvent]:
    """The event in these bytes; several if only single line ends separate them, as some servers
    send them."""
    if raw.startswith(b"data: {") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return [ServerEvent(raw, raw[6:-2].decode())]
    parts: list[tuple[str, str]] = []
    """Lines up to one with data, and the data."""
    begun = ""
    is_empty = False
    for line in _LINES.split(raw.decode()):
        begun += line
        name, _, value = line.rstrip("\r\n").partition(":")
        if name == "data" and value.strip():
            parts.append((begun, value.removeprefix(" ")))
            begun = ""
        else:
            is_empty |= name == "data"
    if len(parts) > 1 and all(_is_whole(data) for _, data in parts):
        return [ServerEvent(lines.rstrip("\r\n").encode() + b"\n\n", data) for lines, data in parts]
    data = "\n".join(data for _, data in parts)
    # Proxies keep connections alive by empty data, and by comments that they wrap into data.
    if data.lstrip().startswith(":") or (is_empty and not data):
        return [ServerEvent(_COMMENT, None)]
    return [ServerEvent(raw, data or None)]


def _is_whole(data: str) -> bool:
    """Whether a line is a JSON object, or an end: the lines of one event are none of these."""
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
"""Seconds for the rest of a stream after its last event; a connection is only reused once it has
ended."""

_COUNTS_S = 3.0
"""Seconds for the counts of tokens once a stream has said why the reply ended. Some servers keep
the connection open after it, and only send what keeps it alive."""

_END_OF_STREAM = "[DONE]"

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_JSON_STARTS = (b"{", b"[")

_CONTENT_FIELDS = frozenset({"choices", "candidates", "type", "usageMetadata"})
"""A part of a stream with one of these is looked at by its dialect; another may be an error."""


async def read_whole(response: aiohttp.ClientResponse) -> bytes:
    """The body of a reply. Raises `ModelError("malformed")` if it is too large."""
    parts = []
    left = MAX_REPLY_BYTES
    while part := await response.content.readany():
        parts.append(part)
        left -= len(part)
        if left < 0:
            raise _too_large()
    return b"".join(parts)


async def read_parts(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The parts of an error's body, up to the maximum; beyond it the body just ends."""
    left = MAX_REPLY_BYTES
    async for part in response.content.iter_any():
        left -= len(part)
        if left < 0:
            return
        yield part


async def read_first(response: aiohttp.ClientResponse) -> bytes:
    """The first bytes of a body that are more than white space, without a byte order mark."""
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
    """Whether a body that begins so is a JSON document, and no stream of events."""
    return first.lstrip()[:1] in _JSON_STARTS


def to_json(body: bytes, assembly: Callable[[], Assembly] | None, api: str) -> bytes:
    """The body of a whole reply as one JSON document, from the forms in which servers send one.

    Those are JSON, events, JSON with events after it, and one object a line, each perhaps after a
    byte order mark. `assembly` makes what puts the parts of a stream of `api` together; None: they
    are left as they are. Raises `ModelError`.
    """
    # As nearly always. A compact or indented reply has no object that begins a line.
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
        return finish_broken(whole, error, api)
    return whole.finish() if has_parts else body


def finish_broken(assembly: Assembly, error: ModelError, api: str) -> bytes:
    """The body of a reply whose stream ended with `error`.

    Raises `error` unless the reply was whole before it, with what the parts say that they cost.
    """
    has_reason = assembly.has_reason
    body = assembly.finish()
    if not (has_reason and is_usable(api, body)):
        error.paid = paid_in(api, body)
        raise error
    log.debug("a stream was broken after the end of its reply: %s", error)
    return body


def _is_document(body: bytes) -> bool:
    """Whether a body is one JSON document; a list is one of parts, as Gemini sends it."""
    try:
        return not isinstance(orjson.loads(body), list)
    except orjson.JSONDecodeError:
        return False


def _parts_in(body: bytes) -> Iterator[dict[str, Any]]:
    """The objects in a body that is no JSON document: one after the other, or in events."""
    text = body.decode(errors="replace").lstrip()
    decoder = json.JSONDecoder()
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
    """The error that a part of a stream reports."""
    if part.get("error"):
        return error_behind_200(part, "the stream", request)
    if _CONTENT_FIELDS.isdisjoint(part) and (error := find_error(part)) is not None:
        return error_behind_200(error, "the stream", request)
    return None


class StreamReader:
    """Reads one stream of events into its assembly."""

    def __init__(
        self,
        response: aiohttp.ClientResponse,
        assembly: Assembly,
        *,
        idle_timeout_s: float,
        key: Key,
        clean: Callable[[bytes, Key], bytes],
        request: bytes,
    ) -> None:
        """`key` is removed from all events, by `clean` from their bytes; `request` is the body that
        was sent, which errors may quote."""
        self._response = response
        self._assembly = assembly
        self._idle_timeout_s = idle_timeout_s
        self._key = key
        self._clean = clean
        self._request = request
        self._has_begun = False
        """A part of the reply has come."""

    async def read(self, first: bytes, on_event: OnEvent | None) -> None:
        """Read the stream, of which `first` has arrived, to the end of the reply.

        Until the first event only the attempt's time counts: who thinks or queues says nothing at
        first. Then no silence may be longer than the idle timeout, until the stream has said why
        the reply ended: from there on the reply is whole, whatever becomes of the connection.
        Raises `ModelError`.
        """
        clock = asyncio.get_running_loop()
        assembly = self._assembly
        silence = asyncio.timeout(None)

        def on_part() -> None:
            # Bytes rather than events: what keeps a connection alive is often no event.
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
            log.debug("a stream was left open after the end of its reply")
            return
        except aiohttp.ClientError as error:
            if not assembly.has_reason:
                raise
            log.debug("a stream was cut after the end of its reply: %s", error)
            return
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(_TAIL_S):
                await self._response.content.readany()

    def _take(self, raw: bytes, data: str | None, on_event: OnEvent | None) -> bool:
        """Add one event to the reply; whether it was the last one."""
        is_end = data is not None and data.startswith(_END_OF_STREAM)
        if data is not None and not is_end:
            data = self._key.out_of_text(data)
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
        """The events of the stream; `on_part` is called at each arrival of bytes.

        Raises `ModelError("malformed")`, and `UnicodeDecodeError`.
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
