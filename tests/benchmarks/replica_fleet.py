"""A fleet of model servers with prefix caches, and a router in front of them, in one process.

    python -m tests.benchmarks.replica_fleet TERMS.json

Prints one line of JSON with its ports. Each replica keeps the messages that it has read or written,
as a chain, and forgets what was used least recently once they are more than it has room for. It
computes one prompt at a time, as long as its uncached tokens take. The router keeps a request with
`x-session-id` on one replica, and gives all others to the one with the fewest requests.

GET /counts, POST /stop/N and /start/N are for the benchmark.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson
from aiohttp import web

JSON = dict[str, Any]
BYTES_PER_TOKEN = 4


class Terms(NamedTuple):
    """What the fleet is like."""

    replicas: int
    room: int
    """Tokens that a replica keeps."""
    turns: list[int]
    """Calls of each session, by the number in its prompt."""
    reply_tokens: int
    tokens_per_s: float
    """Prompt tokens that a replica computes per second."""
    reply_s: float
    """What a reply takes beside."""


def link(before: bytes, message: Mapping[str, Any]) -> tuple[bytes, int]:
    """The digest of a conversation up to a message, and the tokens of that message."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = orjson.dumps(
        [
            message["role"],
            text_of(message.get("content")),
            [(one["name"], one["arguments"]) for one in calls],
        ]
    )
    return blake2b(before + said, digest_size=16).digest(), max(1, len(said) // BYTES_PER_TOKEN)


def text_of(content: Any) -> str:
    """Content as text; some clients send parts."""
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


class Cache:
    """Messages by the digests of their chains."""

    def __init__(self, room: float) -> None:
        self._room = room
        self._tokens: OrderedDict[bytes, int] = OrderedDict()
        self._used = 0

    def read(self, chain: Sequence[tuple[bytes, int]]) -> int:
        """The cached tokens at the beginning of a prompt, which is then cached as a whole."""
        cached, is_known = 0, True
        for digest, tokens in chain:
            is_known = is_known and digest in self._tokens
            cached += tokens if is_known else 0
        self.keep(chain)
        return cached

    def keep(self, chain: Sequence[tuple[bytes, int]]) -> None:
        """Keep all of a chain; its end is forgotten first."""
        for digest, tokens in reversed(chain):
            if digest not in self._tokens:
                self._tokens[digest] = tokens
                self._used += tokens
            self._tokens.move_to_end(digest)
        while self._used > self._room:
            _, tokens = self._tokens.popitem(last=False)
            self._used -= tokens


class Replica:
    """One server."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.cache = Cache(terms.room)
        self.computing = asyncio.Lock()
        self.in_flight = 0
        self.is_up = True


class Session:
    """What was asked of a conversation."""

    def __init__(self) -> None:
        self.requests = 0
        self.replicas: set[int] = set()
        self.ids: set[str] = set()
        self.longest = 0
        """Tokens of its longest prompt so far."""
        self.cold = 0
        """Requests after the first whose replica had not even half of the prompt before."""


class Fleet:
    """All of it."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.replicas = [Replica(terms) for _ in range(terms.replicas)]
        self.sessions: defaultdict[int, Session] = defaultdict(Session)
        self.everything = Cache(float("inf"))
        self.requests = self.prompt = self.cached = self.possible = 0
        self._runners: list[web.AppRunner | None] = [None] * terms.replicas
        self.ports: list[int] = [0] * terms.replicas

    async def answer(self, number: int, request: web.Request) -> web.StreamResponse:
        """A model call at a replica."""
        replica = self.replicas[number]
        replica.in_flight += 1
        try:
            return await self._answer(number, replica, request)
        finally:
            replica.in_flight -= 1

    async def _answer(
        self, number: int, replica: Replica, request: web.Request
    ) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        chain: list[tuple[bytes, int]] = []
        digest = orjson.dumps(body.get("tools", []))
        for message in body["messages"]:
            digest, tokens = link(digest, message)
            chain.append((digest, tokens))
        total = sum(tokens for _, tokens in chain)
        async with replica.computing:
            cached = replica.cache.read(chain)
            await asyncio.sleep((total - cached) / self.terms.tokens_per_s)
        possible = self.everything.read(chain)
        reply, session = self._reply(body, replica, chain, number, request)
        self.requests += 1
        self.prompt += total
        self.cached += cached
        self.possible += possible
        session.cold += session.requests > 1 and cached < session.longest / 2
        session.longest = max(session.longest, total)
        await asyncio.sleep(self.terms.reply_s)
        reply["usage"] = {
            "prompt_tokens": total,
            "completion_tokens": self.terms.reply_tokens,
            "total_tokens": total + self.terms.reply_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return web.Response(body=orjson.dumps(reply), content_type="application/json")

    def _reply(
        self,
        body: JSON,
        replica: Replica,
        chain: list[tuple[bytes, int]],
        number: int,
        request: web.Request,
    ) -> tuple[JSON, Session]:
        prompt = next(m for m in body["messages"] if m["role"] == "user")
        which = int("".join(c for c in text_of(prompt["content"]) if c.isdigit()) or 0)
        session = self.sessions[which]
        session.requests += 1
        session.replicas.add(number)
        session.ids.add(request.headers.get("x-session-id", ""))
        turn = sum(m["role"] == "assistant" for m in body["messages"])
        words = random.Random(f"{which}/{turn}")
        length = self.terms.reply_tokens * BYTES_PER_TOKEN
        text = "".join(words.choices("abcdefghijklmnopqrstuvwxyz    ", k=length)).strip() or "x"
        message: JSON = {"role": "assistant", "content": text}
        if turn + 1 < self.terms.turns[which % len(self.terms.turns)]:
            function = {"name": "step", "arguments": json.dumps({"number": turn})}
            call = {"id": f"c{which}_{turn}", "type": "function", "function": function}
            message["tool_calls"] = [call]
        # What was written is in the cache as what was read.
        chain.append(link(chain[-1][0], message))
        replica.cache.keep(chain)
        self.everything.keep(chain)
        reason = "tool_calls" if "tool_calls" in message else "stop"
        head = {"id": f"r{which}-{turn}", "object": "chat.completion", "created": 0, "model": "m"}
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return {**head, "choices": [choice]}, session

    async def route(self, request: web.Request) -> web.StreamResponse:
        """A model call at the router."""
        alive = [n for n, one in enumerate(self.replicas) if one.is_up]
        if (id := request.headers.get("x-session-id")) is not None:
            scores = {n: blake2b(f"{id} {n}".encode(), digest_size=8).digest() for n in alive}
            number = max(alive, key=scores.__getitem__)
        else:
            fewest = min(self.replicas[n].in_flight for n in alive)
            number = random.choice([n for n in alive if self.replicas[n].in_flight == fewest])
        return await self.answer(number, request)

    async def start(self, number: int) -> None:
        """Start a replica, with an empty cache."""
        self.replicas[number].cache = Cache(self.terms.room)
        self.replicas[number].is_up = True

        async def post(request: web.Request) -> web.StreamResponse:
            return await self.answer(number, request)

        async def health(request: web.Request) -> web.StreamResponse:
            return web.Response()

        routes = [web.post("/v1/chat/completions", post), web.get("/health", health)]
        runner, port = await serve(routes, self.ports[number])
        self._runners[number], self.ports[number] = runner, port

    async def stop(self, number: int) -> None:
        """Take a replica down at once."""
        self.replicas[number].is_up = False
        runner, self._runners[number] = self._runners[number], None
        if runner is not None:
            await runner.cleanup()

    def counts(self) -> JSON:
        """What was counted so far."""
        sessions = self.sessions.values()
        return {
            "requests": self.requests,
            "prompt": self.prompt,
            "cached": self.cached,
            "possible": self.possible,
            "sessions": len(sessions),
            "replicas": [len(one.replicas) for one in sessions],
            "ids": [len(one.ids) for one in sessions],
            "cold": [one.cold for one in sessions],
        }


async def serve(routes: Sequence[web.RouteDef], port: int = 0) -> tuple[web.AppRunner, int]:
    """A server on loopback, and its port."""
    app = web.Application(client_max_size=64 * 2**20)
    app.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    return runner, runner.addresses[0][1]


async def main(terms: Terms) -> None:
    """Serve until the end of standard input."""
    fleet = Fleet(terms)
    for number in range(terms.replicas):
        await fleet.start(number)

    async def counts(request: web.Request) -> web.StreamResponse:
        return web.json_response(fleet.counts())

    async def stop(request: web.Request) -> web.StreamResponse:
        await fleet.stop(int(request.match_info["number"]))
        return web.Response()

    async def start(request: web.Request) -> web.StreamResponse:
        await fleet.start(int(request.match_info["number"]))
        return web.Response()

    _, control = await serve(
        [
            web.get("/counts", counts),
            web.post("/stop/{number}", stop),
            web.post("/start/{number}", start),
        ]
    )
    _, router = await serve([web.post("/v1/chat/completions", fleet.route)])
    print(json.dumps({"replicas": fleet.ports, "router": router, "control": control}), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(Terms(**json.loads(sys.argv[1]))))
