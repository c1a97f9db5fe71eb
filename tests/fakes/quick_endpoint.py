"""A model endpoint on loopback that does as little as it can, so that it hides no client's cost.

Replies are made before the first request comes. The turn of a request is found by counting the
assistant messages in its bytes; nothing else of it is read. For scripted conversations, faults
and exact accounts of who asked for what there is `tests.fakes.fake_endpoint`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import urllib.request
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self, cast

import orjson

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_STATS = "/stats"


class _Counts:
    """What the endpoint has seen."""

    def __init__(self) -> None:
        self.requests = self.in_flight = self.max_in_flight = 0
        self.first_request_at = self.last_reply_at = 0.0

    def ask(self) -> None:
        self.requests += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.first_request_at = self.first_request_at or time.monotonic()

    def answer(self) -> None:
        self.in_flight -= 1
        self.last_reply_at = time.monotonic()


class _Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; one request at a time."""

    def __init__(
        self, replies: Mapping[str, Sequence[bytes]], latency_s: float, counts: _Counts
    ) -> None:
        self._replies, self._latency_s, self._counts = replies, latency_s, counts
        self._received: list[bytes] = []
        self._missing = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._received.append(data)
        if self._missing:
            self._missing -= len(data)
            if self._missing > 0:
                return
        request = b"".join(self._received)
        head, end, body = request.partition(b"\r\n\r\n")
        if not end:
            return
        if not self._missing:
            length = head.lower().partition(b"content-length:")[2]
            self._missing = int(length.split(b"\r\n")[0] or 0) - len(body)
            if self._missing > 0:
                return
        self._received.clear()
        self._missing = 0
        self._answer(head.split(b" ", 2)[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        if path == _STATS:
            stats = {**vars(self._counts), "cpu_s": time.process_time()}
            self._transport.write(_framed(orjson.dumps(stats)))
            return
        self._counts.ask()
        turns = self._replies[path]
        reply = turns[min(body.count(b'"assistant"'), len(turns) - 1)]
        if self._latency_s:
            asyncio.get_running_loop().call_later(self._latency_s, self._send, reply)
        else:
            self._send(reply)

    def _send(self, reply: bytes) -> None:
        self._counts.answer()
        self._transport.write(reply)


def _framed(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


def _serve(ready: Connection, replies: Mapping[str, Sequence[bytes]], latency_s: float) -> None:
    """Be the endpoint; sends its port through `ready`, and ends with the process that started."""
    counts = _Counts()

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: _Connection(replies, latency_s, counts), "127.0.0.1", 0, backlog=4096
        )
        ready.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


class QuickEndpoint:
    """The endpoint in a process of its own, for the time of a `with` block."""

    def __init__(
        self, replies: Mapping[str, Sequence[Mapping[str, Any]]], *, latency_s: float = 0.0
    ) -> None:
        """`replies` holds, by path, the reply to a conversation's first turn, second, and so on.

        The last one is that of all further turns.
        """
        self._replies = {
            path: [_framed(orjson.dumps(reply)) for reply in turns]
            for path, turns in replies.items()
        }
        self._latency_s = latency_s

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(there, self._replies, self._latency_s), daemon=True
        )
        self._process.start()
        self.url = f"http://127.0.0.1:{here.recv()}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def stats(self) -> dict[str, Any]:
        """Requests, in_flight, max_in_flight, first_request_at and last_reply_at (monotonic
        seconds), and cpu_s of the endpoint itself."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.url + _STATS, timeout=10) as reply:
            return cast(dict[str, Any], orjson.loads(reply.read()))


def scripted_replies(
    turns: int,
    *,
    reasoning_chars: int = 400,
    tool: str = "step",
    argument: str = "number",
    given_text: str = "{turn}",
) -> dict[str, list[dict[str, Any]]]:
    """Conversations of `turns` turns in both dialects: all but the last call the tool.

    It is given the turn, in `given_text` where the argument is not called number.
    """
    thought = "I should look at the next part of it. " * (reasoning_chars // 38 + 1)
    thought = thought[:reasoning_chars]
    usage = {"prompt_tokens": 900, "completion_tokens": 120, "total_tokens": 1020}
    chat, messages = [], []
    for turn in range(1, turns + 1):
        is_last = turn == turns
        text = "All of it is done." if is_last else ""
        id, given = (
            f"call_{turn}",
            {argument: turn if argument == "number" else given_text.format(turn=turn)},
        )
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text,
            "reasoning_content": thought,
        }
        blocks: list[dict[str, Any]] = [
            {"type": "thinking", "thinking": thought, "signature": "s" * 200}
        ]
        if is_last:
            blocks.append({"type": "text", "text": text})
        else:
            function = {"name": tool, "arguments": orjson.dumps(given).decode()}
            message["tool_calls"] = [{"id": id, "type": "function", "function": function}]
            blocks.append({"type": "tool_use", "id": id, "name": tool, "input": given})
        finish_reason = "stop" if is_last else "tool_calls"
        choice = {"index": 0, "message": message, "finish_reason": finish_reason}
        chat.append(
            {
                "id": f"c{turn}",
                "object": "chat.completion",
                "created": 1,
                "model": "m",
                "choices": [choice],
                "usage": usage,
            }
        )
        messages.append(
            {
                "id": f"c{turn}",
                "type": "message",
                "role": "assistant",
                "model": "m",
                "content": blocks,
                "stop_reason": "end_turn" if is_last else "tool_use",
                "stop_sequence": None,
                "usage": {"input_tokens": 900, "output_tokens": 120},
            }
        )
    return {CHAT: chat, MESSAGES: messages}
