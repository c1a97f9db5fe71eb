"""Calls of agents that are no chats, and how bodies of requests are packed."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import orjson
import pyarrow as pa
import pytest
from aiohttp import web

from agent.gateway.relay import CallLimits
from agent.gateway.server import MAX_REQUEST_BYTES
from agent.messages.message import Event
from agent.models.errors import ModelError
from agent.models.model import Price
from agent.wires.agent_conversations import find_conversations
from agent.wires.openai_completions import CompletionsWire, EmbeddingsWire
from tests.agent.gateway.relaying import Play, answer_whole, ask, run_gateway, stream

PRICES: dict[str, Any] = {"prices": {"m": Price(1.0, 10.0, 1.0, 1.0)}}
VECTORS = {
    "object": "list",
    "model": "m",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.25, 0.5]}],
    "usage": {"prompt_tokens": 7, "total_tokens": 7},
}
TEXT = {
    "id": "cmpl-1",
    "object": "text_completion",
    "created": 1,
    "model": "m",
    "choices": [{"index": 0, "text": "return 1", "finish_reason": "stop", "logprobs": None}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}
PIECES = [
    {**TEXT, "choices": [{"index": 0, "text": "return", "finish_reason": None}], "usage": None},
    {**TEXT, "choices": [{"index": 0, "text": " 1", "finish_reason": "stop"}], "usage": None},
    {**TEXT, "choices": []},
]
STREAM = [*(b"data: " + orjson.dumps(piece) + b"\n\n" for piece in PIECES), b"data: [DONE]\n\n"]
EMBEDDINGS, COMPLETIONS = "/v1/embeddings", "/v1/completions"


def _plays(api: str) -> Play:
    chat = answer_whole(api)

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        if request.path == EMBEDDINGS:
            return web.json_response(VECTORS)
        if request.path == COMPLETIONS:
            if orjson.loads(body).get("stream"):
                return await stream(request, STREAM)
            return web.json_response(TEXT)
        return await chat(request, body, n)

    return play


@pytest.mark.parametrize("api", ["openai_chat", "openai_responses"])
def test_calls_that_are_no_chats_are_passed_on_paid_and_recorded(api: str) -> None:
    """They count in the budget, are lines of their own, and get their replies from the journal."""
    asked: list[tuple[str, dict[str, Any], Any]] = [
        (EMBEDDINGS, {"model": "m", "input": ["a", "b"], "encoding_format": "float"}, VECTORS),
        (EMBEDDINGS, {"model": "m", "input": [1, 2, 3]}, VECTORS),
        (COMPLETIONS, {"model": "m", "prompt": "def f():", "max_tokens": 9}, TEXT),
        (COMPLETIONS, {"model": "m", "prompt": "def g():", "stream": True}, STREAM),
    ]

    async def run() -> None:
        async with run_gateway(api, _plays(api), settings=PRICES) as world:
            assert (await world.read(ask("Go.")))[0] == 200
            for path, body, reply in asked:
                status, said = await world.read(body, path=path)
                assert status == 200, said
                assert said == b"".join(reply) if reply is STREAM else orjson.loads(said) == reply
            for sent, (path, body, _) in zip(world.endpoint.asked[1:], asked, strict=True):
                assert (sent.path, orjson.loads(sent.body)) == (path, body)
            events: list[Event] = [*world.events, {"kind": "agent_restarted", "at": 1.0}]
        costs = [event["reply"]["cost_usd"] for event in world.exchanges[1:]]
        assert costs == pytest.approx([7e-6, 7e-6, 37e-6, 37e-6])

        async with run_gateway(api, _plays(api), events=events, settings=PRICES) as world:
            await world.read(ask("Go."))
            for path, body, reply in asked:
                status, said = await world.read(body, path=path)
                assert status == 200, said
                if reply is not STREAM:
                    assert orjson.loads(said) == reply
                else:
                    assert b"return 1" in said
                    assert said.endswith(b"data: [DONE]\n\n")
            assert not world.endpoint.asked
            threads = world.gateway.relay._threads
            lines = find_conversations(threads, "Go.")
            assert lines.main is not None
            assert lines.main.call_numbers == [0]
            names = [line.name for line in lines.others]
            assert names == ["embeddings", "embeddings", "completion", "completion"]

    asyncio.run(run())


def test_a_cut_stream_of_a_completion_is_no_reply() -> None:
    """A whole reply may give null as its reason; the stream has none."""
    wire = CompletionsWire()
    assembly = wire.assembly()
    assembly.add(PIECES[0])
    with pytest.raises(ModelError, match="has no finish_reason"):
        wire.read_reply(assembly.finish())
    whole = {**TEXT, "choices": [{"index": 0, "text": "return 1", "finish_reason": None}]}
    assert wire.read_reply(orjson.dumps(whole)).unknown_ending == "null"


def test_a_budget_refuses_calls_that_are_no_chats() -> None:
    limits = CallLimits(max_cost_usd=0.000006)

    async def run() -> None:
        async with run_gateway(
            "openai_chat", _plays("openai_chat"), limits=limits, settings=PRICES
        ) as w:
            body = {"model": "m", "input": "a"}
            assert (await w.read(body, path=EMBEDDINGS))[0] == 200
            status, said = await w.read({"model": "m", "input": "b"}, path=EMBEDDINGS)
            assert status == 400
            assert b"are spent" in said
            assert len(w.endpoint.asked) == 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (EMBEDDINGS, {"model": "m"}, b"input"),
        (COMPLETIONS, {"model": "m", "prompt": ["a", ""]}, b"prompt"),
        (COMPLETIONS, {"model": "m", "prompt": {"text": "a"}}, b"prompt"),
    ],
)
def test_a_call_without_a_text_is_refused(path: str, body: Any, field: bytes) -> None:
    async def run() -> None:
        async with run_gateway("openai_chat", _plays("openai_chat")) as world:
            status, said = await world.read(body, path=path)
            assert status == 400
            assert field + b": it must be" in said
            assert not world.endpoint.asked

    asyncio.run(run())


def _compress(content: bytes, coding: str) -> bytes:
    if coding == "gzip":
        return gzip.compress(content)
    if coding == "deflate":
        return zlib.compress(content)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {"br": "brotli"}.get(coding, coding)) as stream:
        stream.write(content)
    return bytes(sink.getvalue())


@pytest.mark.parametrize("coding", ["gzip", "deflate", "br", "zstd"])
def test_requests_may_be_packed(coding: str) -> None:
    """The endpoint gets them unpacked; one that is too large so, or cut, is refused."""
    plain = orjson.dumps(ask("Go."))

    async def run() -> None:
        async with run_gateway("openai_chat") as world:

            async def send(packed: bytes) -> int:
                headers = {"Content-Encoding": coding}
                async with world.client.post(
                    "http://gateway/v1/chat/completions", data=packed, headers=headers
                ) as response:
                    return response.status

            packed = _compress(plain, coding)
            assert await send(packed) == 200
            (sent,) = world.endpoint.asked
            assert sent.body == plain
            assert "Content-Encoding" not in sent.headers
            assert await send(packed[:-9]) == 400
            assert await send(plain) == 400
            if coding in ("zstd", "deflate"):
                assert await send(_compress(b" " * (MAX_REQUEST_BYTES + 1), coding)) == 413
            assert len(world.endpoint.asked) == 1

    asyncio.run(run())


def test_an_unknown_packing_is_refused_by_name() -> None:
    async def run() -> None:
        async with run_gateway("openai_chat") as world:
            url = "http://gateway/v1/chat/completions"
            packed, headers = zlib.compress(orjson.dumps(ask())), {"Content-Encoding": "lzma"}
            async with world.client.post(url, data=packed, headers=headers) as response:
                assert response.status == 400
                assert b"send gzip, deflate, br, zstd, or none" in await response.read()

    asyncio.run(run())


@pytest.mark.parametrize("usage", [[1], "x", 5, {"completion_tokens": None}])
def test_usage_of_any_type_is_read(usage: Any) -> None:
    reply = EmbeddingsWire().read_reply(orjson.dumps({**VECTORS, "usage": usage}))
    assert reply.message["content"] == ""


def test_parts_of_choices_that_are_none_are_left_out() -> None:
    assembly = CompletionsWire().assembly()
    for index in ([1], {"a": 1}, None, "0", -1, 10**9, True):
        assembly.add({"choices": [{"index": index, "text": "x"}]})
    for text in ("a", "b"):
        assembly.add({"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]})
    (choice,) = orjson.loads(assembly.finish())["choices"]
    assert choice == {"index": 0, "text": "ab", "finish_reason": "stop"}
