"""Responses in the background: the agent gets an id at once, and asks for the response by it."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import Any

import orjson
import pytest
from aiohttp import web

from agent.gateway.relay import CallLimits
from tests.agent.gateway.relaying import (
    KEY,
    Asked,
    Play,
    Relayed,
    answer_when_set,
    answer_whole,
    ask,
    reply_of,
    run_gateway,
    until,
)

API = "openai_responses"


def background_request(**more: Any) -> dict[str, Any]:
    return ask(background=True, store=True, **more)


async def post(world: Relayed, body: Any) -> dict[str, Any]:
    status, raw = await world.read(body)
    assert status == 200, raw
    return dict(orjson.loads(raw))


async def request(world: Relayed, method: str, path: str) -> tuple[int, dict[str, Any]]:
    async with world.client.request(method, f"http://gateway/v1/responses/{path}") as response:
        return response.status, orjson.loads(await response.read())


async def wait_for_end(world: Relayed, id: str) -> dict[str, Any]:
    """Poll as agents do."""
    async with asyncio.timeout(60):
        while True:
            status, body = await request(world, "GET", id)
            assert status == 200
            if body["status"] not in ("queued", "in_progress"):
                return body
            await asyncio.sleep(0.01)


def read_body(asked: Asked) -> dict[str, Any]:
    return dict(orjson.loads(asked.body))


def test_an_agent_polls_a_response_that_it_has_made_in_the_background() -> None:
    async def scenario() -> None:
        play, goes_on = answer_when_set(API)
        async with run_gateway(API, play) as world:
            begun = await post(world, background_request())
            assert (begun["status"], begun["background"], begun["output"]) == ("queued", True, [])
            assert (await request(world, "GET", begun["id"]))[1]["status"] == "queued"
            goes_on.set()
            assert await wait_for_end(world, begun["id"]) == reply_of(API)
            # By the endpoint's own id, too.
            assert (await request(world, "GET", reply_of(API)["id"]))[1] == reply_of(API)
            # For the endpoint it was a call like any other.
            assert read_body(world.endpoint.asked[0]) == ask(store=True)
            assert len(world.exchanges) == len(world.endpoint.asked) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize("by_first_id", [True, False])
def test_it_is_continued_by_either_id(by_first_id: bool) -> None:
    async def scenario() -> None:
        async with run_gateway(API) as world:
            begun = await post(world, background_request())
            made = await wait_for_end(world, begun["id"])
            id = begun["id"] if by_first_id else made["id"]
            await post(world, ask("And then?", previous_response_id=id))
            assert read_body(world.endpoint.asked[1])["previous_response_id"] == made["id"]
            assert world.exchanges[1]["thread"] == world.exchanges[0]["thread"]

    asyncio.run(scenario())


def test_equal_calls_at_the_same_time_are_calls_of_their_own() -> None:
    async def scenario() -> None:
        play, goes_on = answer_when_set(API)
        async with run_gateway(API, play) as world:
            ids = {(await post(world, background_request()))["id"] for _ in range(3)}
            await until(lambda: len(world.endpoint.asked) == 3)
            goes_on.set()
            for id in ids:
                await wait_for_end(world, id)
            assert len(world.exchanges) == 3

    asyncio.run(scenario())


def test_a_call_that_is_asked_for_again_is_made_once() -> None:
    """A client whose connection broke says that it asks again."""

    async def scenario() -> None:
        play, goes_on = answer_when_set(API)
        async with run_gateway(API, play) as world:
            first = await post(world, background_request())
            await until(lambda: len(world.endpoint.asked) == 1)
            again = {"x-stainless-retry-count": "1"}
            status, raw = await world.read(background_request(), headers=again)
            goes_on.set()
            assert (status, orjson.loads(raw)["status"]) == (200, "queued")
            for id in (first["id"], orjson.loads(raw)["id"]):
                assert await wait_for_end(world, id) == reply_of(API)
            assert len(world.exchanges) == len(world.endpoint.asked) == 1

    asyncio.run(scenario())


def test_after_a_crash_the_reply_is_there_at_once_and_not_paid_again() -> None:
    async def scenario() -> None:
        async with run_gateway(API) as world:
            begun = await post(world, background_request())
            await wait_for_end(world, begun["id"])
        async with run_gateway(API, events=world.events) as later:
            status, body = await request(later, "GET", begun["id"])
            assert (status, "send its request again" in str(body)) == (404, True)
            assert (await request(later, "GET", reply_of(API)["id"]))[1] == reply_of(API)
            again = await post(later, background_request())
            assert again == reply_of(API)
            assert not later.endpoint.asked

    asyncio.run(scenario())


def test_a_failure_and_a_limit_are_said() -> None:
    async def refuse(request: web.BaseRequest, body: bytes, n: int) -> web.Response:
        error = {"error": {"message": "no such tool", "type": "invalid_request_error"}}
        return web.json_response(error, status=400)

    async def scenario() -> None:
        async with run_gateway(API, refuse) as world:
            failed = await wait_for_end(world, (await post(world, background_request()))["id"])
            assert failed["status"] == "failed"
            assert "no such tool" in failed["error"]["message"]
        async with run_gateway(API, limits=CallLimits(max_calls=1)) as world:
            await wait_for_end(world, (await post(world, background_request()))["id"])
            status, raw = await world.read(background_request(input="Again."))
            assert (status, b"max_turns" in raw) == (400, True)

    asyncio.run(scenario())


def test_what_is_cancelled_is_still_recorded() -> None:
    async def scenario() -> None:
        play, goes_on = answer_when_set(API)
        async with run_gateway(API, play) as world:
            id = (await post(world, background_request()))["id"]
            async with world.post({}, path=f"/v1/responses/{id}/cancel") as response:
                assert orjson.loads(await response.read())["status"] == "cancelled"
            goes_on.set()
            await until(lambda: len(world.exchanges) == 1)
            assert (await wait_for_end(world, id))["status"] == "cancelled"
            status, body = await request(world, "DELETE", id)
            assert (status, body["deleted"]) == (200, True)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "resp_x", 404),
        ("GET", "resp_x?stream=true", 400),
        ("GET", "resp_x/input_items", 404),
    ],
)
def test_what_cannot_be_had_is_refused(method: str, path: str, status: int) -> None:
    async def scenario() -> None:
        async with run_gateway(API) as world:
            assert (await request(world, method, path))[0] == status

    asyncio.run(scenario())


def test_a_stream_in_the_background_is_a_stream() -> None:
    async def scenario() -> None:
        async with run_gateway(API) as world:
            status, raw = await world.read(background_request(stream=True))
            assert (status, b"response.completed" in raw) == (200, True)
            assert "background" not in read_body(world.endpoint.asked[0])

    asyncio.run(scenario())


@pytest.mark.slow
def test_the_providers_own_client_polls_to_the_end() -> None:
    """As OpenAI's guide to background mode has it."""

    def polled(port: int, key: str) -> Any:
        client = import_module("openai").OpenAI(
            api_key=key, base_url=f"http://127.0.0.1:{port}/v1", max_retries=0
        )
        response = client.responses.create(model="m", input="Go.", background=True)
        first = response.status
        while response.status in {"queued", "in_progress"}:
            response = client.responses.retrieve(response.id)
        following = client.responses.create(
            model="m", input="And then?", previous_response_id=response.id
        )
        return first, response.output_text, following.status

    async def scenario() -> None:
        play: Play = answer_whole(API)

        async def slowly(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
            await asyncio.sleep(0.2)
            return await play(request, body, n)

        async with run_gateway(API, slowly) as world:
            port, key = await world.gateway.serve_tcp()
            seen = await asyncio.to_thread(polled, port, key)
            assert seen == ("queued", "Done.", "completed")
            assert world.endpoint.asked[0].headers["Authorization"] == f"Bearer {KEY}"

    asyncio.run(scenario())
