"""A gateway between an endpoint that a test plays and a client that plays the agent."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import aiohttp
import orjson
from aiohttp import web

from agent.gateway.relay import Relay, Route
from agent.gateway.server import KEEPALIVE_S, Gateway
from agent.messages.message import Event, ExchangeEvent
from agent.models.client.endpoint import open_model
from agent.models.model import ModelSettings
from agent.state.trajectory import Trajectory
from tests.fakes.fake_dialects import CHAT, MESSAGES
from tests.fakes.fake_responses import RESPONSES
from tests.fakes.fake_script import JSON, Dialect, Reply
from tests.helpers.running import PATIENCE_S

KEY = "sk-real-key-of-the-endpoint"
PATHS = {
    "openai_chat": "/v1/chat/completions",
    "anthropic_messages": "/v1/messages?beta=true",
    "openai_responses": "/v1/responses",
}
DIALECTS: dict[str, Dialect] = {
    "openai_chat": CHAT,
    "anthropic_messages": MESSAGES,
    "openai_responses": RESPONSES,
}
ALL = tuple(PATHS)


class Asked(NamedTuple):
    """A request as the endpoint got it."""

    path: str
    headers: dict[str, str]
    body: bytes


Play = Callable[[web.BaseRequest, bytes, int], Awaitable[web.StreamResponse]]
"""Answers a request with this body, which is number 1, 2, ..."""


class Endpoint:
    """An endpoint whose answers a test writes."""

    def __init__(self, play: Play) -> None:
        self.play = play
        self.asked: list[Asked] = []
        self.came = asyncio.Event()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.asked.append(Asked(request.raw_path, dict(request.headers), body))
        self.came.set()
        return await self.play(request, body, len(self.asked))


def reply_of(api: str, n: int = 1, text: str = "Done.") -> JSON:
    """The body of a reply in a dialect."""
    reply = Reply(
        key=("c", n),
        model="m",
        thought="A thought.",
        text=text,
        calls=[],
        finish="stop",
        input_tokens=100,
        cached_tokens=0,
        output_tokens=10,
    )
    body = DIALECTS[api].body(reply)
    return body | {key: 1 for key in ("created", "created_at") if key in body}  # not the clock's


def events_of(api: str, body: JSON) -> list[bytes]:
    """The reply as a stream."""
    return DIALECTS[api].events(body, {"stream_options": {"include_usage": True}})


def answer_whole(api: str, **given: Any) -> Play:
    """Answer with a whole reply, or as a stream where one is asked for."""

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        del n
        reply = reply_of(api, **given)
        if not orjson.loads(body).get("stream"):
            return web.Response(body=orjson.dumps(reply), content_type="application/json")
        return await stream(request, events_of(api, reply))

    return play


def answer_when_set(api: str) -> tuple[Play, asyncio.Event]:
    """Answers as `answer_whole` does, but only while the event is set."""
    goes_on = asyncio.Event()
    answer = answer_whole(api)

    async def play(request: web.BaseRequest, body: bytes, n: int) -> web.StreamResponse:
        await goes_on.wait()
        return await answer(request, body, n)

    return play, goes_on


async def stream(request: web.BaseRequest, events: Iterable[bytes]) -> web.StreamResponse:
    """Send events one by one."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for event in events:
        await response.write(event)
    await response.write_eof()
    return response


def ask(prompt: str = "Go.", **more: Any) -> JSON:
    """The body of a request that every dialect here takes: unknown fields are passed on."""
    messages = [{"role": "user", "content": prompt}]
    limits = {"max_tokens": 1000, "max_output_tokens": 1000}
    return {"model": "m", **limits, "messages": messages, "input": messages, **more}


class Relayed:
    """The gateway with everything around it."""

    def __init__(self, api: str, endpoint: Endpoint, gateway: Gateway) -> None:
        self.api = api
        self.endpoint = endpoint
        self.gateway = gateway
        self.events: list[Event] = []
        self.client: aiohttp.ClientSession

    @property
    def readers(self) -> int:
        """How many connections wait for replies."""
        unread = self.gateway.relay.answers._unread.values()
        return sum(answer.readers for answers in unread for answer in answers)

    @property
    def exchanges(self) -> list[ExchangeEvent]:
        return [event for event in self.events if event["kind"] == "exchange"]

    def post(self, body: Any = None, path: str | None = None, **more: Any) -> Any:
        """A request of the agent; an async context manager."""
        is_ready = isinstance(body, bytes | io.BytesIO)
        data = body if is_ready else orjson.dumps(body or ask())
        headers = {"x-api-key": "placeholder", **more.pop("headers", {})}
        url = f"http://gateway{path or PATHS[self.api]}"
        return self.client.post(url, data=data, headers=headers, **more)

    async def read(self, body: Any = None, **more: Any) -> tuple[int, bytes]:
        """The status and the whole reply to a request."""
        async with self.post(body, **more) as response:
            return response.status, await response.read()


@asynccontextmanager
async def run_gateway(
    api: str,
    play: Play | None = None,
    *,
    events: Iterable[Event] = (),
    route: Callable[[str, str], Route] | None = None,
    name: str | None = None,
    settings: dict[str, Any] | None = None,
    keepalive_s: float = KEEPALIVE_S,
    **given: Any,
) -> AsyncIterator[Relayed]:
    """A gateway for an agent with these events so far, at an endpoint where the model is called
    `name`; `given` goes to the `Relay`."""
    endpoint = Endpoint(play or answer_whole(api))
    upstream = web.Server(endpoint.handle, access_log=None)
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(upstream, "127.0.0.1", 0)
    root = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    base_url = root if api in ("anthropic_messages", "gemini") else root + "/v1"
    fields: dict[str, Any] = {"call_attempts": 2, "attempt_timeout_s": 60.0, **(settings or {})}
    model = open_model(
        ModelSettings(name="m", api=api, base_url=base_url, key_env=None, **fields),
        api_key=KEY,
        on_retry=lambda retry: None,
    )
    happened: list[Event] = list(events)
    relay = Relay(
        route=route or (lambda api, model_name: Route(model, name)),
        trajectory=Trajectory((), happened),
        journal=happened.append,
        **given,
    )
    gateway = Gateway(relay, wires=[api], keepalive_s=keepalive_s)
    world = Relayed(api, endpoint, gateway)
    world.events = happened
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "gw.sock"
            await gateway.serve_unix(path)
            async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as client:
                world.client = client
                yield world
            await gateway.close()
    finally:
        await model.close()
        listener.close()
        await upstream.shutdown(0.1)  # aiohttp waits without end where it is 0


async def until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Let other tasks run until something is true; the time is for a broken test."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
