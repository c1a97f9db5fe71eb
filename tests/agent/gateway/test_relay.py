"""What reaches the endpoint, what reaches the agent, and in which order."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
import pytest
from aiohttp import web

from agent.messages.message import AgentRestartedEvent
from agent.models.client import reply_bodies, retrying
from agent.models.dialects.dialect import read_reply
from agent.models.errors import ModelError
from agent.wires.wires import WIRES
from tests.agent.gateway.relaying import (
    ALL,
    KEY,
    PATHS,
    Play,
    Relayed,
    answer_when_set,
    answer_whole,
    ask,
    events_of,
    reply_of,
    run_gateway,
    stream,
    until,
)
from tests.agent.gateway.talking import GeminiTalk, Said

LAST = {
    "openai_chat": b"[DONE]",
    "anthropic_messages": b"message_stop",
    "openai_responses": b"response.completed",
}
"""What the last event of a stream holds."""
PASSING = {
    "openai_chat": b'"code":"server_error"',
    "anthropic_messages": b'"type":"api_error"',
    "openai_responses": b'"code":"server_error"',
}
"""What an error in a stream holds that may pass."""
EACH = pytest.mark.parametrize("api", ALL)


@EACH
def test_a_request_arrives_as_it_was_written(api: str) -> None:
    """The endpoint gets the same bytes, the headers of the API, and the real key."""
    body = b'{ "model" : "m",\n"max_tokens": 10, "x_new": 1e2, "messages": [{"role":"user",' + (
        b'"content":"\\u00e9 \xc3\xa9"}]}'
    )
    headers = {"anthropic-beta": "a-1,b-2", "anthropic-version": "2023-06-01", "Cookie": "c=1"}

    async def play() -> None:
        async with run_gateway(api) as world:
            status, said = await world.read(body, headers={**headers, "Authorization": "Bearer x"})
            assert (status, orjson.loads(said)) == (200, reply_of(api))
            (request,) = world.endpoint.asked
            assert request.body == body
            assert request.path == PATHS[api]
            given = {name.lower(): value for name, value in request.headers.items()}
            assert KEY in given.get("x-api-key", given.get("authorization", ""))
            assert "placeholder" not in str(given)
            assert "Bearer x" not in given.values()
            assert "cookie" not in given
            if api == "anthropic_messages":
                assert given["anthropic-beta"] == "a-1,b-2"
                assert given["anthropic-version"] == "2023-06-01"

    asyncio.run(play())


@EACH
def test_a_stream_arrives_as_it_was_sent(api: str) -> None:
    """The agent gets the same bytes, comments included, before the endpoint has sent the last."""
    events = events_of(api, reply_of(api))
    events.insert(1, b": still here\r\n\r\n")
    goes_on = asyncio.Event()

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events[0])
        await goes_on.wait()
        for event in events[1:]:
            await response.write(event)
        return response

    async def run() -> None:
        async with (
            run_gateway(api, play, is_live=True) as world,
            world.post(ask(stream=True)) as response,
        ):
            assert response.content_type == "text/event-stream"
            assert await response.content.readexactly(len(events[0])) == events[0]
            goes_on.set()
            assert await response.read() == b"".join(events[1:])
            assert world.exchanges[0]["reply"]["message"]["content"] == "Done."

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_reply_ends_only_when_it_is_on_disk(api: str, *, is_stream: bool) -> None:
    """A whole reply, or what ends a stream, waits until the journal has the call."""
    on_disk = asyncio.Event()
    waits = asyncio.Event()

    async def kept() -> None:
        waits.set()
        await on_disk.wait()

    async def run() -> None:
        async with run_gateway(api, wait_until_persisted=kept) as world:
            reading = asyncio.create_task(world.read(ask(stream=is_stream)))
            await waits.wait()
            assert [event["kind"] for event in world.events] == ["exchange"]
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(reading), 0.05)
            assert not reading.done()
            on_disk.set()
            status, said = await reading
            assert status == 200
            assert said.endswith(events_of(api, world.exchanges[0]["body"])[-1]) or not is_stream

    asyncio.run(run())


@EACH
def test_a_stream_stops_before_its_last_event_until_it_is_on_disk(api: str) -> None:
    """What tells the agent that the reply is complete is not sent before that is safe."""
    on_disk = asyncio.Event()

    async def run() -> None:
        async with (
            run_gateway(
                api, wait_until_persisted=on_disk.wait, keepalive_s=0.01, is_live=True
            ) as world,
            world.post(ask(stream=True)) as response,
        ):
            seen = b""
            while seen.count(b"Done.") == 0 or not world.exchanges:
                seen += await response.content.readany()
            for _ in range(3):
                seen += await response.content.readany()
            assert LAST[api] not in seen
            on_disk.set()
            assert LAST[api] in await response.read()

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_whose_agent_is_gone_is_completed_and_its_repetition_joins_it(
    api: str, *, is_stream: bool
) -> None:
    """The endpoint is asked once, whether the agent asks again during the call or after it."""
    play, goes_on = answer_when_set(api)
    body = ask(stream=is_stream)

    async def leave(world: Relayed) -> None:
        reading = asyncio.create_task(world.read(body))
        await until(lambda: world.gateway.relay.in_flight == 1)
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading
        await until(lambda: world.readers == 0)

    async def run() -> None:
        async with run_gateway(api, play) as world:
            await leave(world)
            await leave(world)
            again = asyncio.create_task(world.read(body))
            await until(lambda: world.readers == 1)
            goes_on.set()
            first = await again
            assert first[0] == 200
            assert len(world.endpoint.asked) == len(world.exchanges) == 1
            goes_on.clear()
            await leave(world)
            goes_on.set()
            await until(lambda: len(world.exchanges) == 2)
            await until(lambda: world.gateway.relay.in_flight == 0)
            assert (await world.read(body))[0] == 200
            assert len(world.endpoint.asked) == len(world.exchanges) == 2

    asyncio.run(run())


@EACH
def test_equal_calls_of_living_connections_are_calls_of_their_own(api: str) -> None:
    """Two at the same time, and one after a reply that was read; a stated repetition joins."""
    play, goes_on = answer_when_set(api)

    async def run() -> None:
        async with run_gateway(api, play) as world:
            both = [asyncio.create_task(world.read()) for _ in range(2)]
            await until(lambda: len(world.endpoint.asked) == 2)
            repeated = world.read(headers={"x-stainless-retry-count": "1"})
            both.append(asyncio.create_task(repeated))
            await until(lambda: world.readers == 3)
            goes_on.set()
            assert [status for status, _ in await asyncio.gather(*both)] == [200, 200, 200]
            assert (await world.read())[0] == 200
            assert len(world.endpoint.asked) == len(world.exchanges) == 3

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_stream", [False, True])
def test_after_a_restart_equal_calls_are_answered_from_the_journal(
    api: str, *, is_stream: bool
) -> None:
    """Each recorded call answers one equal call; the endpoint hears only of what is new."""

    async def run() -> None:
        async with run_gateway(api) as world:
            first = [await world.read(ask(stream=is_stream)) for _ in range(2)]
            events = world.events
        restarted = AgentRestartedEvent(kind="agent_restarted", at=1.0)
        async with run_gateway(api, events=[*events, restarted]) as world:
            again = [await world.read(ask(stream=is_stream)) for _ in range(3)]
            assert [status for status, _ in again] == [200, 200, 200]
            assert len(world.endpoint.asked) == 1
            kinds = [event["kind"] for event in world.events[3:]]
            assert kinds == ["answered", "answered", "exchange"]
            if not is_stream:
                assert orjson.loads(again[0][1]) == orjson.loads(first[0][1])

    asyncio.run(run())


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [429, 500, 529])
def test_passing_failures_before_the_first_byte_are_waited_out(
    api: str, status: int, *, is_stream: bool
) -> None:
    """The agent sees one good reply; the journal has one call."""
    answer = answer_whole(api)

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        if n == 1:
            return web.json_response({}, status=status, headers={"retry-after-ms": "1"})
        return await answer(request, content, n)

    async def run() -> None:
        async with run_gateway(api, play) as world:
            assert (await world.read(ask(stream=is_stream)))[0] == 200
            assert len(world.endpoint.asked) == 2
            assert len(world.exchanges) == 1

    asyncio.run(run())


def cut_first_stream(api: str, how: str) -> Play:
    """Ends the first stream in its middle; further ones are whole."""
    answer = answer_whole(api)

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        if n > 1:
            return await answer(request, content, n)
        events = events_of(api, reply_of(api, text="Half of it."))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(events[: len(events) // 2]))
        if how == "reset":
            request.transport.abort()  # type: ignore[union-attr]
        elif how == "error":
            error = {"type": "error", "error": {"type": "overloaded_error", "message": "Busy."}}
            await response.write(b"event: error\ndata: " + orjson.dumps(error) + b"\n\n")
        return response

    return play


@EACH
@pytest.mark.parametrize("how", ["reset", "end", "error"])
def test_a_stream_that_is_cut_is_asked_for_again_before_the_agent_sees_any_of_it(
    api: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent gets one good reply; the journal has one call."""
    monkeypatch.setattr(retrying._Patience, "pause_s", lambda *given: 0.0)

    async def run() -> None:
        async with run_gateway(api, cut_first_stream(api, how)) as world:
            said = b"".join(events_of(api, reply_of(api)))
            assert await world.read(ask(stream=True)) == (200, said)
            assert len(world.endpoint.asked) == 2
            assert len(world.exchanges) == 1
            assert not world.gateway.relay.ended.is_set()

    asyncio.run(run())


LOOSE = {
    "no last empty line": lambda events: b"".join(events).rstrip(b"\n"),
    "single line ends": lambda events: b"".join(events).replace(b"\n\n", b"\n"),
    "empty data": lambda events: b"data: \n\n".join(events),
    "wrapped comments": lambda events: b"data: : PROCESSING\n\n".join(events),
    "an error after it": lambda events: b"".join(events) + b'data: {"error": {"message": "x"}}\n\n',
}
"""Forms of a stream that stricter readers refuse."""


@EACH
@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize("form", LOOSE)
def test_a_stream_in_a_looser_form_is_mended_for_the_agent(
    api: str, form: str, is_live: bool
) -> None:
    """It is paid for: the agent reads the same reply that the record has."""
    body = LOOSE[form](events_of(api, reply_of(api)))

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return await stream(request, [body])

    async def run() -> None:
        async with run_gateway(api, play, is_live=is_live) as world:
            status, said = await world.read(ask(stream=True))
            assert status == 200
            assert len(world.endpoint.asked) == 1
            assert world.exchanges[0]["reply"]["message"]["content"] == "Done."
            assembly = WIRES[api].assembly()
            for event in said.removesuffix(b"\n\n").split(b"\n\n"):
                lines = event.split(b"\n")
                data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data")]
                assert len(data) == 1 or event == b":"
                for one in data:
                    if one != b"[DONE]":
                        assembly.add(orjson.loads(one))
            assert read_reply(api, assembly.finish()).message["content"] == "Done."

    asyncio.run(run())


@EACH
def test_a_stream_that_is_cut_after_its_first_byte_is_not_made_again(api: str) -> None:
    """The agent gets an error inside the stream; when it asks again, that is another call."""
    events = events_of(api, reply_of(api))
    answer = answer_whole(api)
    is_read = asyncio.Event()

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        if n > 1:
            return await answer(request, content, n)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(events[0])
        await is_read.wait()
        request.transport.abort()  # type: ignore[union-attr]
        return response

    async def run() -> None:
        async with run_gateway(api, play, is_live=True) as world:
            reading = asyncio.create_task(world.read(ask(stream=True)))
            await until(lambda: world.readers == 1)
            is_read.set()
            status, said = await reading
            assert status == 200
            assert said.startswith(events[0])
            assert b'"error"' in said[len(events[0]) :]
            assert PASSING[api] in said  # agents repeat calls that fail so
            assert events[-1] not in said
            assert not world.exchanges
            assert len(world.endpoint.asked) == 1
            assert (await world.read(ask(stream=True)))[1] == b"".join(events)
            assert len(world.exchanges) == 1

    asyncio.run(run())


@EACH
def test_a_stream_that_ends_early_in_good_order_is_not_made_again_either(api: str) -> None:
    """Its parts have gone to the agent: those of a second reply would follow them."""
    events = events_of(api, reply_of(api))

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return await stream(request, events[:1])

    async def run() -> None:
        async with run_gateway(api, play, is_live=True) as world:
            status, said = await world.read(ask(stream=True))
            assert (status, said.count(events[0])) == (200, 1)
            assert PASSING[api] in said
            assert len(world.endpoint.asked) == 1
            assert not world.exchanges

    asyncio.run(run())


@EACH
@pytest.mark.parametrize(("status", "kind"), [(500, "overloaded"), (401, "auth")])
def test_what_ends_the_attempt_stops_the_agent_and_is_raised(
    api: str, status: int, kind: str
) -> None:
    """Given up or rejected: 400 for this call and all later ones; the runner gets the error."""

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return web.json_response({}, status=status, headers={"retry-after-ms": "1"})

    async def run() -> None:
        async with run_gateway(api, play) as world:
            for _ in range(2):
                code, said = await world.read()
                assert code == 400
                assert "error" in orjson.loads(said)
            assert len(world.endpoint.asked) == (2 if status == 500 else 1)
            assert world.gateway.relay.ended.is_set()
            assert world.gateway.relay.ending is None

    with pytest.raises(ModelError) as raised:
        asyncio.run(run())
    assert raised.value.kind == kind


@EACH
def test_what_the_endpoint_refuses_the_agent_reads_itself(api: str) -> None:
    """Its own words and status: agents shorten their history when it no longer fits."""
    error = {"error": {"message": "prompt is too long: 9 tokens > 8", "type": "invalid_request"}}

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return web.json_response(error, status=413)

    async def run() -> None:
        async with run_gateway(api, play) as world:
            for is_stream in (False, True):
                status, said = await world.read(ask(stream=is_stream))
                assert (status, orjson.loads(said)) == (413, error)
            assert world.gateway.relay.last_error is not None
            assert world.gateway.relay.last_error.kind == "context_exceeded"
            assert not world.gateway.relay.ended.is_set()
            world.endpoint.play = answer_whole(api)
            assert (await world.read())[0] == 200
            assert world.gateway.relay.last_error is None

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("page", [b"<html><h1>Entity too large</h1></html>", b"Entity too large"])
def test_a_page_with_which_a_proxy_refuses_is_an_error_of_the_api(
    api: str, page: bytes, is_stream: bool
) -> None:
    """Clients show the message of an error only in the form that they know."""

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return web.Response(status=413, body=page, content_type="text/html")

    async def run() -> None:
        async with run_gateway(api, play) as world:
            status, said = await world.read(ask(stream=is_stream))
            assert status == 413
            assert "Entity too large" in orjson.loads(said)["error"]["message"]

    asyncio.run(run())


@pytest.mark.slow
@EACH
def test_a_reply_that_was_paid_for_and_cannot_be_read_is_on_record(api: str) -> None:
    """It is asked for again, and its price counts."""
    answer = answer_whole(api)

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        if n > 1:
            return await answer(request, content, n)
        broken = reply_of(api) | {"choices": [], "content": None, "output": None}
        return web.json_response(broken)

    async def run() -> None:
        async with run_gateway(api, play) as world:
            assert (await world.read())[0] == 200
            assert [event["kind"] for event in world.events] == ["reply", "exchange"]
            assert world.events[0].get("discarded") == "unreadable"

    asyncio.run(run())


def test_a_stream_is_answered_as_one_by_an_endpoint_without_streams() -> None:
    """Some servers answer in one piece whatever was asked."""
    api = "openai_chat"

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return web.json_response(reply_of(api))

    async def run() -> None:
        async with run_gateway(api, play) as world:
            _, said = await world.read(ask(stream=True))
            assert said.startswith(b"data: ")
            assert said.endswith(b"data: [DONE]\n\n")
            assert b"Done." in said

    asyncio.run(run())


def test_a_reader_that_never_reads_holds_up_nothing() -> None:
    """The call is recorded; the endpoint is not kept waiting."""
    api = "openai_chat"
    body = reply_of(api, text="x" * 1_000_000)
    events = [events_of(api, body)[0]] * 20 + events_of(api, body)[1:]

    async def play(request: web.BaseRequest, content: bytes, n: int) -> web.StreamResponse:
        return await stream(request, events)

    async def run() -> None:
        async with run_gateway(api, play) as world, world.post(ask(stream=True)) as response:
            assert response.status == 200
            await until(lambda: len(world.exchanges) == 1)

    asyncio.run(run())


def test_gemini_names_model_and_stream_in_the_path() -> None:
    """Its reply arrives part by part, too; the key of the agent is not passed on."""
    talk = GeminiTalk()
    talk.say("Go.")
    reply = talk.reply(Said("Done.", thought="Hm."))
    first, last = WIRES["gemini"].write_stream(reply)
    path = "/v1beta/models/gemini-9:streamGenerateContent?alt=sse&key=placeholder"

    async def run() -> None:
        may_end = asyncio.Event()

        async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(first)
            await may_end.wait()
            await response.write(last)
            await response.write_eof()
            return response

        async with run_gateway("gemini", play, name="m", is_live=True) as world:
            async with world.post(talk.body(), path) as response:
                assert response.content_type == "text/event-stream"
                assert await response.content.readexactly(len(first)) == first
                may_end.set()
                assert (await response.read()).strip() == last.strip()
            [sent] = world.endpoint.asked
            assert sent.path == "/v1beta/models/m:streamGenerateContent?alt=sse"
            assert sent.headers["x-goog-api-key"] == KEY
            [exchange] = world.exchanges
            assert (exchange["dialect"], exchange["asked"]) == ("gemini", "gemini-9")
            assert exchange["reply"]["message"]["reasoning"] == "Hm."

    asyncio.run(asyncio.wait_for(run(), 30))


@EACH
def test_a_whole_reply_that_is_not_valid_json_is_repaired_for_the_agent(api: str) -> None:
    spoilt = orjson.dumps(reply_of(api)).replace(b"Done.", b"Do\tne\xff")

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        return web.Response(body=spoilt, content_type="application/json")

    async def run() -> None:
        async with run_gateway(api, play) as world:
            _, said = await world.read(ask())
            assert orjson.loads(said) == reply_of(api, text="Do\tne\ufffd")
            assert world.exchanges[0]["reply"]["message"]["content"] == "Do\tne\ufffd"

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_live", [False, True])
def test_a_stream_that_the_endpoint_leaves_open_ends_for_the_agent(
    api: str, is_live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the last event of its API, and with all that the record has."""
    monkeypatch.setattr(reply_bodies, "_COUNTS_S", 0.05)
    events = events_of(api, reply_of(api))
    while len(events) > 1 and LAST[api] in events[-1] and api != "openai_responses":
        events.pop()
    goes_on = asyncio.Event()

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(event)
        await goes_on.wait()
        return response

    async def run() -> None:
        async with run_gateway(api, play, is_live=is_live) as world:
            _, said = await world.read(ask(stream=True))
            goes_on.set()
            assert said.startswith(b"".join(events))
            assert LAST[api] in said[len(b"".join(events[:-1])) :]
            assert len(world.endpoint.asked) == 1
            assert world.exchanges[0]["reply"]["message"]["content"] == "Done."

    asyncio.run(run())


@EACH
@pytest.mark.parametrize("is_live", [False, True])
def test_an_agent_that_asks_for_no_stream_gets_none(api: str, is_live: bool) -> None:
    """Some endpoints stream all the same."""

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        return await stream(request, events_of(api, reply_of(api)))

    async def run() -> None:
        async with run_gateway(api, play, is_live=is_live) as world:
            status, said = await world.read(ask())
            assert status == 200
            assert len(world.endpoint.asked) == 1
            (exchange,) = world.exchanges
            assert orjson.loads(said) == exchange["body"]
            assert exchange["reply"]["message"]["content"] == "Done."

    asyncio.run(run())


@EACH
def test_a_reply_with_an_unknown_ending_is_passed_on_and_recorded(api: str) -> None:
    """The agent has its parts already, and is not asked to pay for them again."""
    reply = reply_of(api)
    match api:
        case "openai_chat":
            reply["choices"][0]["finish_reason"] = "weary"
        case "anthropic_messages":
            reply["stop_reason"] = "weary"
        case _:
            reply |= {"status": "incomplete", "incomplete_details": {"reason": "weary"}}

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    async def run() -> None:
        async with run_gateway(api, play) as world:
            assert (await world.read(ask()))[0] == 200
            assert len(world.endpoint.asked) == 1
            assert "weary" in str(world.exchanges[0]["reply"]["extra"])

    asyncio.run(run())


SESSION = "0123456789abcdef0123456789abcdef"


def conversations_of(world: Relayed) -> list[str]:
    """The ids of the requests at the endpoint; each has one alone."""
    names = ("x-session-id", "x-session-affinity", "x-smg-routing-key")
    asked = [
        {name.lower(): value for name, value in one.headers.items()} for one in world.endpoint.asked
    ]
    ids = [{headers[name] for name in names} for headers in asked]
    assert all(len(one) == 1 for one in ids)
    return [one.pop() for one in ids]


@EACH
def test_each_thread_of_an_agent_has_one_id_over_turns_and_starts(api: str) -> None:
    async def play() -> None:
        async with run_gateway(api, conversation=SESSION) as world:
            await world.read(ask("Go."))
            said = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Done."}]
            said.append({"role": "user", "content": "On."})
            await world.read(ask(messages=said, input=said))
            await asyncio.gather(world.read(ask("A title.")), world.read(ask("A title?")))
            ids = conversations_of(world)
            events = world.events
        assert ids[0] == ids[1]
        assert len({SESSION, *ids}) == 4
        assert all(8 <= len(id) <= 64 and id.isalnum() for id in ids)
        restarted = AgentRestartedEvent(kind="agent_restarted", at=1.0)
        said += [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "More."}]
        async with run_gateway(api, events=[*events, restarted], conversation=SESSION) as world:
            await world.read(ask(messages=said, input=said))
            assert conversations_of(world) == ids[:1], "the same after a restart"
        async with run_gateway(api, conversation=SESSION[::-1]) as world:
            await world.read(ask("Go."))
            assert conversations_of(world) != ids[:1], "another sample"

    asyncio.run(play())


@EACH
@pytest.mark.parametrize("name", ["X-Session-Affinity", "session_id", "x-claude-code-session-id"])
def test_an_id_that_an_agent_sends_itself_is_kept(api: str, name: str) -> None:
    async def play() -> None:
        async with run_gateway(api, conversation=SESSION) as world:
            await world.read(ask(), headers={name: "my-own-session"})
            (asked,) = world.endpoint.asked
            assert {key.lower(): value for key, value in asked.headers.items()}[name.lower()] == (
                "my-own-session"
            )
            assert conversations_of(world) == ["my-own-session"]

    asyncio.run(play())


@EACH
def test_a_cache_key_is_added_where_the_api_takes_one_and_the_agent_gives_none(api: str) -> None:
    settings = {"cache_key_apis": ("openai_chat", "openai_responses")}

    async def play() -> None:
        async with run_gateway(api, conversation=SESSION, settings=settings) as world:
            await world.read(ask())
            await world.read(ask("Other.", prompt_cache_key="its own"))
            keys = [orjson.loads(one.body).get("prompt_cache_key") for one in world.endpoint.asked]
            ours = None if api == "anthropic_messages" else conversations_of(world)[0]
            assert keys == [ours, "its own"]

    asyncio.run(play())
