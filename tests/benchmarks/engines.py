"""Engines to compare runs with: the simplest programs that make the same calls, and a naive pool.

    python -m tests.benchmarks.engines ENGINE --url=URL --prompts=N --agents=N --api=chat|messages

aiohttp   one event loop, aiohttp and orjson: the floor
journal   the same, and each reply and each result is written to a file before it is used, which a
          thread syncs every 20 ms
post      one event loop, the low-level post of the API's SDK on its aiohttp transport
typed     one event loop, the SDK's typed create as its documentation shows it
pool      processes that take batches of 20 prompts and run them one after the other, a client for
          each prompt, each finished row synced: the scheme of batch runners in the field

Each holds conversations as lists of messages and answers every call of the tool `step`; none
retries, limits, checks or exports, and only `journal` journals.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson

from tests.fakes.quick_endpoint import CHAT, MESSAGES

SYSTEM = "You work through a list of steps, one call at a time, and say when all is done. " * 14
TOOLS: list[dict[str, Any]] = [
    {
        "name": name,
        "description": label,
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "Which one."}},
            "required": ["number"],
            "additionalProperties": False,
        },
    }
    for name, label in (
        ("step", "Take one step."),
        ("look", "Look at one step."),
        ("undo", "Undo one step."),
    )
]
BATCH = 20
_TIMEOUT_S = 600.0

Ask = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]
"""Sends a body, gives the reply as it came."""


class Chat:
    """Conversations in the chat dialect."""

    path = CHAT

    def body(self, prompt: str) -> dict[str, Any]:
        """The first request of a conversation; its messages are added to."""
        tools = [{"type": "function", "function": tool} for tool in TOOLS]
        opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": prompt}]
        return {"model": "m", "messages": opening, "tools": tools}

    def go_on(self, body: dict[str, Any], reply: dict[str, Any]) -> bool:
        """Add a reply and the results of its calls; whether there is to be another request."""
        message = reply["choices"][0]["message"]
        body["messages"].append(message)
        calls = message.get("tool_calls") or []
        for call in calls:
            number = orjson.loads(call["function"]["arguments"])["number"]
            result = {"role": "tool", "tool_call_id": call["id"], "content": f"step {number}"}
            body["messages"].append(result)
        return bool(calls)


class Messages:
    """Conversations in the Anthropic dialect."""

    path = MESSAGES

    def body(self, prompt: str) -> dict[str, Any]:
        """See `Chat`."""
        tools = [
            {k if k != "parameters" else "input_schema": v for k, v in tool.items()}
            for tool in TOOLS
        ]
        opening = [{"role": "user", "content": prompt}]
        return {
            "model": "m",
            "max_tokens": 16000,
            "system": SYSTEM,
            "messages": opening,
            "tools": tools,
        }

    def go_on(self, body: dict[str, Any], reply: dict[str, Any]) -> bool:
        """See `Chat`."""
        body["messages"].append({"role": "assistant", "content": reply["content"]})
        results = [
            {
                "type": "tool_result",
                "tool_use_id": block["id"],
                "content": f"step {block['input']['number']}",
            }
            for block in reply["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            body["messages"].append({"role": "user", "content": results})
        return bool(results)


Dialect = Chat | Messages
DIALECTS: dict[str, Dialect] = {"chat": Chat(), "messages": Messages()}


async def converse(dialect: Dialect, prompt: str, ask: Ask) -> list[Any]:
    """One conversation from its prompt to its end."""
    body = dialect.body(prompt)
    while dialect.go_on(body, await ask(body)):
        pass
    messages: list[Any] = body["messages"]
    return messages


async def in_one_loop(dialect: Dialect, prompts: int, agents: int, ask: Ask) -> None:
    """`agents` conversations at a time; each finished one is written to a file."""
    left = iter(range(prompts))
    with tempfile.TemporaryFile() as file:

        async def work() -> None:
            for number in left:
                messages = await converse(dialect, f"Question number {number}", ask)
                file.write(orjson.dumps(messages, default=dict) + b"\n")

        await asyncio.gather(*(work() for _ in range(agents)))


async def with_aiohttp(url: str, dialect: Dialect, prompts: int, agents: int) -> None:
    """See the module."""
    import aiohttp

    headers = {"content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

        async def ask(body: dict[str, Any]) -> dict[str, Any]:
            async with session.post(url + dialect.path, data=orjson.dumps(body)) as reply:
                parsed: dict[str, Any] = orjson.loads(await reply.read())
                return parsed

        await in_one_loop(dialect, prompts, agents, ask)


async def with_journal(url: str, dialect: Dialect, prompts: int, agents: int) -> None:
    """See the module."""
    import aiohttp

    headers = {"content-type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    with tempfile.TemporaryFile(buffering=0) as journal:
        stopping = threading.Event()

        def sync() -> None:
            while not stopping.wait(0.02):
                os.fdatasync(journal.fileno())

        syncer = threading.Thread(target=sync)
        syncer.start()
        async with aiohttp.ClientSession(connector=connector, headers=headers) as session:

            async def ask(body: dict[str, Any]) -> dict[str, Any]:
                if len(body["messages"]) > 2:  # the result of the last call
                    journal.write(orjson.dumps(body["messages"][-1]) + b"\n")
                async with session.post(url + dialect.path, data=orjson.dumps(body)) as reply:
                    parsed: dict[str, Any] = orjson.loads(await reply.read())
                journal.write(orjson.dumps(parsed) + b"\n")
                return parsed

            await in_one_loop(dialect, prompts, agents, ask)
        stopping.set()
        syncer.join()


async def with_post(url: str, dialect: Dialect, prompts: int, agents: int) -> None:
    """See the module."""
    client = _client(url, dialect, on_aiohttp=True)
    path = dialect.path if dialect.path == MESSAGES else dialect.path.removeprefix("/v1")

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        parsed: dict[str, Any] = await client.post(path, cast_to=object, body=body)
        return parsed

    async with client:
        await in_one_loop(dialect, prompts, agents, ask)


async def with_typed(url: str, dialect: Dialect, prompts: int, agents: int) -> None:
    """See the module."""
    client = _client(url, dialect, on_aiohttp=False)
    create = client.messages.create if dialect.path == MESSAGES else client.chat.completions.create

    async def ask(body: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = (await create(**body)).model_dump(exclude_none=True)
        return reply

    async with client:
        await in_one_loop(dialect, prompts, agents, ask)


def _client(url: str, dialect: Dialect, *, on_aiohttp: bool) -> Any:
    import anthropic
    import openai

    sdk: Any = anthropic if dialect.path == MESSAGES else openai
    make = sdk.AsyncAnthropic if dialect.path == MESSAGES else sdk.AsyncOpenAI
    return make(
        api_key="no-key",
        base_url=url if dialect.path == MESSAGES else url + "/v1",
        max_retries=0,
        timeout=_TIMEOUT_S,
        http_client=sdk.DefaultAioHttpClient() if on_aiohttp else None,
    )


def with_pool(url: str, dialect: Dialect, prompts: int, agents: int) -> None:
    """See the module."""
    numbers = list(range(prompts))
    batches = [numbers[start : start + BATCH] for start in range(0, prompts, BATCH)]
    with tempfile.TemporaryDirectory() as rows:
        jobs = [(url, dialect.path, batch, f"{rows}/{n}") for n, batch in enumerate(batches)]
        with multiprocessing.get_context("fork").Pool(min(agents, len(batches))) as pool:
            pool.map(run_batch, jobs, chunksize=1)


def run_batch(job: tuple[str, str, list[int], str]) -> None:
    """One batch of the pool."""
    import anthropic
    import openai

    url, path, numbers, rows = job
    dialect = next(dialect for dialect in DIALECTS.values() if dialect.path == path)
    with Path(rows).open("wb") as file:
        for number in numbers:
            client: Any
            if path == MESSAGES:
                client = anthropic.Anthropic(api_key="no-key", base_url=url, max_retries=0)
                create = client.messages.create
            else:
                client = openai.OpenAI(api_key="no-key", base_url=url + "/v1", max_retries=0)
                create = client.chat.completions.create
            with client:
                body = dialect.body(f"Question number {number}")
                while dialect.go_on(body, create(**body).model_dump(exclude_none=True)):
                    pass
            file.write(orjson.dumps(body["messages"]) + b"\n")
            file.flush()
            os.fsync(file.fileno())


LOOPS = {"aiohttp": with_aiohttp, "journal": with_journal, "post": with_post, "typed": with_typed}
ENGINES = (*LOOPS, "pool")


def main() -> None:
    """Run one engine to its end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--url", required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--agents", type=int, required=True)
    parser.add_argument("--api", choices=DIALECTS, required=True)
    args = parser.parse_args()
    dialect = DIALECTS[args.api]
    if args.engine == "pool":
        with_pool(args.url, dialect, args.prompts, args.agents)
    else:
        asyncio.run(LOOPS[args.engine](args.url, dialect, args.prompts, args.agents))


if __name__ == "__main__":
    main()
