"""How the fake endpoint takes a request and answers it, byte by byte."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from email.utils import formatdate
from enum import Enum, auto
from typing import Any, NamedTuple

import orjson

from tests.fakes.fake_dialects import CHAT, MESSAGES
from tests.fakes.fake_faults import BODIES, BROKEN, FAULTS, RETRY_AFTER, STATUSES
from tests.fakes.fake_responses import RESPONSES
from tests.fakes.fake_script import JSON, Ask, Options, Reply, digest, play
from tests.fakes.fake_tokens import Template, add_tokens, refusal

DIALECTS = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}

_BYTE_EVERY_S = 0.02
"""How slowly a reply drips."""
_HUGE_MIB = 200
_MIB = 2**20


class Refused(Exception):
    """A request that the endpoint does not accept, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Ending(Enum):
    """How an answer ends that does not end well."""

    SILENCE = auto()
    CLOSE = auto()
    RESET = auto()


Step = bytes | float | Ending
"""Bytes to send, seconds to wait, or the end."""


class Answer(NamedTuple):
    """What is done about one request."""

    steps: Iterator[Step]
    reply: Reply | None
    """The reply that is delivered by this, if one is."""


def read_ask(path: str, headers: Mapping[str, str], body: bytes, options: Options) -> Ask:
    """Take a request; raises `Refused` where the API would not."""
    dialect = DIALECTS[path]
    given = headers.get("x-api-key", headers.get("authorization", "").removeprefix("Bearer "))
    if options.key is not None and given != options.key:
        raise Refused(401, "invalid API key")
    try:
        request = orjson.loads(body)
        first, replies = dialect.opening(request)
        key = (digest(f"{first}\0{headers.get('x-task-id', '')}", 8), 1 + replies)
        breach = dialect.breach(request, key[0], options)
        turns = options.turns or (5 if request.get("tools") else 1)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Refused(400, f"malformed request: {type(error).__name__}: {error}") from error
    if breach:
        raise Refused(400, breach)
    named = first.removeprefix("fault:")
    if named != first and named not in FAULTS:
        raise Refused(400, f"unknown fault {named!r}")
    fault = None if named == first else named
    tokens = options.tokens if dialect is CHAT else None
    if why := refusal(request, tokens):
        raise Refused(400, why)
    template = Template(bool(options.strip_reasoning), bool(options.outer_newlines))
    return Ask(
        dialect=dialect,
        request=request,
        key=key,
        chars=len(body),
        has_calls=key[1] < turns,
        fault=fault,
        tokens=tokens,
        template=template,
    )


def respond(ask: Ask, options: Options) -> Answer:
    """Answer a request, or play the fault that was drawn for it."""
    if ask.fault in BROKEN:
        return Answer(_break(ask, options), None)
    if ask.fault == "context" or ask.fault == "quota" or ask.fault in STATUSES:
        return Answer(iter([_refuse(ask)]), None)
    reply = play(ask, options)
    head, body = _packed(ask, _parts(ask, reply))
    return Answer(iter([head + body]), reply)


def _refuse(ask: Ask) -> bytes:
    dialect, fault = ask.dialect, ask.fault or ""
    if fault == "context":
        return frame(400, dialect.error(400, dialect.too_long))
    if fault == "quota":
        return frame(*dialect.quota)
    value = RETRY_AFTER.get(fault)
    more = "" if value is None else f"Retry-After: {value}\r\n"
    if fault == "http429_date":
        more = f"Retry-After: {formatdate(time.time() + 1, usegmt=True)}\r\n"
    elif fault == "http429_ms":
        more = "retry-after-ms: 50\r\nRetry-After: 1\r\n"
    return frame(STATUSES[fault], dialect.error(STATUSES[fault], "as was asked for"), more)


def _break(ask: Ask, options: Options) -> Iterator[Step]:
    """An answer that is not a complete reply."""
    fault = ask.fault or ""
    match fault:
        case "hang":
            yield Ending.SILENCE
        case "disconnect":
            yield Ending.CLOSE
        case "garbage":
            yield b"220 this is no HTTP\r\n\r\n"
            yield Ending.CLOSE
        case "error200":
            yield frame(200, ask.dialect.error(500, "the provider failed"))
        case "huge":
            start = b"data: " if ask.request.get("stream") else b'{"filler": "'
            yield _head(ask, len(start) + _HUGE_MIB * _MIB) + start
            for _ in range(_HUGE_MIB):
                yield b"x" * _MIB
        case _ if fault in BODIES:
            yield frame(200, BODIES[fault], mime="text/html" if fault == "html" else _JSON)
        case _:
            yield from _mangle(ask, _parts(ask, play(ask, options)))


def _mangle(ask: Ask, parts: list[bytes]) -> Iterator[Step]:
    """A reply of which not all arrives."""
    whole = b"".join(parts)
    head, body = _packed(ask, parts)
    half = body[: len(body) // 2]
    match ask.fault:
        case "reset":
            yield head + half
            yield Ending.RESET
        case "eof":
            yield head + half
            yield Ending.CLOSE
        case "stall":
            yield head + half
            yield Ending.SILENCE
        case "silence":
            yield head
            yield Ending.SILENCE
        case "drip":
            yield head
            for byte in body:
                yield bytes([byte])
                yield _BYTE_EVERY_S
        case "mid_utf8":
            cut = whole[: len(whole) // 2] + "é".encode()[:1]
            yield b"".join(_packed(ask, [cut]))
        case "error_event":
            error = ask.dialect.error_event(ask.dialect.error(529, "overloaded"))
            yield b"".join(_packed(ask, [*parts[: len(parts) // 2], error]))
        case "cut" if len(parts) == 1:
            yield b"".join(_packed(ask, [whole[: len(whole) // 2]]))
        case "cut":
            yield b"".join(_packed(ask, parts[: len(parts) // 2]))
        case _:
            yield head + body


def _parts(ask: Ask, reply: Reply) -> list[bytes]:
    """The body of a reply: one part, or the events of a stream."""
    dialect, fault = ask.dialect, ask.fault
    body = dialect.body(reply)
    add_tokens(body, ask.request, ask.tokens, ask.template)
    match fault:
        case "no_choices":
            body |= dialect.hollow
        case "no_usage":
            del body["usage"]
        case "unknown_fields":
            body = _with_unknown_fields(body)
        case "other_reasoning":
            _rename_reasoning(body["choices"][0]["message"])
    if not ask.request.get("stream"):
        parts = [orjson.dumps(body)]
    else:
        parts = dialect.events(body, ask.request)
    if fault == "bad_utf8":
        parts = [parts[0].replace(b'"id":"', b'"id":"\xff', 1), *parts[1:]]
    if fault == "roles":
        parts = [part.replace(b'"delta":{', b'"delta":{"role":"assistant",') for part in parts]
        parts = [part.replace(b'"assistant",}', b'"assistant"}') for part in parts]
    return parts


def _with_unknown_fields(value: Any) -> Any:
    """Every object of a body with an unknown field, except the arguments of calls."""
    if isinstance(value, list):
        return [_with_unknown_fields(item) for item in value]
    if not isinstance(value, dict):
        return value
    known = {k: v if k == "input" else _with_unknown_fields(v) for k, v in value.items()}
    return {**known, "x_unknown": {"deep": [None, 1.5]}}


def _rename_reasoning(message: JSON) -> None:
    if thought := message.pop("reasoning_content", None):
        message["reasoning"] = thought
        message["reasoning_details"] = [{"type": "reasoning.text", "text": thought, "index": 0}]


_JSON = "application/json"


def frame(status: int, body: JSON | bytes, more: str = "", mime: str = _JSON) -> bytes:
    """A whole response."""
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    reason = "OK" if status == 200 else "Refused"
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {mime}\r\n{more}Content-Length: "
    return b"%b%d\r\n\r\n%b" % (head.encode(), len(content), content)


def _packed(ask: Ask, parts: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Head and body of a response that was asked for in one piece or as a stream."""
    if not ask.request.get("stream"):
        return _head(ask, sum(map(len, parts))), b"".join(parts)
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    return head + b"Transfer-Encoding: chunked\r\n\r\n", chunks


def _head(ask: Ask, length: int) -> bytes:
    mime = b"text/event-stream" if ask.request.get("stream") else _JSON.encode()
    form = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return form % (mime, length)
