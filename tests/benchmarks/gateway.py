"""CPU per model call that the gateway relays, compared with an ordinary call of ours.

    python -m tests.benchmarks.gateway [--calls 4] [--rounds 5] [--agents 16] [--turns 5 100]

An endpoint in a process of its own answers each call with some thought and a tool call; the agents
are a scripted client in another process, which sends its whole history with each call through the
socket of its gateway. This process, whose CPU is measured, relays, records and journals these
calls, and in turns makes the same calls itself, as a conversation of ours does. In each round the
conversations first grow to their length; only the calls that follow are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from agent.gateway.relay import Relay, Route
from agent.gateway.server import Gateway
from agent.messages.message import Event, Message
from agent.models.client.endpoint import open_model
from agent.models.client.retrying import RetryingModel
from agent.models.model import ModelSettings, Request, ignore_event
from agent.state.events import Clock, reply_event, result_event
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.process import collect_garbage_rarely
from batch_trajectories.records.journal import JournalWriter
from tests.fakes.fake_dialects import CHAT, MESSAGES
from tests.fakes.fake_script import JSON, Reply
from toolsets.tool import ToolResult

THOUGHT = "I should look at the file first, and then at its neighbours. " * 8
RESULT = "a line of the file that was read\n" * 12
SYSTEM = "You are an agent that works with files. Be brief. " * 40
NAME, ARGUMENTS = "read_file", '{"path": "src/notes.txt", "lines": [1, 200]}'
SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}
DIALECTS = {
    "openai_chat": (CHAT, "/v1/chat/completions"),
    "anthropic_messages": (MESSAGES, "/v1/messages"),
}
_PIECE = 16
"""Characters of the thought in each event of a stream."""


def _events(api: str, body: JSON) -> list[bytes]:
    """A stream in which the thought comes in pieces."""
    field = b"reasoning_content" if api == "openai_chat" else b"thinking"
    whole = b'"%b":"%b"' % (field, THOUGHT.encode())
    events = []
    for event in DIALECTS[api][0].events(body, {"stream_options": {"include_usage": True}}):
        if whole not in event:
            events.append(event)
            continue
        for at in range(0, len(THOUGHT), _PIECE):
            piece = b'"%b":"%b"' % (field, THOUGHT[at : at + _PIECE].encode())
            events.append(event.replace(whole, piece))
    return events


def serve(ready: Connection) -> None:
    """Be the endpoint; sends its port through `ready`."""
    count = 0

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal count
        count += 1
        sent = orjson.loads(await request.read())
        api = "anthropic_messages" if request.path.endswith("messages") else "openai_chat"
        call = {"id": f"{count}", "name": NAME, "arguments": ARGUMENTS}
        reply = Reply(
            key=("c", count),
            model="m",
            thought=THOUGHT,
            text="",
            calls=[call],
            finish="tool_calls",
            input_tokens=900,
            cached_tokens=800,
            output_tokens=90,
        )
        body = DIALECTS[api][0].body(reply)
        if not sent.get("stream"):
            return web.Response(body=orjson.dumps(body), content_type="application/json")
        content = b"".join(_events(api, body))
        return web.Response(body=content, content_type="text/event-stream")

    async def run() -> None:
        server = web.Server(answer, access_log=None)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        ready.send(listener.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    asyncio.run(run())


def be_agents(orders: Connection) -> None:
    """Be the agents: each order gives dialect, kind, sockets, and how many calls to make."""
    asyncio.run(_agents(orders))


async def _agents(orders: Connection) -> None:
    histories: dict[str, JSON] = {}
    async with AsyncExitStack() as stack:
        clients: dict[str, aiohttp.ClientSession] = {}
        while (order := await asyncio.to_thread(orders.recv)) is not None:
            api, is_stream, sockets, calls = order
            for socket in sockets:
                if socket not in clients:
                    session = aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket))
                    clients[socket] = await stack.enter_async_context(session)
                    histories[socket] = _opening(api, is_stream=is_stream)
            await asyncio.gather(
                *(_work(api, clients[one], histories[one], calls) for one in sockets)
            )
            orders.send("done")


def _opening(api: str, *, is_stream: bool) -> JSON:
    function = {"name": NAME, "description": "Read a text file.", "parameters": SCHEMA}
    tools: list[JSON] = [{"type": "function", "function": {**function, "name": NAME}}] * 1
    body: JSON = {"model": "m", "max_tokens": 8000, "messages": [], "stream": is_stream}
    if api == "anthropic_messages":
        body["system"] = SYSTEM
        tools = [{"name": NAME, "description": "Read a text file.", "input_schema": SCHEMA}]
    else:
        body["messages"].append({"role": "system", "content": SYSTEM})
        body |= {"stream_options": {"include_usage": True}} if is_stream else {}
    body["messages"].append({"role": "user", "content": "Look at all files."})
    return body | {"tools": tools}


async def _work(api: str, client: aiohttp.ClientSession, body: JSON, calls: int) -> None:
    """Make calls, each with the reply of the last one and a result."""
    path = DIALECTS[api][1]
    for _ in range(calls):
        async with client.post("http://gateway" + path, data=orjson.dumps(body)) as response:
            content = await response.read()
            assert response.status == 200, content
        # The id is all that differs from reply to reply.
        mark = b'"id":"call_' if api == "openai_chat" else b'"id":"toolu_'
        id = mark[6:].decode() + content.partition(mark)[2].partition(b'"')[0].decode()
        if api == "openai_chat":
            function = {"name": NAME, "arguments": ARGUMENTS}
            call = {"id": id, "type": "function", "function": function}
            body["messages"] += [
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": id, "content": RESULT},
            ]
            continue
        thought = {"type": "thinking", "thinking": THOUGHT, "signature": "s" * 64}
        use = {"type": "tool_use", "id": id, "name": NAME, "input": orjson.loads(ARGUMENTS)}
        result = {"type": "tool_result", "tool_use_id": id, "content": RESULT}
        body["messages"] += [
            {"role": "assistant", "content": [thought, use]},
            {"role": "user", "content": [result]},
        ]


class Bench:
    """Makes and measures calls of both kinds in one dialect."""

    def __init__(
        self, api: str, root: str, folder: Path, orders: Connection, *, is_stream: bool
    ) -> None:
        self._api = api
        self._is_stream = is_stream
        self._folder = folder
        self._orders = orders
        self._root = root + ("" if api == "anthropic_messages" else "/v1")
        self._journal = JournalWriter(folder, 0, on_storage_error=_raise)
        self._count = 0

    def _record(self, trajectory: Trajectory, task: str, event: Event) -> None:
        self._journal.append(task, "d", event, assignment=1, position=0)
        trajectory.apply(event)

    def _model(self) -> RetryingModel:
        settings = ModelSettings(name="m", api=self._api, base_url=self._root, key_env=None)
        return open_model(settings, api_key="no-key", on_retry=print)

    async def relayed(self, agents: int, turns: int, calls: int) -> float:
        """CPU seconds per relayed call of conversations with this many turns."""
        model = self._model()
        gateways, sockets = [], []
        for _ in range(agents):
            self._count += 1
            task = f"g{self._count}"
            trajectory = Trajectory(())
            journal = partial(self._journal.append, task, "d", assignment=1, position=0)
            relay = Relay(
                route=lambda api, name: Route(model), trajectory=trajectory, journal=journal
            )
            gateway = Gateway(relay, wires=[self._api])
            path = self._folder / f"{task}.sock"
            await gateway.serve_unix(path)
            gateways.append(gateway)
            sockets.append(str(path))
        spent = await self._measured(
            lambda count: self._order(sockets, count), turns, calls, agents
        )
        for gateway in gateways:
            await gateway.close()
        await model.close()
        return spent

    async def ordinary(self, agents: int, turns: int, calls: int) -> float:
        """CPU seconds per call of our own conversations with this many turns."""
        model = self._model()
        opening = [
            Message(role="system", content=SYSTEM),
            Message(role="user", content="Look at all files."),
        ]
        conversations = [Trajectory(opening) for _ in range(agents)]
        spent = await self._measured(
            lambda count: asyncio.gather(
                *(self._converse(model, n, one, count) for n, one in enumerate(conversations))
            ),
            turns,
            calls,
            agents,
        )
        await model.close()
        return spent

    async def _measured(
        self, go: Callable[[int], Awaitable[Any]], turns: int, calls: int, agents: int
    ) -> float:
        await go(turns)
        started = time.process_time()
        await go(calls)
        return (time.process_time() - started) / (calls * agents)

    async def _order(self, sockets: list[str], calls: int) -> None:
        self._orders.send((self._api, self._is_stream, sockets, calls))
        await asyncio.to_thread(self._orders.recv)

    async def _converse(self, model: RetryingModel, n: int, t: Trajectory, calls: int) -> None:
        function = {"name": NAME, "description": "Read a text file.", "parameters": SCHEMA}
        tools = [{"type": "function", "function": function}]
        record = partial(self._record, t, f"o{n}")
        for _ in range(calls):
            clock = Clock()
            on_delta = ignore_event if self._is_stream else None
            completion = await model.complete(Request(t.messages, tools, on_delta=on_delta))
            record(reply_event(t.turns + 1, completion, clock, discarded=None))
            (call,) = t.last_calls()
            record(result_event(t.turns, 0, call, ToolResult(RESULT), Clock()))

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()


def _raise(error: Exception) -> None:
    raise error


async def measure(api: str, root: str, orders: Connection, args: argparse.Namespace) -> None:
    """Print the figures of one dialect."""
    for is_stream in (False, True):
        for turns in args.turns:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(api, root, Path(folder), orders, is_stream=is_stream)
                pairs = []
                for _ in range(args.rounds):
                    ours = await bench.ordinary(args.agents, turns, args.calls)
                    theirs = await bench.relayed(args.agents, turns, args.calls)
                    pairs.append((ours, theirs))
                bench.close()
            ours, theirs = (statistics.median(times) * 1000 for times in zip(*pairs, strict=True))
            ratios = sorted(relayed / own for own, relayed in pairs)
            kind = "streamed" if is_stream else "whole"
            print(
                f"{api:<19}{kind:<9}{turns:>4} turns  ordinary {ours:6.3f} ms  relayed "
                f"{theirs:6.3f} ms  {statistics.median(ratios):5.2f} x "
                f"({ratios[0]:.2f} to {ratios[-1]:.2f})",
                flush=True,
            )


def main() -> None:
    """Measure all dialects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=4, help="measured calls of each conversation")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--agents", type=int, default=16, help="conversations at a time")
    parser.add_argument("--turns", type=int, nargs="+", default=[5, 100])
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=[*DIALECTS])
    args = parser.parse_args()
    collect_garbage_rarely()  # as workers do
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    endpoint = context.Process(target=serve, args=(there,), daemon=True)
    endpoint.start()
    orders, theirs = context.Pipe()
    agents = context.Process(target=be_agents, args=(theirs,), daemon=True)
    agents.start()
    try:
        root = f"http://127.0.0.1:{here.recv()}"
        for api in args.dialects:
            asyncio.run(measure(api, root, orders, args))
        orders.send(None)
    finally:
        for process in (agents, endpoint):
            process.terminate()
            process.join()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"largest memory of this process: {peak:.0f} MiB")


if __name__ == "__main__":
    main()
