"""A model endpoint on the loopback interface that plays scripted conversations and counts calls.

It speaks the OpenAI chat and the Anthropic messages dialect. A reply depends on the request
alone. Counts end with the process; the events in the file of `--journal` outlive it.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, cast

import orjson

JSON = dict[str, Any]
Key = tuple[str, int]
"""A conversation and the number of a reply in it, from 1."""

REPLY_FAULTS = ("length", "refusal", "empty_text", "bad_arguments")
"""Faults that are well-formed replies and count as delivered."""
FAULTS = (
    *("http500", "http429", "http529", "context", "disconnect", "reset", "hang", "html"),
    *("empty", "null", "cut", "bad_utf8", "error200", "no_choices", "no_finish", *REPLY_FAULTS),
)
_PARENT_POLL_S = 0.5
BROKEN_ARGUMENTS = '{"cut": "'
KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"},
    **{429: "rate_limit_error", 500: "api_error", 529: "overloaded_error"},
}


def _option(parse: Callable[[str], Any], default: Any, text: str) -> Any:
    return field(default=default, metadata={"type": parse, "help": text})


def _fault(text: str) -> tuple[str, float]:
    kind, _, rate = text.partition(":")
    return kind, float(rate)


@dataclass(kw_only=True)
class Options:
    """How the endpoint plays; every field is an option of the command line too."""

    port: int = _option(int, 0, "port on 127.0.0.1; 0 takes a free one")
    latency_s: float = _option(float, 0.2, "time from request to reply")
    turns: int | None = _option(int, None, "replies per conversation (5, or 1 without tools)")
    tool: str | None = _option(str, None, "tool to call (the first one offered)")
    arguments: str = _option(str, "{}", "JSON object; {turn}, {conversation} are replaced in it")
    calls_per_turn: int = _option(int, 1, "tool calls in every reply but the last")
    reasoning_chars: int = _option(int, 0, "length of the reasoning in each reply")
    text_chars: int = _option(int, 200, "length of the final text")
    capacity: int | None = _option(int, None, "requests in flight beyond which it answers 429")
    journal_path: str | None = _option(str, None, "file that events are appended to")
    key: str | None = _option(str, None, "API key that requests must carry")
    seed: int = _option(int, 0, "seed of the faults")
    faults: Mapping[str, float] = field(
        default_factory=dict,
        metadata={"type": _fault, "action": "append", "help": "KIND:RATE, of " + ", ".join(FAULTS)},
    )

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {', '.join(FAULTS)}")
        # One draw decides between all kinds, so that each keeps exactly its rate.
        if min(self.faults.values(), default=0) < 0 or sum(self.faults.values()) > 1:
            raise ValueError("fault rates must not be negative, nor above 1 in sum")
        if not isinstance(orjson.loads(self.arguments), dict):
            raise ValueError("arguments must be a JSON object")


class Reply(NamedTuple):
    """One reply of the model, before a dialect puts it into its words."""

    key: Key
    model: str
    thought: str
    text: str
    calls: list[JSON]
    """Each with `id` and `arguments`; these are text."""
    tool: str
    finish: str | None
    input_tokens: int
    cached_tokens: int
    output_tokens: int


def _openai_breach(request: JSON, conversation: str, options: Options) -> str | None:
    awaited: list[str] = []
    for n, message in enumerate([*request["messages"], {"role": "end"}]):
        if message["role"] == "tool":
            if message["tool_call_id"] not in awaited:
                return f"messages[{n}]: no tool call awaits {message['tool_call_id']!r}"
            awaited.remove(message["tool_call_id"])
        elif awaited:
            return f"messages[{n}]: tool_calls must have a tool message before this: {awaited}"
        elif message["role"] == "assistant":
            awaited = [call["id"] for call in message.get("tool_calls") or ()]
    return None


def _openai_body(reply: Reply) -> JSON:
    message: JSON = {"role": "assistant", "content": None if reply.calls else reply.text}
    if reply.thought:
        message["reasoning_content"] = reply.thought
    if reply.finish == "refusal":
        message |= {"content": None, "refusal": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            {"id": "call_" + call["id"], "type": "function"}
            | {"function": {"name": reply.tool, "arguments": call["arguments"]}}
            for call in reply.calls
        ]
    finish = "content_filter" if reply.finish == "refusal" else reply.finish
    return {
        **{"id": "chatcmpl-{}_{}".format(*reply.key), "object": "chat.completion"},
        **{"created": int(time.time()), "model": reply.model},
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": reply.input_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.input_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": len(reply.thought) // 4},
        },
    }


def _openai_events(body: JSON, request: JSON) -> list[bytes]:
    chunk = {**body, "object": "chat.completion.chunk", "choices": []}
    usage, steps = chunk.pop("usage"), []
    for choice in body["choices"]:
        message = choice["message"]
        calls = message.pop("tool_calls", ())
        deltas = [{name: said} for name, said in message.items() if said]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        steps = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        steps.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
    chunks = [{**chunk, "choices": [step]} for step in steps] or [chunk]
    if (request.get("stream_options") or {}).get("include_usage"):
        chunks.append({**chunk, "usage": usage})
    return [*(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]\n\n"]


def _openai_error(status: int, message: str) -> JSON:
    codes: Mapping[int, Any] = {400: None, 401: "invalid_api_key", 429: "rate_limit_exceeded"}
    code = "context_length_exceeded" if "context length" in message else codes.get(status, status)
    return {"error": {"message": message, "type": KINDS[status], "param": None, "code": code}}


def _anthropic_breach(request: JSON, conversation: str, options: Options) -> str | None:
    if not isinstance(request.get("max_tokens"), int):
        return "max_tokens: Field required"
    awaited: list[str] = []
    turn = 0
    for n, message in enumerate([*request["messages"], {"role": "user", "content": ""}]):
        if message["role"] not in ("user", "assistant"):
            return f"messages.{n}: Unexpected role {message['role']!r}"
        blocks = message["content"] if isinstance(message["content"], list) else []
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(results) != sorted(awaited):
            return f"messages.{n}: `tool_use` ids {awaited} must have their results, not {results}"
        awaited = [block["id"] for block in blocks if block["type"] == "tool_use"]
        if message["role"] == "user" or not options.reasoning_chars:
            continue
        turn += 1
        sent = _thinking((conversation, turn), _thought(options, (conversation, turn)))
        if any(block["type"] == "thinking" and block != sent for block in blocks):
            return f"messages.{n}: Invalid `signature` in `thinking` block, or altered thinking"
        if awaited and blocks[0] != sent:
            return f"messages.{n}.content.0: Expected `thinking`, found `{blocks[0]['type']}`"
    return None


def _anthropic_body(reply: Reply) -> JSON:
    names = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    blocks = [_thinking(reply.key, reply.thought)] if reply.thought else []
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        block = {"type": "tool_use", "id": "toolu_" + call["id"], "name": reply.tool}
        broken = call["arguments"] == BROKEN_ARGUMENTS
        given = BROKEN_ARGUMENTS if broken else orjson.loads(call["arguments"])
        blocks.append({**block, "input": given})
    return {
        **{"id": "msg_{}_{}".format(*reply.key), "type": "message", "role": "assistant"},
        **{"model": reply.model, "content": blocks, "stop_sequence": None},
        "stop_reason": names.get(reply.finish or "", reply.finish),
        "usage": {
            "input_tokens": reply.input_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"thinking_tokens": len(reply.thought) // 4},
        },
    }


def _anthropic_events(body: JSON, request: JSON) -> list[bytes]:
    opening = {**body, "content": [], "stop_reason": None}
    events: list[JSON] = [{"type": "message_start", "message": opening}]
    for n, block in enumerate(body["content"] or ()):
        empty, deltas = dict(block), []
        for name in ("thinking", "signature", "text"):
            if name in block:
                empty[name] = ""
                deltas.append({"type": name + "_delta", name: block[name]})
        if "input" in block:
            given = block["input"]
            empty["input"] = {}
            text = given if isinstance(given, str) else orjson.dumps(given).decode()
            deltas.append({"type": "input_json_delta", "partial_json": text})
        events.append({"type": "content_block_start", "index": n, "content_block": empty})
        events += [{"type": "content_block_delta", "index": n, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": n})
    ending = {"stop_reason": body["stop_reason"], "stop_sequence": None}
    events.append({"type": "message_delta", "delta": ending, "usage": body["usage"]})
    events.append({"type": "message_stop"})
    form = b"event: %b\ndata: %b\n\n"
    return [form % (event["type"].encode(), orjson.dumps(event)) for event in events]


def _anthropic_error(status: int, message: str) -> JSON:
    error = {"type": KINDS[status], "message": message}
    return {"type": "error", "error": error, "request_id": "req_fake"}


class Dialect(NamedTuple):
    """How one API speaks; `breach` tells what it would refuse about a request's messages."""

    breach: Callable[[JSON, str, Options], str | None]
    body: Callable[[Reply], JSON]
    events: Callable[[JSON, JSON], list[bytes]]
    error: Callable[[int, str], JSON]
    hollow: JSON
    """What a reply body says where it says nothing."""
    too_long: str


DIALECTS = {
    "/v1/chat/completions": Dialect(
        *(_openai_breach, _openai_body, _openai_events, _openai_error),
        *({"choices": []}, "This model's maximum context length is 128000 tokens, you sent 130000"),
    ),
    "/v1/messages": Dialect(
        *(_anthropic_breach, _anthropic_body, _anthropic_events, _anthropic_error),
        *({"content": None}, "prompt is too long: 210000 tokens > 200000 maximum"),
    ),
}


class Refused(Exception):
    """A request that the endpoint does not accept, with the HTTP status that says so."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Ask(NamedTuple):
    """One accepted request."""

    dialect: Dialect
    request: JSON
    key: Key
    chars: int
    has_calls: bool
    fault: str | None


def _read_ask(path: str, headers: Mapping[str, str], body: bytes, options: Options) -> Ask:
    dialect = DIALECTS[path]
    given = headers.get("x-api-key", headers.get("authorization", "").removeprefix("Bearer "))
    if options.key is not None and given != options.key:
        raise Refused(401, "invalid API key")
    try:
        request = orjson.loads(body)
        messages = request["messages"]
        first = next((m["content"] for m in messages if m["role"] == "user"), "")
        if not isinstance(first, str):
            first = "".join(part.get("text", "") for part in first)
        text = f"{first}\0{headers.get('x-task-id', '')}"
        key = (_digest(text, 8), 1 + sum(m["role"] == "assistant" for m in messages))
        breach = dialect.breach(request, key[0], options)
        turns = options.turns or (5 if request.get("tools") else 1)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise Refused(400, f"malformed request: {type(error).__name__}: {error}") from error
    if breach:
        raise Refused(400, breach)
    return Ask(dialect, request, key, len(body), key[1] < turns, None)


def _draw(ask: Ask, attempt: int, options: Options) -> Ask:
    """Decide on the fault of a request: the same in every run, however requests interleave."""
    if not options.faults:
        return ask
    point = int(_digest(f"{options.seed}/{ask.key}/{attempt}", 6), 16) / 2**48
    for kind, rate in options.faults.items():
        point -= rate
        if point < 0:
            out_of_place = "empty_text" if ask.has_calls else "bad_arguments"
            return ask._replace(fault=None if kind == out_of_place else kind)
    return ask


def _play(ask: Ask, options: Options) -> Reply:
    """The reply that is due at this point of the conversation."""
    (conversation, turn), fault = ask.key, ask.fault
    has_calls = ask.has_calls and fault not in ("length", "refusal")
    tools = ask.request.get("tools") or [{"name": "tool"}]
    arguments = options.arguments.replace("{turn}", str(turn))
    arguments = arguments.replace("{conversation}", conversation)
    if fault == "bad_arguments":
        arguments = BROKEN_ARGUMENTS
    chars = 0 if has_calls or fault == "empty_text" else options.text_chars
    text = _filler("Answer", ask.key, chars)
    finish = fault if fault in ("length", "refusal") else "tool_calls" if has_calls else "stop"
    thought = _thought(options, ask.key)
    calls = [
        {"id": f"{conversation}_{turn}_{n}", "arguments": arguments}
        for n in range(options.calls_per_turn if has_calls else 0)
    ]
    return Reply(
        key=ask.key,
        model=str(ask.request.get("model")),
        thought=thought,
        text=text,
        calls=calls,
        tool=options.tool or tools[0].get("function", tools[0])["name"],
        finish=None if fault == "no_finish" else finish,
        input_tokens=ask.chars // 4,
        cached_tokens=ask.chars // 5 if turn > 1 else 0,
        output_tokens=(len(text) + len(thought) + len(calls) * len(arguments)) // 4 + 1,
    )


def _respond(ask: Ask, options: Options) -> bytes:
    """The bytes that answer a request."""
    dialect = ask.dialect
    match ask.fault:
        case "http500" | "http429" | "http529" as fault:
            error = dialect.error(int(fault[4:]), "the fault that was asked for")
            return _frame(int(fault[4:]), error, "Retry-After: 0.05\r\n" if "429" in fault else "")
        case "context":
            return _frame(400, dialect.error(400, dialect.too_long))
        case "error200":
            return _frame(200, dialect.error(500, "the provider failed"))
        case "html":
            return _frame(200, b"<html><body>Bad gateway</body></html>", mime="text/html")
        case "empty" | "null" as fault:
            return _frame(200, b"" if fault == "empty" else b"null")
    body = dialect.body(_play(ask, options))
    if ask.fault == "no_choices":
        body |= dialect.hollow
    is_stream = bool(ask.request.get("stream"))
    parts = dialect.events(body, ask.request) if is_stream else [orjson.dumps(body)]
    if ask.fault == "bad_utf8":
        parts = [part.replace(b'"id":"', b'"id":"\xff', 1) for part in parts]
    if ask.fault == "cut":
        parts = parts[: len(parts) // 2] if is_stream else [parts[0][: len(parts[0]) // 2]]
    if not is_stream:
        return _frame(200, parts[0])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


def _frame(
    status: int, body: JSON | bytes, more: str = "", mime: str = "application/json"
) -> bytes:
    content = body if isinstance(body, bytes) else orjson.dumps(body)
    reason = "OK" if status == 200 else "Refused"
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: {mime}\r\n{more}Content-Length: "
    return b"%b%d\r\n\r\n%b" % (head.encode(), len(content), content)


def _thought(options: Options, key: Key) -> str:
    return _filler("Thought", key, options.reasoning_chars)


def _thinking(key: Key, thought: str) -> JSON:
    return {"type": "thinking", "thinking": thought, "signature": _digest(f"signed {key}", 32)}


def _digest(text: str, size: int) -> str:
    return blake2b(text.encode(errors="surrogatepass"), digest_size=size).hexdigest()


def _filler(word: str, key: Key, chars: int) -> str:
    sentence = "{} {} of conversation {}. ".format(word, *reversed(key))
    return (sentence * (chars // len(sentence) + 1))[:chars]


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
        self.refused = self.repeated = 0
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

    def answer(self, key: Key) -> None:
        """Note a reply that left in full."""
        self.last_reply_at = self._record("answered", key)
        self.answered[key] += 1

    def view(self, *, full: bool) -> JSON:
        """The counts as `GET /journal` shows them; `full` adds those of every reply."""
        hidden = ("_file", "asked", "answered")
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

    def _record(self, event: str, key: Key) -> float:
        at = time.monotonic()
        if self._file is not None:
            line = {"event": event, "conversation": key[0], "turn": key[1], "at": at}
            os.write(self._file, orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))
        return at


class Connection(asyncio.Protocol):
    """One HTTP/1.1 connection; one request at a time."""

    _transport: asyncio.Transport

    def __init__(self, options: Options, tally: Tally) -> None:
        self._options, self._tally = options, tally
        self._received = bytearray()
        self._ask: Ask | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closes = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # With no buffer allowed, `resume_writing` means that the last byte has left.
        self._transport.set_write_buffer_limits(0)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer:
            self._timer.cancel()
        self._tally.in_flight -= self._ask is not None
        self._ask = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._ask is None:
            self._take()

    def resume_writing(self) -> None:
        self._sent()

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
            return self._send(_frame(400, _openai_error(400, f"not a request: {error}")))
        if len(self._received) < body_end:
            return None
        body = bytes(self._received[end + 4 : body_end])
        del self._received[:body_end]
        self._closes = headers.get("connection", "").lower() == "close"
        path, _, query = target.partition("?")
        match method, path:
            case "POST", "/v1/chat/completions" | "/v1/messages":
                self._accept(path, headers, body)
            case "GET", "/journal":
                self._send(_frame(200, self._tally.view(full="full=1" in query)))
            case "POST", "/reset":
                self._tally.clear()
                self._send(_frame(200, {}))
            case _:
                self._send(_frame(404, _openai_error(404, f"there is no {method} {path}")))
        return None

    def _accept(self, path: str, headers: Mapping[str, str], body: bytes) -> None:
        try:
            ask = _read_ask(path, headers, body, self._options)
        except Refused as refused:
            self._tally.refused += 1
            error = DIALECTS[path].error(refused.status, str(refused))
            return self._send(_frame(refused.status, error))
        ask = _draw(ask, self._tally.ask(ask.key), self._options)
        capacity = self._options.capacity
        if capacity is not None and self._tally.in_flight > capacity:
            ask = ask._replace(fault="http429")
        self._ask = ask
        if ask.fault:
            self._tally.faults[ask.fault] += 1
        if ask.fault == "hang":
            return None
        if not self._options.latency_s or (capacity is not None and ask.fault == "http429"):
            return self._answer(ask)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._options.latency_s, self._answer, ask)
        return None

    def _answer(self, ask: Ask) -> None:
        if ask.fault == "disconnect":
            self._transport.close()
        elif ask.fault == "reset":
            frame = _respond(ask, self._options)
            body_start = frame.index(b"\r\n\r\n") + 4
            self._transport.write(frame[: (body_start + len(frame)) // 2])
            linger = struct.pack("ii", 1, 0)  # a close that does not linger sends RST
            connected: socket.socket = self._transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        else:
            self._send(_respond(ask, self._options))

    def _send(self, frame: bytes) -> None:
        self._transport.write(frame)
        if not self._transport.is_closing() and not self._transport.get_write_buffer_size():
            self._sent()

    def _sent(self) -> None:
        if self._ask:
            if self._ask.fault in (None, *REPLY_FAULTS):
                self._tally.answer(self._ask.key)
            self._tally.in_flight -= 1
            self._ask = None
        if self._closes:
            self._transport.close()
        elif self._received:
            self._take()


class FakeEndpoint(Options):
    """The endpoint in a process of its own, for the time of a `with` block.

    A second block starts it again on the same port.
    """

    _process: subprocess.Popen[str]

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.fake_endpoint", f"--parent_pid={os.getpid()}"]
        for option in fields(Options):
            value = getattr(self, option.name)
            if option.name == "faults":
                command += [f"--fault={kind}:{rate}" for kind, rate in value.items()]
            elif value is not None:
                command.append(f"{_flag(option.name)}={value}")
        root = Path(__file__).resolve().parents[1]
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

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.anthropic_url}/v1"

    @property
    def anthropic_url(self) -> str:
        """The base URL for Anthropic clients."""
        return f"http://127.0.0.1:{self.port}"

    def journal(self, *, full: bool = False) -> JSON:
        """The counts so far; `full` adds those of every reply."""
        return self._fetch("/journal?full=1" if full else "/journal", None)

    def reset(self) -> None:
        """Start counting anew."""
        self._fetch("/reset", b"")

    def _fetch(self, path: str, body: bytes | None) -> JSON:
        # A proxy named in the environment must not be asked for a loopback address.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(self.anthropic_url + path, body, timeout=10) as response:
            return cast(JSON, orjson.loads(response.read()))


async def _serve(options: Options, parent_pid: int) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tally = Tally(options.journal_path)
    server = await loop.create_server(
        lambda: Connection(options, tally), "127.0.0.1", options.port, backlog=4096
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
