"""Replies in another form than was asked for, streams that are left open, and words that are new.

A server sends the very bytes that a test says, to every dialect that has the form.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.client import reply_bodies
from agent.models.client.endpoint import EndpointModel, open_model
from agent.models.client.retrying import RetryingModel
from agent.models.dialects.dialect import DIALECTS
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request, ignore_event
from tests.agent.models.by_dialect import SAMPLES
from tests.helpers.running import PATIENCE_S

JSON = dict[str, Any]
EACH = pytest.mark.parametrize("api", DIALECTS)
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
MARK = b"\xef\xbb\xbf"
HOLD = "hold"
RESET = "reset"
PAUSE = "pause"
Piece = bytes | str
Play = Callable[[JSON, int], Sequence[Piece]]
"""From the body and the number of a request to the pieces of the answer: bytes, `HOLD` to keep the
connection open without an end, `RESET` to break it off, `PAUSE` to send nothing for a moment."""


def head(status: int = 200, kind: str = "application/json", **more: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def dump(body: Any) -> bytes:
    return json.dumps(body).encode()


def sse(parts: Sequence[Any], end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + dump(part) + end for part in parts)


def whole_reply(api: str, text: str = "Hello.") -> JSON:
    """A whole reply with a text and no call."""
    return {
        "openai_chat": {
            "id": "r",
            "choices": [
                {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            ],
        },
        "openai_responses": {
            "object": "response",
            "status": "completed",
            "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}],
        },
        "anthropic_messages": {
            "type": "message",
            "content": [{"type": "text", "text": text}],
            "stop_reason": "end_turn",
        },
    }[api]


def parts_of(api: str) -> list[JSON]:
    """The same reply in parts, up to the one that says why it ended."""
    return SAMPLES[api].events(["Hel", "lo."])


@asynccontextmanager
async def run_server(play: Play) -> AsyncIterator[tuple[str, list[JSON]]]:
    """The root of a server that answers each request as `play` says, and the bodies it was sent."""
    asked: list[JSON] = []
    serving: set[asyncio.Task[None]] = set()

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.create_task(answer(reader, writer)))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await send(reader, writer)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in request.split(b"\r\n")[1:-2])
        body = json.loads(await reader.readexactly(int(fields[b"content-length"])))
        asked.append(body)
        for piece in play(body, len(asked)):
            if piece == HOLD:
                await reader.read()  # until the client goes
            elif piece == RESET:
                writer.transport.abort()
            elif piece == PAUSE:
                await asyncio.sleep(0.1)
            elif isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked
        finally:
            await asyncio.gather(*serving)


def settings_of(api: str, root: str, **given: Any) -> ModelSettings:
    base_url = root if api == "anthropic_messages" else root + "/v1"
    given = {"attempt_timeout_s": PATIENCE_S, "idle_timeout_s": PATIENCE_S, **given}
    return ModelSettings(name="m", api=api, base_url=base_url, key_env=None, **given)


def ask(api: str, play: Play, *, streamed: bool, **given: Any) -> tuple[Completion, list[JSON]]:
    """The reply to one call, and the bodies of its requests. Raises `ModelError`."""

    async def run() -> tuple[Completion, list[JSON]]:
        async with run_server(play) as (root, asked):
            model = EndpointModel(settings_of(api, root, **given), "sk-test")
            said = [Message(role="user", content="Hi.")]
            on_delta = ignore_event if streamed else None
            try:
                return await model.complete(Request(said, on_delta=on_delta)), asked
            finally:
                await model.close()

    return asyncio.run(run())


FORMS: dict[str, Callable[[str], list[Piece]]] = {
    "events": lambda api: [head(kind="text/event-stream"), sse(parts_of(api))],
    "events that end": lambda api: [
        head(kind="text/event-stream"),
        sse(parts_of(api)),
        b"data: [DONE]\n\n",
    ],
    "events of another type": lambda api: [head(kind="text/plain"), sse(parts_of(api))],
    "events called JSON": lambda api: [head(), sse(parts_of(api))],
    "events with carriage returns": lambda api: [
        head(kind="text/event-stream"),
        sse(parts_of(api), end=b"\r\n\r\n"),
    ],
    "a mark, then events": lambda api: [
        head(kind="text/event-stream"),
        MARK,
        sse(parts_of(api)),
    ],
    "JSON": lambda api: [head(), dump(whole_reply(api))],
    "indented JSON": lambda api: [head(), json.dumps(whole_reply(api), indent=2).encode() + b"\n"],
    "a mark, then JSON": lambda api: [head(), MARK[:1], MARK[1:] + dump(whole_reply(api))],
    "JSON called events": lambda api: [head(kind="text/event-stream"), dump(whole_reply(api))],
    "JSON called text": lambda api: [head(kind="text/plain"), b"\n\n", dump(whole_reply(api))],
    "JSON, then an end": lambda api: [
        head(kind="text/event-stream"),
        dump(whole_reply(api)),
        b"\ndata: [DONE]\n\n",
    ],
    "an event that is all": lambda api: [
        head(kind="text/event-stream"),
        sse([whole_reply(api)]),
        b"data: [DONE]\n\n",
    ],
    "events without the last empty line": lambda api: [
        head(kind="text/event-stream"),
        sse(parts_of(api)).rstrip(b"\n"),
    ],
    "events that single line ends separate": lambda api: [
        head(kind="text/event-stream"),
        sse(parts_of(api), end=b"\n"),
        b"data: [DONE]\n",
    ],
    "events, then an error page": lambda api: [
        head(kind="text/event-stream"),
        sse(parts_of(api)),
        b"data: <html>\n\n",
    ],
    "events, then an error": lambda api: [
        head(kind="text/event-stream"),
        sse([*parts_of(api), {"error": {"message": "no counts"}}]),
    ],
    "events and what keeps alive": lambda api: [
        head(kind="text/event-stream"),
        *(
            piece
            for part in parts_of(api)
            for piece in (sse([part]), b"data:\n\ndata: : PROCESSING\n\n")
        ),
    ],
    "a part a line": lambda api: [
        head(kind="application/x-ndjson"),
        b"\n".join(map(dump, parts_of(api))),
    ],
    "a list of parts": lambda api: [head(), dump(parts_of(api))],
}


@EACH
@STREAMED
@pytest.mark.parametrize("form", FORMS)
def test_what_is_whole_is_read_in_any_form(api: str, streamed: bool, form: str) -> None:
    reply, asked = ask(api, lambda body, n: FORMS[form](api), streamed=streamed)
    assert reply.message["content"] == "Hello."
    assert [body["stream"] for body in asked] == [streamed]


@EACH
@STREAMED
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_cut_or_a_senseless_body_is_malformed(api: str, streamed: bool, kind: str) -> None:
    for body in (b'{"choices": [', b'data: {"a": ', b"hello", b"", sse(parts_of(api)[:1])):
        pieces = [head(kind=kind), body]
        with pytest.raises(ModelError) as caught:
            ask(api, lambda _, n, pieces=pieces: pieces, streamed=streamed)  # type: ignore[misc]
        assert caught.value.kind == "malformed"


@EACH
@STREAMED
def test_an_error_is_one_in_any_form(api: str, streamed: bool) -> None:
    error = {"error": {"message": "Insufficient balance", "code": "1113"}}
    base = {"base_resp": {"status_code": 1008, "status_msg": "insufficient balance"}}
    for kind in ("application/json", "text/event-stream"):
        for body in (dump(error), sse([error]), dump(base), sse([base])):
            pieces = [head(kind=kind), body]
            with pytest.raises(ModelError, match="nsufficient balance") as caught:
                ask(api, lambda _, n, pieces=pieces: pieces, streamed=streamed)  # type: ignore[misc]
            assert caught.value.kind == "no_credit"


ENDINGS: dict[str, list[Piece]] = {
    "silence": [HOLD],
    "pings": [*[b": ping\n\n"] * 50, HOLD],
    "empty events": [*[b'event: ping\ndata: {"type": "ping"}\n\n'] * 50, HOLD],
    "a broken connection": [RESET],
}


@EACH
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_stream_ends_with_its_reply(
    api: str, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the connection stays: the reply is whole, and paid."""
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    pieces = [head(kind="text/event-stream"), sse(parts_of(api)), *ENDINGS[ending]]
    reply, asked = ask(api, lambda body, n: pieces, streamed=True)
    assert reply.message["content"] == "Hello."
    assert len(asked) == 1


def test_counts_that_follow_the_reason_are_waited_for() -> None:
    usage = {"id": "r", "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}
    pieces = [head(kind="text/event-stream"), sse(parts_of("openai_chat")), sse([usage])]
    reply, _ = ask("openai_chat", lambda body, n: pieces, streamed=True)
    assert reply.usage is not None
    assert reply.usage["output_tokens"] == 3


def test_text_after_a_reason_is_part_of_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers give a reason in every part."""
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    parts = [
        {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
        for text in ("Hel", "lo", ".")
    ]
    pieces = [head(kind="text/event-stream"), *(sse([part]) for part in parts)]
    reply, _ = ask("openai_chat", lambda body, n: pieces, streamed=True)
    assert reply.message["content"] == "Hello."


@EACH
@STREAMED
def test_long_lines_in_the_head_of_a_reply_are_read(api: str, streamed: bool) -> None:
    pieces = [head(X_Policy="p" * 60_000), dump(whole_reply(api))]
    assert ask(api, lambda body, n: pieces, streamed=streamed)[0].message["content"] == "Hello."


def counted(api: str) -> JSON:
    """A whole reply with token counts."""
    return {**whole_reply(api), "usage": SAMPLES[api].usage}


def raw_head(kind: str = "application/json", **fields: str) -> bytes:
    """The head of a reply whose connection may stay open."""
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join(["HTTP/1.1 200 OK", f"Content-Type: {kind}", *lines]).encode() + b"\r\n\r\n"


def chunks(*pieces: bytes) -> list[Piece]:
    """The chunks of a body, without the one that ends it."""
    return [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]


def too_long(body: bytes, kind: str = "application/json") -> bytes:
    """A head that promises one byte more than the body has."""
    return raw_head(kind, Content_Length=str(len(body) + 1))


FRAMINGS: dict[str, Callable[[bytes], list[Piece]]] = {
    "a length that is too large": lambda body: [too_long(body), body],
    "a length that is too large, then a break": lambda body: [too_long(body), body, RESET],
    "chunks without an end": lambda body: [
        raw_head(Transfer_Encoding="chunked"),
        *chunks(body[:9], body[9:]),
    ],
    "a length that is too large, and silence": lambda body: [too_long(body), body, HOLD],
    "chunks, and silence": lambda body: [
        raw_head(Transfer_Encoding="chunked"),
        *chunks(body[:9], body[9:], b"\n"),
        HOLD,
    ],
    "an open connection": lambda body: [raw_head(), body, HOLD],
}


@EACH
@STREAMED
@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_whole_document_is_a_reply_whatever_its_framing(
    api: str, streamed: bool, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole reply was paid for, so it is not asked for again."""
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    pieces = FRAMINGS[framing](dump(counted(api)))
    reply, asked = ask(api, lambda body, n: pieces, streamed=streamed)
    assert reply.message["content"] == "Hello."
    assert reply.usage is not None
    assert len(asked) == 1


@EACH
@STREAMED
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"], ids=["no end", "an end"])
def test_an_open_connection_does_not_hide_a_stream_that_nobody_asked_for(
    api: str, streamed: bool, kind: str, end: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    pieces: list[Piece] = [raw_head(kind), sse(parts_of(api)) + end, HOLD]
    reply, asked = ask(api, lambda body, n: pieces, streamed=streamed)
    assert reply.message["content"] == "Hello."
    assert len(asked) == 1


@EACH
@STREAMED
@pytest.mark.parametrize("framing", ["chunks without an end", "chunks, and silence"])
def test_a_document_that_is_no_reply_tells_its_cost_whatever_its_framing(
    api: str, streamed: bool, framing: str
) -> None:
    body = {"usage": SAMPLES[api].usage}
    pieces = FRAMINGS[framing](dump(body))
    with pytest.raises(ModelError) as raised:
        ask(api, lambda body, n: pieces, streamed=streamed, attempt_timeout_s=0.3)
    assert raised.value.paid is not None
    assert raised.value.paid.usage is not None
    assert raised.value.paid.usage["output_tokens"] == 3


@EACH
@pytest.mark.parametrize("framing", ["a length that is too large", "chunks without an end"])
def test_half_a_document_is_a_broken_connection(api: str, framing: str) -> None:
    pieces = FRAMINGS[framing](dump(counted(api))[:-9])
    with pytest.raises(ModelError) as raised:
        ask(api, lambda body, n: pieces, streamed=False)
    assert raised.value.kind == "connection"


def test_a_document_after_a_pause_belongs_to_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that send one object a line may pause after the first one."""
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.01)
    first, *rest = (dump(part) + b"\n" for part in parts_of("openai_chat"))
    pieces: list[Piece] = [head(kind="application/x-ndjson"), first, PAUSE, *rest]
    reply, _ = ask("openai_chat", lambda body, n: pieces, streamed=False)
    assert reply.message["content"] == "Hello."


MISFRAMED = {
    "two lengths": raw_head().replace(
        b"\r\n\r\n", b"\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n"
    ),
    "a length and chunks": raw_head(Content_Length="2", Transfer_Encoding="chunked"),
}


@STREAMED
@pytest.mark.parametrize("form", MISFRAMED)
def test_a_reply_that_cannot_be_framed_is_said_to_be_so(form: str, streamed: bool) -> None:
    pieces = [MISFRAMED[form], dump(whole_reply("openai_chat"))]
    with pytest.raises(ModelError, match=r"framing of the reply is wrong.*proxy") as raised:
        ask("openai_chat", lambda body, n: pieces, streamed=streamed)
    assert raised.value.kind == "connection"
    assert "ClientResponseError" not in str(raised.value)


@EACH
@STREAMED
@pytest.mark.parametrize("framing", FRAMINGS)
def test_a_refusal_is_read_whatever_its_framing(
    api: str, streamed: bool, framing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    error = {"error": {"message": "prompt is too long"}}
    first, *rest = FRAMINGS[framing](dump(error))
    assert isinstance(first, bytes)
    pieces = [first.replace(b"200 OK", b"413 Large"), *rest]
    with pytest.raises(ModelError, match="prompt is too long") as raised:
        ask(api, lambda body, n: pieces, streamed=streamed)
    assert raised.value.kind == "context_exceeded"


SPOILT: dict[str, tuple[bytes, str]] = {
    "a byte that is no text": (b"Hel\xfflo.", "Hel\ufffdlo."),
    "a tab": (b"Hel\tlo.", "Hel\tlo."),
    "a line end": (b"Hel\nlo.", "Hel\nlo."),
    "a null": (b"Hel\x00lo.", "Hel\x00lo."),
}


@EACH
@STREAMED
@pytest.mark.parametrize("spoilt", SPOILT)
def test_text_that_json_cannot_hold_is_repaired(api: str, streamed: bool, spoilt: str) -> None:
    """To refuse the reply would mean to pay twice."""
    sent, due = SPOILT[spoilt]
    body = dump(counted(api)).replace(b"Hello.", sent)
    for given in (body, MARK + body, b"\n" + body + b"\n"):
        pieces: list[Piece] = [head(), given]
        reply, _ = ask(api, lambda _, n, pieces=pieces: pieces, streamed=streamed)  # type: ignore[misc]
        assert reply.message["content"] == due


@EACH
@STREAMED
@pytest.mark.parametrize("spoilt", [name for name in SPOILT if name != "a line end"])
def test_text_that_json_cannot_hold_is_repaired_in_streams(
    api: str, streamed: bool, spoilt: str
) -> None:
    sent, due = SPOILT[spoilt]
    body = sse(SAMPLES[api].events(["Hello."])).replace(b"Hello.", sent)
    pieces: list[Piece] = [head(kind="text/event-stream"), body]
    reply, _ = ask(api, lambda _, n: pieces, streamed=streamed)
    assert reply.message["content"] == due


@STREAMED
def test_the_texts_of_a_reply_are_joined_as_they_are(streamed: bool) -> None:
    """Mistral puts references between the parts of a sentence, also in streams."""
    content = [
        {"type": "text", "text": "The result is 1"},
        {"type": "reference", "reference_ids": [0]},
        {"type": "text", "text": "2,345 dollars."},
    ]
    body = whole_reply("openai_chat")
    body["choices"][0]["message"]["content"] = content
    parts = [{"choices": [{"delta": {"content": [part]}}]} for part in content]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}]}
    events: list[Piece] = [head(kind="text/event-stream"), sse([*parts, end])]
    pieces = events if streamed else [head(), dump(body)]
    reply, _ = ask("openai_chat", lambda body, n: pieces, streamed=streamed)
    assert reply.message["content"] == "The result is 12,345 dollars."
    assert reply.message["provider_blocks"]["blocks"][0]["content"] == content


REFUSALS = [
    {
        "message": {
            "detail": [
                {
                    "type": "extra_forbidden",
                    "loc": ["body", "stream_options", "include_usage"],
                    "msg": "Extra inputs are not permitted",
                }
            ]
        },
        "type": "invalid_request_error",
    },
    {
        "error": {
            "message": "Unrecognized request argument supplied: stream_options",
            "type": "invalid_request_error",
        }
    },
    {
        "error": {
            "message": "Unsupported parameter: 'stream_options'",
            "param": "stream_options",
            "code": "unsupported_parameter",
        }
    },
]


@pytest.mark.parametrize("error", REFUSALS)
def test_a_server_that_refuses_stream_options_gets_none(
    error: JSON, caplog: pytest.LogCaptureFixture
) -> None:
    def play(body: JSON, n: int) -> list[Piece]:
        if "stream_options" in body:
            return [head(422), dump(error)]
        return [head(kind="text/event-stream"), sse(parts_of("openai_chat"))]

    with caplog.at_level(logging.WARNING):
        reply, asked = ask("openai_chat", play, streamed=True)
    assert reply.message["content"] == "Hello."
    assert ["stream_options" in body for body in asked] == [True, False]
    assert "refuses stream_options" in caplog.text


def set_ending(api: str, word: str | None) -> JSON:
    """A whole reply that ended for this reason."""
    body = whole_reply(api)
    match api:
        case "openai_chat":
            body["choices"][0]["finish_reason"] = word
        case "anthropic_messages":
            body["stop_reason"] = word
        case _:
            body |= {"status": "incomplete", "incomplete_details": {"reason": word}}
    return body


def test_an_ending_of_null_stays_doubtful_where_other_replies_have_one() -> None:
    """A proxy writes it for a reply that it has cut."""
    endings = ["stop", None, None, None, None]

    async def run() -> None:
        def answer(body: JSON, n: int) -> list[bytes]:
            return [head(), dump(set_ending("openai_chat", endings[n - 1]))]

        async with run_server(answer) as (root, asked):
            model: RetryingModel = open_model(
                settings_of("openai_chat", root), api_key="sk-test", on_retry=lambda retry: None
            )
            try:
                for count in (1, 3, 5):
                    await model.complete(Request([Message(role="user", content="Hi.")]))
                    assert len(asked) == count
            finally:
                await model.close()

    asyncio.run(run())


@STREAMED
@pytest.mark.parametrize("api", ["openai_chat", "anthropic_messages"])
def test_an_ending_of_null_is_an_unknown_one(api: str, streamed: bool) -> None:
    """Some servers give no reason in any of their whole replies; a cut stream has none either."""

    async def run() -> None:
        whole = [head(), dump(set_ending(api, None))]
        async with run_server(lambda body, n: whole) as (root, asked):
            model: RetryingModel = open_model(
                settings_of(api, root, stream_replies=streamed),
                api_key="sk-test",
                on_retry=lambda retry: None,
            )
            try:
                said = Request([Message(role="user", content="Hi.")])
                for count in (2, 3):
                    reply = await model.complete(said)
                    assert (reply.unknown_ending, reply.finish_reason) == ("null", "stop")
                    assert reply.message["content"] == "Hello."
                    assert len(asked) == count
            finally:
                await model.close()

    asyncio.run(run())
    cut = [head(kind="text/event-stream"), sse(parts_of(api)[:-1])]
    with pytest.raises(ModelError, match=r"has no (finish|stop)_reason"):
        ask(api, lambda body, n: cut, streamed=streamed)
    empty = set_ending(api, None)
    text: JSON = empty["choices"][0]["message"] if api == "openai_chat" else empty
    text["content"] = [] if api == "anthropic_messages" else ""
    with pytest.raises(ModelError, match="reason is 'null'"):
        ask(api, lambda body, n: [head(), dump(empty)], streamed=streamed)


@EACH
@STREAMED
def test_an_unknown_ending_is_asked_for_again_once(api: str, streamed: bool) -> None:
    """And then no more, by this and later calls: nothing is paid eight times for a word."""

    async def run() -> None:
        async with run_server(lambda body, n: [head(), dump(set_ending(api, "weary"))]) as (
            root,
            asked,
        ):
            retries: list[str] = []
            model: RetryingModel = open_model(
                settings_of(api, root, stream_replies=streamed),
                api_key="sk-test",
                on_retry=lambda retry: retries.append(retry.message),
            )
            try:
                said = Request([Message(role="user", content="Hi.")])
                for count in (2, 3, 4):
                    reply = await model.complete(said)
                    assert reply.unknown_ending == "weary"
                    assert reply.message["content"] == "Hello."
                    assert len(asked) == count
            finally:
                await model.close()
            (retry,) = retries
            assert "'weary'" in retry

    asyncio.run(run())


@STREAMED
@pytest.mark.parametrize(
    ("api", "word"), [("openai_chat", "tool_calls"), ("anthropic_messages", "tool_use")]
)
def test_a_reply_whose_calls_were_lost_is_asked_for_again(
    api: str, word: str, streamed: bool
) -> None:
    """It says that it ended in calls, and has a text alone: the server's parser has lost them."""

    async def run() -> None:
        words = [word, {"openai_chat": "stop", "anthropic_messages": "end_turn"}[api], word, word]
        async with run_server(
            lambda body, n: [head(), dump(set_ending(api, words[n - 1]))],
        ) as (root, asked):
            retries: list[str] = []
            model: RetryingModel = open_model(
                settings_of(api, root, stream_replies=streamed),
                api_key="sk-test",
                on_retry=lambda retry: retries.append(retry.message),
            )
            try:
                said = Request([Message(role="user", content="Hi.")])
                first = await model.complete(said)
                assert (first.unknown_ending, len(asked)) == (None, 2)
                # A server that ends all replies so is believed.
                second = await model.complete(said)
                assert (second.unknown_ending, second.finish_reason, len(asked)) == (
                    word,
                    "stop",
                    4,
                )
            finally:
                await model.close()
            assert all("holds no tool call" in retry for retry in retries)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("api", "begun"),
    [
        (
            "openai_chat",
            {
                "choices": [{"delta": {"content": "a"}}],
                "usage": {"prompt_tokens": 100, "completion_tokens": 7},
            },
        ),
        (
            "anthropic_messages",
            {
                "type": "message_start",
                "message": {"content": [], "usage": {"input_tokens": 100, "output_tokens": 7}},
            },
        ),
    ],
)
@pytest.mark.parametrize("end", ["error", "cut", "silence", "no JSON"])
def test_a_broken_stream_says_what_its_parts_cost(api: str, begun: JSON, end: str) -> None:
    """However a stream breaks, the counts that came are those of a reply that was paid for."""
    size = b"%x\r\n"
    part = sse([begun])
    chunked = head(kind="text/event-stream", transfer_encoding="chunked")
    pieces: dict[str, list[Piece]] = {
        "error": [
            head(kind="text/event-stream"),
            part,
            sse([{"error": {"message": "busy", "code": 503}}]),
        ],
        "cut": [chunked, size % len(part) + part + b"\r\n", size % 9, RESET],
        "silence": [head(kind="text/event-stream"), part, HOLD],
        "no JSON": [head(kind="text/event-stream"), part, b"data: Internal error\n\n"],
    }
    with pytest.raises(ModelError) as raised:
        ask(api, lambda body, number: pieces[end], streamed=True, idle_timeout_s=0.3)
    assert raised.value.paid is not None
    assert raised.value.paid.usage is not None
    assert raised.value.paid.usage["input_tokens"] == 100
    assert raised.value.paid.usage["output_tokens"] == 7


@EACH
@STREAMED
@pytest.mark.parametrize(
    "error",
    [{"message": "", "type": "", "param": "", "code": None}, {"message": None}, {}, [], "", [{}]],
)
def test_an_error_without_words_is_none(api: str, streamed: bool, error: Any) -> None:
    """Some servers send one with each reply."""
    body = {**whole_reply(api), "error": error}
    events = [{**part, "error": error} for part in parts_of(api)]
    for pieces in ([head(), dump(body)], [head(kind="text/event-stream"), sse(events)]):
        reply, _ = ask(api, lambda _, n, pieces=pieces: pieces, streamed=streamed)  # type: ignore[misc]
        assert reply.message["content"] == "Hello."
    nothing = [head(), dump({"error": error, "answer": 1})]
    with pytest.raises(ModelError, match="answer") as raised:
        ask(api, lambda body, n: nothing, streamed=streamed)
    assert raised.value.kind == "malformed"


def test_an_error_without_words_in_a_choice_is_none() -> None:
    body = whole_reply("openai_chat")
    body["choices"][0]["error"] = {"message": "", "code": None}
    reply, _ = ask("openai_chat", lambda _, n: [head(), dump(body)], streamed=False)
    assert reply.message["content"] == "Hello."


FULL: JSON = {"code": 400, "message": "the request exceeds the available context size", "type": "e"}
BARE_ERRORS: dict[str, bytes] = {
    "llama.cpp": b"error: " + dump(FULL) + b"\n\ndata: [DONE]\n\n",
    "llama.cpp without an end": b"error: " + dump(FULL) + b"\n",
    "Ollama": dump({"error": FULL["message"]}) + b"\n",
    "an event of errors": b"event: error\ndata: " + dump(FULL) + b"\n\n",
    "an event of errors in lines": (
        b'event: error\ndata: {"code": 400,\ndata: "message": "'
        + FULL["message"].encode()
        + b'"}\n\n'
    ),
    "a text": b"error: " + FULL["message"].encode() + b"\n\n",
}


@EACH
@STREAMED
@pytest.mark.parametrize("begun", [0, 1], ids=["at once", "after a part"])
@pytest.mark.parametrize("form", BARE_ERRORS)
def test_an_error_in_a_stream_counts_by_its_words_in_any_form(
    api: str, streamed: bool, begun: int, form: str
) -> None:
    """Some servers send no event, but a line."""
    pieces = [head(kind="text/event-stream"), sse(parts_of(api)[:begun]), BARE_ERRORS[form]]
    with pytest.raises(ModelError, match="exceeds the available context size") as raised:
        ask(api, lambda body, n: pieces, streamed=streamed)
    assert raised.value.kind == "context_exceeded"


def test_an_error_after_an_end_that_is_none_counts() -> None:
    """A router ends a stream with the reason "error", and says after it what that was."""
    parts = [
        {"choices": [{"delta": {"content": "a"}, "finish_reason": "error"}]},
        {"error": {"code": "insufficient_quota", "message": "You have no credit."}},
    ]
    with pytest.raises(ModelError) as raised:
        ask(
            "openai_chat",
            lambda body, number: [head(kind="text/event-stream"), sse(parts)],
            streamed=True,
        )
    assert raised.value.kind == "no_credit"
