"""CPU per model call in this process, compared with aiohttp and the SDKs.

    python -m tests.benchmarks.call_cost [--calls 256] [--rounds 5] [--in_flight 64]

A loopback endpoint in its own process gives every call the same reply. For each dialect, and for
histories of 5 and 30 turns, the same call is made by our adapter as runs make it, and by three
floors: bare aiohttp and orjson, the SDK's low-level post, and the SDK's typed create. They take
turns in every round; printed are the medians of CPU per call, and their ratio to the first floor.
`reading` is what of ours it takes to build the body and to read the reply.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import aiohttp
import orjson

from agent.messages.message import Message
from agent.models.client.endpoint import open_model
from agent.models.dialects import anthropic_messages, openai_chat, openai_responses
from agent.models.model import ModelSettings, Request

THOUGHT, TEXT = "I should look at the file first. " * 12, "Let me look at it."
RESULT = "a line of the file that was read\n" * 12
NAME, ARGUMENTS = "read_file", {"path": "notes.txt"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"{NAME}{n or ''}",
            "description": "Read a text file of the workspace.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for n in range(6)
]
_CHAT_CALL = {"name": NAME, "arguments": orjson.dumps(ARGUMENTS).decode()}
_REPLIES: Mapping[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": TEXT,
                    "reasoning_content": THOUGHT,
                    "tool_calls": [{"id": "a", "type": "function", "function": _CHAT_CALL}],
                },
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
    },
    "/v1/messages": {
        "id": "c",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [
            {"type": "thinking", "thinking": THOUGHT, "signature": "s" * 200},
            {"type": "text", "text": TEXT},
            {"type": "tool_use", "id": "a", "name": NAME, "input": ARGUMENTS},
        ],
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {"input_tokens": 9, "output_tokens": 9},
    },
    "/v1/responses": {
        "id": "c",
        "object": "response",
        "created_at": 1,
        "model": "m",
        "status": "completed",
        "output": [
            {
                "type": "reasoning",
                "id": "r",
                "summary": [{"type": "summary_text", "text": THOUGHT}],
                "encrypted_content": "e" * 400,
            },
            {
                "type": "message",
                "id": "m",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": TEXT, "annotations": []}],
            },
            {"type": "function_call", "id": "f", "call_id": "a", **_CHAT_CALL},
        ],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {"input_tokens": 9, "output_tokens": 9, "total_tokens": 18},
    },
}
DIALECTS: Mapping[str, tuple[ModuleType, str]] = {
    "openai_chat": (openai_chat, "/v1/chat/completions"),
    "anthropic_messages": (anthropic_messages, "/v1/messages"),
    "openai_responses": (openai_responses, "/v1/responses"),
}


class _Fixed(asyncio.Protocol):
    """One connection of the endpoint: any request to a path gets the path's reply."""

    def connection_made(self, transport: Any) -> None:
        """See `asyncio.Protocol`."""
        self._transport = transport
        self._seen = b""

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._seen += data
        head, end, body = self._seen.partition(b"\r\n\r\n")
        if not end:
            return
        if len(body) < int(head.lower().partition(b"content-length:")[2].split()[0]):
            return
        self._seen = b""
        content = orjson.dumps(_REPLIES[head.split(b" ")[1].decode()])
        self._transport.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
            % (len(content), content)
        )


def serve(ready: Connection) -> None:
    """Be the endpoint; sends its port through `ready`, and ends with the process that started."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Fixed, "127.0.0.1", 0)
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def history(dialect: ModuleType, path: str, turns: int) -> list[Message]:
    """A conversation whose turn number `turns` is to be asked for, as a journal gives it back."""
    reply = dialect.read_reply(orjson.dumps(_REPLIES[path])).message
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="Go.")]
    for _ in range(turns - 1):
        messages.append(orjson.loads(orjson.dumps(reply)))
        messages.append(
            Message(role="tool", tool_call_id="a", name=NAME, content=RESULT, is_error=False)
        )
    return messages


async def cpu_ms(call: Callable[[], Awaitable[Any]], calls: int, in_flight: int) -> float:
    """Milliseconds of this process's CPU per call."""
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            await call()

    started = time.process_time()
    await asyncio.gather(*(work() for _ in range(in_flight)))
    return (time.process_time() - started) / calls * 1000


def contenders(
    api: str, root: str, turns: int, session: aiohttp.ClientSession
) -> tuple[dict[str, Callable[[], Awaitable[Any]]], list[Callable[[], Awaitable[Any]]]]:
    """The ways to make one call, and what closes them."""
    import anthropic
    import openai

    dialect, path = DIALECTS[api]
    base_url = root + ("" if api == "anthropic_messages" else "/v1")
    settings = ModelSettings(name="m", api=api, base_url=base_url, key_env=None)
    model = open_model(settings, api_key="no-key", on_retry=print)
    request = Request(history(dialect, path, turns), TOOLS)
    body = dialect.request_body(settings, request)
    client: Any
    if api == "anthropic_messages":
        http = anthropic.DefaultAioHttpClient()
        client = anthropic.AsyncAnthropic(
            api_key="no-key", base_url=base_url, http_client=http, timeout=600
        )
        create, tail = client.messages.create, path
    else:
        http = openai.DefaultAioHttpClient()
        client = openai.AsyncOpenAI(
            api_key="no-key", base_url=base_url, http_client=http, timeout=600
        )
        chat, tail = client.chat.completions, path.removeprefix("/v1")
        create = chat.create if api == "openai_chat" else client.responses.create

    async def bare() -> None:
        headers = {"content-type": "application/json"}
        async with session.post(root + path, data=orjson.dumps(body), headers=headers) as reply:
            orjson.loads(await reply.read())

    async def reading() -> None:
        orjson.dumps(dialect.request_body(settings, request))
        dialect.read_reply(canned)

    canned = orjson.dumps(_REPLIES[path])
    ways: dict[str, Callable[[], Awaitable[Any]]] = {
        "aiohttp+orjson": bare,
        "sdk post": lambda: client.post(tail, cast_to=object, body=body),
        "sdk create": lambda: create(**body),
        "ours": lambda: model.complete(request),
        "  of it: reading": reading,
    }
    return ways, [model.close, client.close]


async def measure(api: str, root: str, turns: int, args: argparse.Namespace) -> None:
    """Print one table."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        ways, closing = contenders(api, root, turns, session)
        measured: dict[str, list[float]] = {name: [] for name in ways}
        for call in ways.values():
            await cpu_ms(call, args.in_flight, args.in_flight)
        for _ in range(args.rounds):
            for name, call in ways.items():
                calls = args.in_flight if name == "sdk create" else args.calls  # up to 0.1 s each
                measured[name].append(await cpu_ms(call, calls, args.in_flight))
        for close in closing:
            await close()
    report(f"{api}, {turns} turns", measured)


def report(title: str, measured: Mapping[str, Sequence[float]]) -> None:
    """Print medians and their ratios to the first."""
    medians = {name: statistics.median(times) for name, times in measured.items()}
    floor = next(iter(medians.values()))
    print(title)
    for name, median in medians.items():
        print(f"  {name:<18} {median:7.3f} ms CPU   {median / floor:5.2f} x", flush=True)


def main() -> None:
    """Measure all dialects."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=256, help="calls per measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--in_flight", type=int, default=64)
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=[*DIALECTS])
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    endpoint = context.Process(target=serve, args=(there,), daemon=True)
    endpoint.start()
    try:
        root = f"http://127.0.0.1:{here.recv()}"
        for api in args.dialects:
            for turns in (5, 30):
                asyncio.run(measure(api, root, turns, args))
    finally:
        endpoint.terminate()
        endpoint.join()


if __name__ == "__main__":
    main()
