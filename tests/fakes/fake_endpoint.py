"""A model endpoint on the loopback interface that plays scripted conversations and counts calls.

It speaks the OpenAI chat, OpenAI Responses and Anthropic messages dialects. A reply depends on
the request alone, a fault also on how often it came; a conversation whose first user message is
fault:KIND always has that fault. Counts end with the process; the events in the file of
`--journal` outlive it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any, Self, cast

import orjson

from tests.fakes.fake_answers import DIALECTS, Ending, Refused, Step, frame, read_ask, respond
from tests.fakes.fake_caches import PrefixCache
from tests.fakes.fake_dialects import openai_error
from tests.fakes.fake_script import JSON, Ask, BaseUrls, Key, Options, Reply, draw

_PARENT_POLL_S = 0.5


class Tally:
    """Who asked for what, and what was delivered; events go to a file too if there is one."""

    def __init__(self, path: str | None) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = None if path is None else os.open(path, flags, 0o644)
        self.in_flight = 0
        self.clear()

    def clear(self) -> None:
        """Forget all but the requests in flight; the file keeps its lines."""
        self.asked: Counter[Key] = Counter()
        self.answered: Counter[Key] = Counter()
        self.faults: Counter[str] = Counter()
        self.refused = self.repeated = self.streamed = 0
        self.input_tokens = self.cached_tokens = 0
        self.cache = PrefixCache()
        self.max_in_flight = self.in_flight
        self.first_request_at: float | None = None
        self.last_reply_at: float | None = None

    def ask(self, key: Key) -> int:
        """Note a request; returns how often this was asked for, now included."""
        at = self._record("asked", key)
        self.asked[key] += 1
        self.repeated += key in self.answered
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        self.first_request_at = self.first_request_at or at
        return self.asked[key]

    def play(self, key: Key, fault: str) -> None:
        """Note a fault."""
        self._record("fault", key, kind=fault)
        self.faults[fault] += 1

    def answer(self, reply: Reply) -> None:
        """Note a reply that left in full."""
        said = {name: getattr(reply, name) for name in ("thought", "text", "calls", "finish")}
        self.last_reply_at = self._record("answered", reply.key, **said)
        self.answered[reply.key] += 1

    def view(self, *, full: bool) -> JSON:
        """The counts as `GET /journal` shows them; `full` adds those of every reply."""
        hidden = ("_file", "asked", "answered", "cache")
        shown = {name: value for name, value in vars(self).items() if name not in hidden}
        shown["requests"] = self.asked.total() + self.refused
        shown["replies"] = self.answered.total()
        shown["conversations"] = len({conversation for conversation, _ in self.asked})
        shown["cpu_s"] = time.process_time()
        if full:
            shown["counts"] = [
                {"conversation": key[0], "turn": key[1], "asked": n, "answered": self.answered[key]}
                for key, n in self.asked.items()
            ]
        return shown

    def _record(self, event: str, key: Key, **more: Any) -> float:
        at = time.monotonic()
        if self._file is not None:
            line = {"event": event, "conversation": key[0], "turn": key[1], "at": at, **more}
            os.write(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return at


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, options: Options, tally: Tally, held: dict[Connection, int]) -> None:
        self._options, self._tally, self._held = options, tally, held
        self._received = bytearray()
        self._ask: Ask | None = None
        self._reply: Reply | None = None
        self._steps: Iterator[Step] = iter(())
        self._timer: asyncio.TimerHandle | None = None
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With no buffer allowed, `resume_writing` means that the last byte has left.
        self._transport.set_write_buffer_limits(0)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._held.pop(self, None)
        self._tally.in_flight -= self._ask is not None
        self._ask = None
        self._steps = iter(())

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._ask is None:
            self._take()

    def resume_writing(self) -> None:
        # Not at once: the transport is at work, and must not be closed under its hands.
        asyncio.get_running_loop().call_soon(self._go_on)

    def _take(self) -> None:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return None
        try:
            request_line, *lines = self._received[:end].decode("latin-1").split("\r\n")
            method, target, _ = request_line.split(" ")
            headers = {k.lower(): v.strip() for k, v in (line.split(":", 1) for line in lines)}
            if "transfer-encoding" in headers:
                raise ValueError("send a Content-Length")
            body_end = end + 4 + int(headers.get("content-length", 0))
        except ValueError as error:
            self._received.clear()
            self._closes = True
            return self._send(frame(400, openai_error(400, f"not a request: {error}")))
        if len(self._received) < body_end:
            return None
        body = bytes(self._received[end + 4 : body_end])
        del self._received[:body_end]
        self._closes = headers.get("connection", "").lower() == "close"
        path, _, query = target.partition("?")
        match method, path:
            case "POST", _ if path in DIALECTS:
                self._accept(path, headers, body)
            case "GET", "/v1/models":
                named = {"object": "list", "data": [{"id": "fake-model", "query": query}]}
                is_known = headers.get("authorization") == f"Bearer {self._options.key}"
                self._send(frame(200 if is_known else 401, named))
            case "GET", "/health":
                self._send(frame(200, {}))
            case "GET", "/journal":
                self._send(frame(200, self._tally.view(full="full=1" in query)))
            case "POST", "/reset":
                self._tally.clear()
                self._send(frame(200, {}))
            case "POST", "/options":
                for name, value in orjson.loads(body).items():
                    setattr(self._options, name, value)
                self._send(frame(200, {}))
                for connection in [*self._held]:
                    connection._answer_in_turn(self._held.pop(connection))
            case _:
                self._send(frame(404, openai_error(404, f"there is no {method} {path}")))
        return None

    def _accept(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        try:
            ask = read_ask(path, headers, body, self._options)
        except Refused as refused:
            self._tally.refused += 1
            error = DIALECTS[path].error(refused.status, str(refused))
            return self._send(frame(refused.status, error))
        self._tally.streamed += bool(ask.request.get("stream"))
        if (room := self._options.cache_tokens) is not None:
            cached = self._tally.cache.take(ask.request, room)
            ask = ask._replace(cached_tokens=cached)
            self._tally.cached_tokens += cached
        self._tally.input_tokens += ask.chars // 4
        ask = draw(ask, self._tally.ask(ask.key), self._options)
        capacity = self._options.capacity
        if capacity is not None and self._tally.in_flight > capacity:
            ask = ask._replace(fault="http429")
        self._ask = ask
        if ask.fault:
            self._tally.play(ask.key, ask.fault)
        if capacity is not None and ask.fault == "http429":
            return self._answer()
        counts = self._options.answers is not None
        return self._answer_in_turn(self._tally.asked.total() if counts else 0)

    def _answer_in_turn(self, number: int) -> None:
        answers = self._options.answers
        if answers is not None and number > answers:
            self._held[self] = number
            return None
        if not self._options.latency_s:
            return self._answer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._options.latency_s, self._answer)
        return None

    def _answer(self) -> None:
        assert self._ask is not None
        self._steps, self._reply = respond(self._ask, self._options)
        self._go_on()

    def _send(self, frame: bytes) -> None:
        self._steps, self._reply = iter([frame]), None
        self._go_on()

    def _go_on(self) -> None:
        """Send what there is, as far as the other side takes it."""
        if self._transport.is_closing():
            return
        for step in self._steps:
            if isinstance(step, bytes):
                self._transport.write(step)
                if self._transport.is_closing() or self._transport.get_write_buffer_size():
                    return
            elif isinstance(step, float):
                self._timer = asyncio.get_running_loop().call_later(step, self._go_on)
                return
            else:
                self._end(step)
                return
        self._sent()

    def _end(self, ending: Ending) -> None:
        if ending is Ending.RESET:
            linger = struct.pack("ii", 1, 0)  # a close that does not linger sends RST
            connected: socket.socket = self._transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif ending is Ending.CLOSE:
            self._transport.close()

    def _sent(self) -> None:
        if self._ask:
            if self._reply:
                self._tally.answer(self._reply)
            self._tally.in_flight -= 1
            self._ask = None
        if self._closes:
            self._transport.close()
        elif self._received:
            self._take()


class FakeEndpoint(Options, BaseUrls):
    """The endpoint in a process of its own, for the time of a `with` block.

    A second block starts it again on the same port.
    """

    _process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "tests.fakes.fake_endpoint", f"--parent_pid={os.getpid()}"]
        for option in fields(Options):
            value = getattr(self, option.name)
            if option.name == "faults":
                command += [f"--fault={kind}:{rate}" for kind, rate in value.items()]
            elif value is not None:
                command.append(f"{_flag(option.name)}={value}")
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
        ready = cast(IO[str], self._process.stdout).readline()
        if not ready:
            self.__exit__()
            raise RuntimeError(f"the endpoint did not start: exit code {self._process.returncode}")
        self.port = orjson.loads(ready)["port"]
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:  # leaving this block waits for the end and closes the pipe
            self._process.terminate()

    def journal(self, *, full: bool = False) -> JSON:
        """The counts so far; `full` adds those of every reply."""
        return self._fetch("/journal?full=1" if full else "/journal", None)

    def reset(self) -> None:
        """Reset the counters."""
        self._fetch("/reset", b"")

    def answer(self, answers: int | None) -> None:
        """Change how many requests get a reply, those before included; None: all."""
        self.change(answers=answers)

    def change(self, **options: Any) -> None:
        """Play with other options from now on; the counters begin again with `reset`."""
        self._fetch("/options", orjson.dumps(options))

    def _fetch(self, path: str, body: bytes | None) -> JSON:
        # A proxy named in the environment must not be asked for a loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.anthropic_url + path, body, timeout=60) as response:
            return cast(JSON, orjson.loads(response.read()))


async def _serve(options: Options, parent_pid: int) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tally, held = Tally(options.journal_path), dict[Connection, int]()
    server = await loop.create_server(
        lambda: Connection(options, tally, held), "127.0.0.1", options.port, backlog=4096
    )
    port = server.sockets[0].getsockname()[1]
    print(orjson.dumps({"port": port, "pid": os.getpid()}).decode(), flush=True)
    while not stop.is_set() and os.getppid() == parent_pid:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), timeout=_PARENT_POLL_S)
    server.close()


def _flag(name: str) -> str:
    return {"journal_path": "--journal", "faults": "--fault"}.get(name, f"--{name}")


def main() -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent."""
    parser = argparse.ArgumentParser(prog="fake_endpoint", description=__doc__)
    for option in fields(Options):
        flag = _flag(option.name)
        parser.add_argument(flag, dest=option.name, default=argparse.SUPPRESS, **option.metadata)
    parser.add_argument("--parent_pid", type=int, default=os.getppid(), help="ends with this one")
    given = vars(parser.parse_args())
    parent_pid = given.pop("parent_pid")
    try:
        options = Options(**{**given, "faults": dict(given.get("faults", ()))})
    except ValueError as error:
        parser.error(str(error))
    asyncio.run(_serve(options, parent_pid))


if __name__ == "__main__":
    main()
