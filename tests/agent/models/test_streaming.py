"""Streamed replies: their record is that of replies in one piece."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from agent.messages.message import Message
from agent.models.client.endpoint import EndpointModel
from agent.models.dialects import anthropic_messages, openai_chat
from agent.models.dialects.anthropic_messages import MessagesAssembly
from agent.models.dialects.openai_chat import ChatAssembly
from agent.models.errors import ModelError
from agent.models.model import (
    Completion,
    ModelSettings,
    Request,
    StreamEvent,
    StreamHandler,
    guard_handler,
)
from agent.models.scripted import ScriptedModel, parse_script
from tests.fakes.fake_endpoint import FakeEndpoint

DIALECTS = ("openai_chat", "anthropic_messages")
KEY = "sk-secret-123"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
    }
]


def nobody(event: StreamEvent) -> None:
    """A handler for those who want the stream and not its parts."""


def adapter(dialect: str, root: str, *, timeout_s: float = 5.0) -> EndpointModel:
    is_openai = dialect == "openai_chat"
    settings = ModelSettings(
        name="fake",
        api=dialect,
        base_url=root + "/v1" if is_openai else root,
        key_env=None,
        attempt_timeout_s=timeout_s,
    )
    return EndpointModel(settings, KEY)


async def converse(
    dialect: str, root: str, listen: Callable[[], StreamHandler] | None, turns: int = 3
) -> list[Completion]:
    """Play a conversation with the endpoint; every call has the result "1".

    `listen` gives a handler for each turn.
    """
    model = adapter(dialect, root)
    messages = [Message(role="user", content="Go.")]
    completions = []
    for _ in range(turns):
        handler = listen() if listen else None
        completions.append(await model.complete(Request(messages, TOOLS, on_delta=handler)))
        message = completions[-1].message
        messages.append(message)
        for call in message.get("tool_calls", ()):
            messages.append(
                Message(role="tool", tool_call_id=call["id"], name="f", content="1", is_error=False)
            )
    await model.close()
    return completions


def comparable(completions: list[Completion]) -> list[Completion]:
    """Without the counts of the request: the endpoint counts its bytes, which ask for a stream."""
    unlike: Any = {"input_tokens": None, "cache_read_tokens": None}
    return [
        replace(one, usage=None if one.usage is None else {**one.usage, **unlike})
        for one in completions
    ]


async def ask(dialect: str, root: str, *, timeout_s: float = 5.0) -> Completion:
    model = adapter(dialect, root, timeout_s=timeout_s)
    try:
        return await model.complete(Request([Message(role="user", content="Go.")], on_delta=nobody))
    finally:
        await model.close()


def summarize_events(events: list[StreamEvent]) -> dict[str, Any]:
    """What the parts come to: texts, and the calls that began and ended in order."""
    calls: dict[str, list[str]] = {}
    ended = []
    texts = {"text_delta": "", "thinking_delta": ""}
    for event in events:
        match event["type"]:
            case "text_delta" | "thinking_delta" as kind:
                assert event["text"], "an empty part tells nothing"
                texts[kind] += event["text"]
            case "tool_use_start":
                calls[event["tool_id"]] = [event["tool_name"], ""]
            case "tool_use_delta":
                calls[event["tool_id"]][1] += event["tool_input"]
            case "tool_use_stop":
                ended.append((event["tool_id"], event["tool_name"]))
    assert ended == [(id, name) for id, (name, _) in calls.items()]
    return {**texts, "calls": [(id, *call) for id, call in calls.items()]}


def summarize_message(message: Message) -> dict[str, Any]:
    """The same of a recorded message."""
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls", ())]
    return {
        "text_delta": message["content"],
        "thinking_delta": message.get("reasoning", ""),
        "calls": [(id, function["name"], function["arguments"]) for id, function in calls],
    }


@pytest.fixture(scope="module")
def endpoint() -> Iterator[FakeEndpoint]:
    with FakeEndpoint(
        turns=3,
        latency_s=0.0,
        reasoning_chars=53,
        text_chars=30,
        calls_per_turn=2,
        arguments='{"city":"{conversation}/{turn}"}',
    ) as running:
        yield running


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_conversation_is_the_same_streamed_or_not(endpoint: FakeEndpoint, dialect: str) -> None:
    turns: list[list[StreamEvent]] = []

    def listen() -> StreamHandler:
        turns.append([])
        return turns[-1].append

    whole = asyncio.run(converse(dialect, endpoint.anthropic_url, None))
    streamed = asyncio.run(converse(dialect, endpoint.anthropic_url, listen))
    assert comparable(streamed) == comparable(whole)
    assert [completion.finish_reason for completion in whole] == ["tool_calls"] * 2 + ["stop"]
    assert all(one.usage and one.usage["input_tokens"] and one.response_id for one in streamed)
    assert all(completion.message.get("provider_blocks") for completion in whole)
    for completion, events in zip(whole, turns, strict=True):
        parts, message = summarize_events(events), summarize_message(completion.message)
        # The record strips thoughts of the white space around them.
        assert {**parts, "thinking_delta": parts["thinking_delta"].strip()} == message


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut", "malformed"),
        ("no_finish", "malformed"),
        ("html", "malformed"),
        ("empty", "malformed"),
        ("null", "malformed"),
        ("reset", "connection"),
        ("disconnect", "connection"),
        ("http429", "rate_limited"),
        ("http500", "overloaded"),
        ("context", "context_exceeded"),
    ],
)
def test_a_failing_stream_is_never_a_result(dialect: str, fault: str, kind: str) -> None:
    with (
        FakeEndpoint(latency_s=0.0, faults={fault: 1.0}) as failing,
        pytest.raises(ModelError) as caught,
    ):
        asyncio.run(ask(dialect, failing.anthropic_url))
    assert caught.value.kind == kind


@asynccontextmanager
async def serving(*parts: bytes, mime: str = "text/event-stream") -> AsyncIterator[str]:
    """An endpoint that sends `parts` to everybody, then waits if the last one is empty."""

    answers: list[asyncio.Task[Any] | None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n")
        writer.write(b"Content-Type: %b\r\n\r\n" % mime.encode())
        writer.write(b"".join(parts))
        if parts[-1] == b"":
            await reader.read()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(answer, "127.0.0.1")
    async with server:
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            await asyncio.gather(*filter(None, answers))


async def ask_server(
    dialect: str, *parts: bytes, timeout_s: float = 60.0, **how: Any
) -> Completion:
    async with serving(*parts, **how) as root:
        return await ask(dialect, root, timeout_s=timeout_s)


def event(body: Any, name: str = "") -> bytes:
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(body)}\n\n".encode()


def chunk(finish: Any = None, **delta: Any) -> dict[str, Any]:
    return {"id": "c", "model": "m", "choices": [{"delta": delta, "finish_reason": finish}]}


OVERLOADED = {"type": "error", "error": {"type": "overloaded_error", "message": "busy " + KEY}}


@pytest.mark.parametrize(
    ("dialect", "error", "kind"),
    [
        ("openai_chat", event({"error": {"code": 429, "message": "slow " + KEY}}), "rate_limited"),
        ("openai_chat", event({"error": {"code": "502", "message": KEY}}), "overloaded"),
        ("openai_chat", event({"error": {"code": "server_error", "message": KEY}}), "overloaded"),
        (
            "openai_chat",
            event({"error": {"code": None, "type": "invalid_request_error", "message": KEY}}),
            "bad_request",
        ),
        (
            "openai_chat",
            event({"error": {"code": "context_length_exceeded", "message": KEY}}),
            "context_exceeded",
        ),
        ("openai_chat", event({"error": {"code": "insufficient_quota"}}), "no_credit"),
        ("openai_chat", event({"error": "boom " + KEY}), "malformed"),
        ("anthropic_messages", event(OVERLOADED, "error"), "overloaded"),
        (
            "anthropic_messages",
            event({"error": {"type": "invalid_request_error", "message": "x"}}, "error"),
            "bad_request",
        ),
        ("anthropic_messages", b"event: error\ndata: boom\n\n", "malformed"),
        ("openai_chat", b"data: {broken\n\n", "malformed"),
        ("openai_chat", event(json.loads("[" * 500 + "]" * 500)), "malformed"),
        ("openai_chat", b"data: " + b"[" * 100_000 + b"\n\n", "malformed"),
    ],
)
def test_an_error_inside_a_stream_counts_like_one_before_it(
    dialect: str, error: bytes, kind: str
) -> None:
    start = event(chunk(content="a")) if dialect == "openai_chat" else b""
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_server(dialect, start, error))
    assert caught.value.kind == kind
    assert KEY not in str(caught.value)


def test_a_stream_that_stops_moving_ends_with_the_attempts_time() -> None:
    with pytest.raises(ModelError) as caught:
        asyncio.run(ask_server("openai_chat", event(chunk(content="a")), b"", timeout_s=0.3))
    assert caught.value.kind == "timeout"


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_server_that_knows_no_streams_may_answer_in_one_piece(dialect: str) -> None:
    body = {
        "choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}],
        "content": [{"type": "text", "text": "hi"}],
        "stop_reason": "end_turn",
    }
    reply = asyncio.run(ask_server(dialect, json.dumps(body).encode(), mime="application/json"))
    assert reply.message == {"role": "assistant", "content": "hi"}


def test_only_who_listens_asks_for_a_stream() -> None:
    settings = ModelSettings(name="m", api="", base_url=None, key_env=None)
    quiet = Request([Message(role="user", content="hi")])
    for dialect in (openai_chat, anthropic_messages):
        assert dialect.request_body(settings, quiet)["stream"] is False
    listening = msgspec.structs.replace(quiet, on_delta=nobody)
    assert anthropic_messages.request_body(settings, listening)["stream"] is True
    body = openai_chat.request_body(settings, listening)
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_handler_that_fails_loses_no_reply_and_is_logged_once(
    endpoint: FakeEndpoint, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []

    def fail(event: StreamEvent) -> None:
        seen.append(event)
        raise ZeroDivisionError

    whole = asyncio.run(converse(dialect, endpoint.anthropic_url, None, turns=1))
    with caplog.at_level(logging.ERROR):
        reply = asyncio.run(
            converse(dialect, endpoint.anthropic_url, lambda: guard_handler(fail), turns=1)
        )
    assert comparable(reply) == comparable(whole)
    assert len(seen) == 1, "it is not told of the rest"
    (record,) = caplog.records
    assert record.exc_info
    assert record.exc_info[0] is ZeroDivisionError


def read_chunks(*chunks: dict[str, Any]) -> tuple[Completion, list[StreamEvent]]:
    events: list[StreamEvent] = []
    assembly = ChatAssembly(events.append)
    for part in chunks:
        assembly.add(part)
    return openai_chat.read_reply(assembly.finish()), events


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return chunk(role="assistant", tool_calls=list(calls))


def part(arguments: Any = None, name: str | None = None, **place: Any) -> dict[str, Any]:
    return {**place, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    "chunks",
    [
        pytest.param(
            [
                calling(part("", "f", index=0, id="a")),
                calling(part('{"x":', index=0)),
                calling(part("1}", index=0)),
                calling(part("{}", "g", index=1, id="b")),
            ],
            id="as documented",
        ),
        pytest.param(
            [calling(part('{"x":1}', "f", id="a"), part("{}", "g", id="b"))],
            id="whole, without index",
        ),
        pytest.param(
            [
                calling(part("", "f", id="a")),
                calling(part('{"x":1}', id="")),
                calling(part("{}", "g", id="b")),
            ],
            id="parts without index",
        ),
        pytest.param(
            [
                calling(part(id="a")),
                calling(part('{"x":1}', "f")),
                calling(part("{}", "g", id="b")),
            ],
            id="id before name, without index",
        ),
        pytest.param(
            [
                calling(part('{"x":', "f", index=0, id="a")),
                calling(part("1}", "f", index=0, id="a")),
                calling(part("{", "g", index=1, id="b")),
                calling(part("}", "g", index=1, id="b")),
            ],
            id="name and id repeated",
        ),
        pytest.param(
            [
                calling(part('{"x":', "f", index=0, id="a")),
                calling(part("1}", index=0, id="other")),
                calling(part("{}", "g", index=1, id="b")),
            ],
            id="an id invented for a part",
        ),
        pytest.param(
            [
                calling(part('{"x":1}', "f", index=0, id="a")),
                calling(part("{", "g", index=0, id="b")),
                calling(part("}", index=0)),
            ],
            id="the same index for all",
        ),
        pytest.param(
            [
                calling(part({"x": 1}, "f", index=0, id="a")),
                calling(part({}, "g", index=1, id="b")),
            ],
            id="arguments as objects",
        ),
        pytest.param(
            [
                calling(part('{"x"', "f", index=0, id="a"), part("{", "g", index=1, id="b")),
                calling(part("}", index=1), part(":1}", index=0)),
            ],
            id="interleaved",
        ),
    ],
)
def test_openai_calls_in_all_the_ways_that_servers_send_them(chunks: list[dict[str, Any]]) -> None:
    reply, events = read_chunks(*chunks, chunk("tool_calls"))
    expected = [("a", "f", '{"x":1}'), ("b", "g", "{}")]
    assert (
        summarize_message(reply.message)["calls"] == summarize_events(events)["calls"] == expected
    )


def test_openai_calls_without_ids_are_distinguished() -> None:
    reply, _ = read_chunks(
        calling(part("{}", "f"), part("{}", "g")), calling(part("{}", "f")), chunk("tool_calls")
    )
    assert [call["function"]["name"] for call in reply.message["tool_calls"]] == ["f", "g", "f"]


def test_openai_chunks_with_everything_repeated_or_missing() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 2}
    reply, events = read_chunks(
        {"id": "c", "model": "m", "choices": []},
        chunk(role="assistant", content="", reasoning_content=None),
        chunk("", role="assistant", reasoning="w", reasoning_content="w"),
        chunk(role="assistant", reasoning="hy", reasoning_content="hy"),
        chunk(role="assistant", content="h"),
        {"choices": [{"index": 1, "delta": {"content": "another choice"}}]},
        chunk(role="assistant", content=[{"type": "text", "text": "i"}], tool_calls=None),
        chunk("stop"),
        {"choices": [{"delta": None}], "usage": usage},
        {"choices": None, "usage": None},
    )
    assert reply.message["content"] == "hi"
    assert reply.message["reasoning"] == "why"
    assert reply.message["provider_blocks"]["blocks"] == [
        {"reasoning_content": "why", "reasoning": "why"}
    ]
    assert (reply.response_id, reply.model, reply.finish_reason) == ("c", "m", "stop")
    assert reply.usage
    assert (reply.usage["input_tokens"], reply.usage["output_tokens"]) == (3, 2)
    assert summarize_events(events) == {"text_delta": "hi", "thinking_delta": "why", "calls": []}


def test_openai_reasoning_details_are_put_together_and_go_back_verbatim() -> None:
    def detail(kind: str, index: int, **fields: Any) -> dict[str, Any]:
        return {"type": "reasoning." + kind, "index": index, **fields}

    reply, events = read_chunks(
        chunk(reasoning_details=[detail("text", 0, text="w", signature=None)]),
        chunk(reasoning_details=[detail("text", 0, text="hy", signature=None)]),
        chunk(reasoning_details=[detail("text", 0, text=None, signature="sig")]),
        chunk(reasoning_details=[detail("text", 0, text="", signature=None)]),
        chunk(reasoning_details=[detail("text", 1, text="more")]),
        chunk(reasoning_details=[detail("summary", 1, summary="!")]),
        chunk(reasoning_details=[detail("encrypted", 1, data="x")]),
        chunk(reasoning_details=[detail("encrypted", 1, data="y")]),
        chunk("stop", content="hi"),
    )
    details = reply.message["provider_blocks"]["blocks"][0]["reasoning_details"]
    assert details == [
        detail("text", 0, text="why", signature="sig"),
        detail("text", 1, text="more"),
        detail("summary", 1, summary="!"),
        detail("encrypted", 1, data="x"),
        detail("encrypted", 1, data="y"),
    ]
    assert summarize_events(events)["thinking_delta"] == "whymore!"


def test_thinking_blocks_are_put_together_by_their_signatures() -> None:
    def block(text: str, **more: Any) -> dict[str, Any]:
        return {"type": "thinking", "thinking": text, **more}

    hidden = {"type": "redacted_thinking", "data": "x"}
    parts = [block("w"), block("hy"), block("", signature="s"), block("more"), hidden, hidden]
    reply, events = read_chunks(
        *(chunk(thinking_blocks=[part], reasoning_content=part.get("thinking")) for part in parts),
        chunk("stop", content="hi"),
    )
    (verbatim,) = reply.message["provider_blocks"]["blocks"]
    assert verbatim["thinking_blocks"] == [
        block("why", signature="s"),
        block("more"),
        hidden,
        hidden,
    ]
    assert summarize_events(events)["thinking_delta"] == reply.message["reasoning"] == "whymore"


def test_an_openai_refusal_in_parts() -> None:
    reply, events = read_chunks(chunk(refusal="I can"), chunk(refusal="not."), chunk("stop"))
    assert (reply.finish_reason, reply.message["content"]) == ("refusal", "I cannot.")
    assert summarize_events(events)["text_delta"] == "I cannot."


def test_an_emoji_cut_in_two_by_the_stream_is_whole_again() -> None:
    reply, _ = read_chunks(chunk(content="\ud83d"), chunk(content="\ude00\ud83d"), chunk("stop"))
    assert reply.message["content"] == "\N{GRINNING FACE}\ufffd"


def test_calls_of_a_cut_stream_have_no_end_event() -> None:
    events: list[StreamEvent] = []
    assembly = ChatAssembly(events.append)
    assembly.add(calling(part("{", "f", index=0, id="a")))
    with pytest.raises(ModelError, match="finish_reason"):
        openai_chat.read_reply(assembly.finish())
    assert [event["type"] for event in events] == ["tool_use_start", "tool_use_delta"]


def read_events(*events: dict[str, Any]) -> tuple[Completion, list[StreamEvent]]:
    seen: list[StreamEvent] = []
    assembly = MessagesAssembly(seen.append)
    for item in events:
        assembly.add(item)
    return anthropic_messages.read_reply(assembly.finish()), seen


def block(n: int, start: dict[str, Any], *deltas: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"type": "content_block_start", "index": n, "content_block": start},
        *({"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas),
        {"type": "content_block_stop", "index": n},
    ]


def opening(**usage: Any) -> dict[str, Any]:
    message: dict[str, Any] = {
        "id": "m1",
        "model": "m",
        "content": [],
        "stop_reason": None,
        "usage": usage,
    }
    return {"type": "message_start", "message": message}


def ending(stop: str | None, **usage: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": stop}, "usage": usage}


def input_part(text: str) -> dict[str, Any]:
    return {"type": "input_json_delta", "partial_json": text}


def test_anthropic_blocks_are_those_of_a_whole_reply() -> None:
    """Also the ones that nobody reads here and that must go back as they came."""
    cited = {"type": "char_location", "cited_text": "x"}
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    search = {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}
    found = {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"url": "u"}]}
    reply, events = read_events(
        opening(input_tokens=5),
        {"type": "ping"},
        *block(
            0,
            {"type": "thinking", "thinking": "", "signature": ""},
            {"type": "thinking_delta", "thinking": "w"},
            {"type": "thinking_delta", "thinking": "hy"},
            {"type": "signature_delta", "signature": "sig"},
        ),
        *block(1, {"type": "redacted_thinking", "data": "opaque"}),
        *block(2, search, input_part('{"query"'), input_part(': "q"}')),
        *block(3, found),
        *block(
            4,
            {"type": "text", "text": ""},
            {"type": "text_delta", "text": "h"},
            {"type": "citations_delta", "citation": cited},
            {"type": "text_delta", "text": "i"},
        ),
        *block(5, use, input_part(""), input_part('{"a": '), input_part("1}")),
        *block(6, {**use, "id": "u"}, input_part(""), input_part(" ")),
        *block(7, {**use, "id": "v", "input": {"b": 2}}),
        {"type": "content_block_delta", "index": 99, "delta": {"type": "text_delta", "text": "?"}},
        {"type": "content_block_stop", "index": 99},
        ending("tool_use", output_tokens=7),
        ending(None, output_tokens=7),
        {"type": "message_stop"},
    )
    assert reply.message["provider_blocks"]["blocks"] == [
        {"type": "thinking", "thinking": "why", "signature": "sig"},
        {"type": "redacted_thinking", "data": "opaque"},
        {**search, "input": {"query": "q"}},
        found,
        {"type": "text", "text": "hi", "citations": [cited]},
        {**use, "input": {"a": 1}},
        {**use, "id": "u"},
        {**use, "id": "v", "input": {"b": 2}},
        {"type": "text", "text": "?"},
    ]
    calls = [("t", "f", '{"a":1}'), ("u", "f", "{}"), ("v", "f", '{"b":2}')]
    assert summarize_message(reply.message)["calls"] == calls
    heard = summarize_events(events)
    assert (heard["text_delta"], heard["thinking_delta"]) == ("hi?", "why")
    assert heard["calls"] == [("t", "f", '{"a": 1}'), ("u", "f", " "), ("v", "f", '{"b": 2}')]
    assert (reply.response_id, reply.model, reply.finish_reason) == ("m1", "m", "tool_calls")


@pytest.mark.parametrize("text", ['{"a": ', "[1]", '"x"'])
def test_an_anthropic_input_that_is_not_an_object_stays_text(text: str) -> None:
    use = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    reply, _ = read_events(opening(), *block(0, use, input_part(text)), ending("max_tokens"))
    assert summarize_message(reply.message)["calls"] == [("t", "f", text)]


def test_later_anthropic_counts_win_unless_they_say_nothing() -> None:
    details = {"thinking_tokens": 3}
    reply, _ = read_events(
        opening(
            input_tokens=5,
            output_tokens=1,
            cache_read_input_tokens=100,
            cache_creation_input_tokens=None,
            output_tokens_details=details,
        ),
        ending(
            "end_turn",
            input_tokens=0,
            output_tokens=9,
            cache_read_input_tokens=None,
            cache_creation_input_tokens=0,
            output_tokens_details={"thinking_tokens": 0},
        ),
    )
    assert reply.usage == {
        "input_tokens": 105,
        "output_tokens": 9,
        "cache_read_tokens": 100,
        "cache_write_tokens": 0,
        "reasoning_tokens": 3,
    }
    assert read_events(opening(), ending("end_turn"))[0].usage is None


def test_an_anthropic_stream_without_a_stop_reason_is_malformed() -> None:
    with pytest.raises(ModelError, match="stop_reason") as caught:
        read_events(opening(), *block(0, {"type": "text", "text": "hi"}), ending(None))
    assert caught.value.kind == "malformed"


def test_the_scripted_model_emits_events_for_its_reply(caplog: pytest.LogCaptureFixture) -> None:
    turn = {
        "reasoning": "why",
        "content": "hi",
        "tool_calls": [{"name": "f", "arguments": {"a": 1}}, {"name": "g"}],
    }

    def play(handler: StreamHandler | None) -> Completion:
        return asyncio.run(
            ScriptedModel(parse_script([turn])).complete(Request([], on_delta=handler))
        )

    events: list[StreamEvent] = []
    whole = play(None)
    assert play(events.append) == whole
    assert summarize_events(events) == summarize_message(whole.message)
    assert [event["type"] for event in events[:3]] == [
        "thinking_delta",
        "text_delta",
        "tool_use_start",
    ]

    def fail(event: StreamEvent) -> None:
        raise ZeroDivisionError

    assert play(guard_handler(fail)) == whole
    assert len(caplog.records) == 1
