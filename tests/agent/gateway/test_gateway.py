"""What the gateway answers itself: refusals, probes, keep-alives, and requests that are none."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web

from agent.gateway.answers import list_names
from agent.gateway.relay import CallLimits, RefusedModel, Route
from agent.gateway.server import MAX_REQUEST_BYTES
from agent.models.client.endpoint import open_model
from agent.models.model import ModelSettings, Price
from tests.agent.gateway.relaying import (
    ALL,
    KEY,
    PATHS,
    answer_when_set,
    ask,
    reply_of,
    run_gateway,
    until,
)

EACH = pytest.mark.parametrize("api", ALL)
PRICES: dict[str, Any] = {"prices": {"m": Price(1.0, 1.0, 1.0, 1.0)}}


def _error(said: bytes) -> Any:
    return orjson.loads(said)["error"]


@EACH
@pytest.mark.parametrize(
    ("limits", "status", "message"),
    [
        (CallLimits(max_calls=2), "max_turns", "2 model calls"),
        (CallLimits(max_cost_usd=0.0002), "budget", "$0.000220 of $0.000200"),
        (CallLimits(max_tokens=150), "budget", "220 of 150 tokens"),
    ],
)
def test_a_limit_refuses_the_next_call(
    api: str, limits: CallLimits, status: str, message: str
) -> None:
    """With status 400 and an error in the dialect's own form; the ending says which limit."""

    async def run() -> None:
        async with run_gateway(api, limits=limits, settings=PRICES) as world:
            for n in range(2):
                assert (await world.read(ask(f"Go {n}.")))[0] == 200
            assert not world.gateway.relay.ended.is_set()
            for is_stream in (False, True):
                async with world.post(ask(stream=is_stream)) as response:
                    assert response.status == 400
                    assert response.headers["x-should-retry"] == "false"
                    error = _error(await response.read())
                    assert message in error["message"]
                    assert error["type"] == "invalid_request_error"
            assert world.gateway.relay.ending is not None
            assert world.gateway.relay.ending.status == status
            assert world.gateway.relay.ended.is_set()
            assert len(world.endpoint.asked) == 2

    asyncio.run(run())


def test_a_budget_in_dollars_ends_with_the_first_reply_of_unknown_cost() -> None:
    async def run() -> None:
        async with run_gateway("openai_chat", limits=CallLimits(max_cost_usd=9.0)) as world:
            assert (await world.read(ask("Go.")))[0] == 200
            status, said = await world.read(ask("Go on."))
            assert status == 400
            assert b"the cost of a reply is unknown" in said

    asyncio.run(run())


def test_calls_in_flight_count_against_the_limit() -> None:
    """An agent that asks for many at once gets as many as one that asks for them in turn."""
    play, goes_on = answer_when_set("openai_chat")

    async def run() -> None:
        async with run_gateway("openai_chat", play, limits=CallLimits(max_calls=2)) as world:
            calls = [asyncio.create_task(world.read(ask(f"{n}"))) for n in range(3)]
            await until(lambda: any(one.done() for one in calls))
            goes_on.set()
            statuses = sorted(status for status, _ in await asyncio.gather(*calls))
            assert statuses == [200, 200, 400]

    asyncio.run(run())


@EACH
def test_a_run_that_stops_refuses_calls_and_records_those_in_flight(api: str) -> None:
    """The agent of a call in flight still gets its reply."""
    stops = False
    play, goes_on = answer_when_set(api)

    async def run() -> None:
        nonlocal stops
        async with run_gateway(api, play, is_stopping=lambda: stops) as world:
            first = asyncio.create_task(world.read())
            await until(lambda: len(world.endpoint.asked) == 1)
            stops = True
            status, said = await world.read(ask("Another."))
            assert status == 400
            assert "stopping" in _error(said)["message"]
            closing = asyncio.create_task(world.gateway.close())
            goes_on.set()
            await closing
            assert (await first)[0] == 200
            assert len(world.exchanges) == 1

    asyncio.run(run())


@EACH
def test_a_model_that_the_run_does_not_have_is_refused(api: str) -> None:
    """The words are those of the route; other calls go on."""

    def route(api: str, name: str) -> Route:
        raise RefusedModel(f"{name}: give it under aliases")

    async def run() -> None:
        async with run_gateway(api, route=route) as world:
            status, said = await world.read()
            assert status == 400
            assert "m: give it under aliases" in _error(said)["message"]
            assert not world.gateway.relay.ended.is_set()
            assert not world.endpoint.asked

    asyncio.run(run())


@EACH
def test_an_alias_is_sent_under_the_name_of_its_endpoint(api: str) -> None:
    """Only the name changes; the journal keeps what the agent asked for."""

    async def run() -> None:
        async with run_gateway(api, name="real-name") as world:
            assert (await world.read(ask(x_new=[1, {"b": 2}])))[0] == 200
            sent = orjson.loads(world.endpoint.asked[0].body)
            assert sent == ask(x_new=[1, {"b": 2}]) | {"model": "real-name"}
            assert world.exchanges[0]["asked"] == "m"

    asyncio.run(run())


def test_a_budget_puts_a_limit_into_requests_without_one() -> None:
    """The worst case of a call has to be known before it; a limit of the agent's own stays."""

    async def run() -> None:
        settings = {"needs_bound": True, "max_tokens": 77}
        async with run_gateway("openai_chat", settings=settings) as world:
            for given in ({}, {"max_tokens": 1000}):
                body = {"model": "m", "messages": [{"role": "user", "content": "Go."}], **given}
                assert (await world.read(body))[0] == 200
            sent = [orjson.loads(request.body) for request in world.endpoint.asked]
            assert 77 in sent[0].values()
            assert sent[1]["max_tokens"] == 1000
            assert 77 not in sent[1].values()

    asyncio.run(run())


def test_tools_that_the_provider_would_run_are_removed() -> None:
    """They reach the network past the sandbox; the record names them."""
    mine = {"name": "bash", "input_schema": {"type": "object"}}
    tools = [mine, {"type": "web_search_20250305", "name": "web_search"}]

    async def run() -> None:
        async with run_gateway("anthropic_messages") as world:
            assert (await world.read(ask(tools=tools)))[0] == 200
            assert orjson.loads(world.endpoint.asked[0].body)["tools"] == [mine]
            assert world.exchanges[0]["stripped"] == ["web_search"]

    asyncio.run(run())


def test_counting_tokens_is_relayed_and_not_recorded() -> None:
    """It is free; what the endpoint says of it is for the agent."""
    path = "/v1/messages/count_tokens?beta=true"

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return web.json_response({"input_tokens": 12})

    async def run() -> None:
        async with run_gateway("anthropic_messages", play) as world:
            status, said = await world.read(path=path)
            assert (status, orjson.loads(said)) == (200, {"input_tokens": 12})
            assert world.endpoint.asked[0].path == path
            assert not world.events

    asyncio.run(run())


@EACH
def test_a_stream_that_waits_shows_that_it_is_alive(api: str) -> None:
    """Before the endpoint answers, too; the reply follows."""
    play, goes_on = answer_when_set(api)

    async def run() -> None:
        async with (
            run_gateway(api, play, keepalive_s=0.01) as world,
            world.post(ask(stream=True)) as response,
        ):
            assert response.status == 200
            alive = await response.content.readany()
            assert alive.startswith(b": ") or b"ping" in alive
            goes_on.set()
            assert b"Done." in await response.read()

    asyncio.run(run())


@EACH
def test_a_failure_after_keepalives_is_an_event_of_the_stream(api: str) -> None:
    """The status is sent by then."""
    goes_on = asyncio.Event()

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        await goes_on.wait()
        return web.json_response({"error": {"message": "no such thing"}}, status=400)

    async def run() -> None:
        async with (
            run_gateway(api, play, keepalive_s=0.01) as world,
            world.post(ask(stream=True)) as response,
        ):
            await response.content.readany()
            goes_on.set()
            assert b"no such thing" in await response.read()
            assert response.status == 200

    asyncio.run(run())


@EACH
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "m"}',
        b'{"model": 1, "messages": []}',
        b'{"model": "m", "messages": [1]}',
        b'{"model": "m", "messages": [{"role": "nobody", "content": "x"}]}',
        b'{"model": "m", "messages": [{"role": "user", "content": '
        + b"[" * 500
        + b"]" * 500
        + b"}]}",
    ],
)
def test_what_is_no_request_is_refused(api: str, body: bytes) -> None:
    """With status 400, a reason, and no call."""
    if api == "openai_responses":
        body = body.replace(b'"messages"', b'"input"').replace(b'"m"}', b'"m", "input": 1}')

    async def run() -> None:
        async with run_gateway(api) as world:
            status, said = await world.read(body)
            assert status == 400
            assert _error(said)["message"]
            assert not world.endpoint.asked
            assert (await world.read())[0] == 200

    asyncio.run(run())


def test_the_list_of_models_can_be_read_by_clients_of_each_api() -> None:
    reply = asyncio.run(list_names(["m", "other", "m"])("/v1/models", {}))
    said = orjson.loads(b"".join(reply.parts))
    assert [(model["id"], model["type"], model["object"]) for model in said["data"]] == [
        ("m", "model", "model"),
        ("other", "model", "model"),
    ]
    assert [model["name"] for model in said["models"]] == ["models/m", "models/other"]
    assert said["has_more"] is False


@EACH
@pytest.mark.parametrize(
    "spoil",
    [
        lambda body: b'{"model": "cheap", ' + body[1:],
        lambda body: b'{"mod\\u0065l" : "cheap", ' + body[1:],
        lambda body: b'{"generationConfig": {"n": 1, "n": 2}, ' + body[1:],
    ],
)
def test_a_body_with_a_key_that_is_there_twice_is_refused(
    api: str, spoil: Callable[[bytes], bytes]
) -> None:
    """The gateway would judge one of the two, and the endpoint may take the other."""

    async def run() -> None:
        async with run_gateway(api) as world:
            body = orjson.dumps(ask(note={"text": 'key "model": and "model"', "model": [{}]}))
            status, said = await world.read(spoil(body))
            assert status == 400
            assert "it is there twice" in _error(said)["message"]
            assert not world.endpoint.asked
            assert (await world.read(body))[0] == 200

    asyncio.run(run())


@EACH
def test_a_request_beyond_the_maximum_is_refused(api: str) -> None:
    """Whether it says its size or not."""

    async def parts() -> Any:
        for _ in range(MAX_REQUEST_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    async def run() -> None:
        async with run_gateway(api) as world:
            status, said = await world.read(io.BytesIO(b"x" * (MAX_REQUEST_BYTES + 1)))
            assert status == 413
            assert "64 MiB" in _error(said)["message"]
            url = "http://gateway" + PATHS[api]
            async with world.client.post(url, data=parts()) as response:
                assert response.status == 413

    asyncio.run(run())


@EACH
def test_probes_are_answered(api: str) -> None:
    """Agents look whether somebody is there; a websocket is declined, other paths do not exist."""

    async def run() -> None:
        async with run_gateway(api) as world:
            send = world.client.request
            for method, path, status in [
                ("HEAD", "/", 200),
                ("GET", "/", 200),
                ("GET", "/v1/models", 200),
                ("GET", "/v1/files", 404),
                ("POST", "/v1/moderations", 404),
                ("DELETE", "/", 404),
            ]:
                async with send(method, "http://gateway" + path) as response:
                    assert response.status == status, path
            upgrade = {"Upgrade": "websocket", "Connection": "Upgrade"}
            async with send("GET", "http://gateway" + PATHS[api], headers=upgrade) as response:
                assert response.status == 426
            assert not world.endpoint.asked

    asyncio.run(run())


@EACH
def test_bytes_that_are_no_http_harm_nothing(api: str) -> None:
    """The connection ends; the next one is served."""

    async def run() -> None:
        async with run_gateway(api) as world:
            path = world.client.connector.path  # type: ignore[union-attr]
            for sent in (os.urandom(2000), b"POST " + b"/" * 20_000 + b" HTTP/1.1\r\n\r\n"):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(sent + b"\r\n\r\n")
                await reader.read()
                writer.close()
            assert (await world.read())[0] == 200

    asyncio.run(run())


@EACH
def test_a_port_needs_the_key_of_the_gateway(api: str) -> None:
    """Other programs of the machine reach the port; a socket needs none."""

    async def run() -> None:
        async with run_gateway(api) as world, aiohttp.ClientSession() as client:
            port, key = await world.gateway.serve_tcp()
            url, data = f"http://127.0.0.1:{port}{PATHS[api]}", orjson.dumps(ask())
            for headers, status in [
                ({}, 401),
                ({"x-api-key": "wrong"}, 401),
                ({"x-api-key": key}, 200),
                ({"Authorization": f"Bearer {key}"}, 200),
                ({"x-goog-api-key": key}, 200),
            ]:
                async with client.post(url, data=data, headers=headers) as response:
                    assert response.status == status
            assert key not in str([(one.headers, one.body) for one in world.endpoint.asked])

    asyncio.run(run())


def test_a_reply_of_several_choices_may_cost_several_times_as_much() -> None:
    """The limit on tokens is that of each choice."""
    claims: list[Any] = []

    class Gate:
        has_answered = True

        async def enter(self, claim: Any) -> Any:
            claims.append(claim())
            raise RefusedModel("not today")

    async def run() -> None:
        settings = ModelSettings(
            name="m", api="openai_chat", base_url="http://127.0.0.1:1/v1", key_env=None, **PRICES
        )
        model = open_model(settings, api_key=KEY, on_retry=lambda retry: None, gate=Gate())
        async with run_gateway("openai_chat", route=lambda api, name: Route(model)) as world:
            for n in (1, 4):
                body = orjson.dumps(ask(n=n))
                await world.read(body)
                world.gateway.relay.failure = None
        await model.close()
        assert claims[1].tokens - claims[0].tokens == 3 * 1000
        assert claims[0].tokens == len(body) + 1000 + 1000

    asyncio.run(run())


@pytest.mark.parametrize("api", ALL)
@pytest.mark.parametrize("name", [None, "other"])
def test_half_an_emoji_reaches_the_endpoint_as_it_came(api: str, name: str | None) -> None:
    """Node writes it when it cuts a text; servers take it. Records hold U+FFFD."""

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        return web.Response(body=orjson.dumps(reply_of(api)), content_type="application/json")

    content = orjson.dumps(ask("Cut HERE, \u00e9.")).replace(b"HERE", b"\\ud83d")

    async def run() -> None:
        async with run_gateway(api, play, name=name) as world:
            assert (await world.read(content))[0] == 200
            (asked,) = world.endpoint.asked
            if name is None:
                assert asked.body == content
            assert json.loads(asked.body) == {**json.loads(content), "model": name or "m"}
            (exchange,) = world.exchanges
            assert "Cut \ufffd, \u00e9." in orjson.dumps(exchange).decode()
            status, said = await world.read(content.replace(b"}", b",}"))
            assert (status, b"is not JSON" in said) == (400, True)

    asyncio.run(run())
