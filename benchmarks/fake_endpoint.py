"""A model endpoint on the loopback interface that plays scripted conversations and counts calls.

It speaks the OpenAI chat and the Anthropic messages dialect. Replies depend on the request alone,
so the endpoint needs no memory to go on with a conversation; its counts live as long as the
process, or as long as the file given with `--journal`, which a later process takes up again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, Self, cast

import orjson

REPLY_FAULTS = ("length", "refusal", "empty_text", "bad_arguments")
"""Faults that are well-formed replies and count as delivered."""

FAULTS = (
    *("http500", "http429", "http529", "disconnect", "reset", "hang", "context"),
    *("html", "empty", "null", "cut", "bad_utf8", "no_choices", "no_finish", "error200"),
    *REPLY_FAULTS,
)

_DEFAULT_TURNS = 5
_PARENT_POLL_S = 0.5


def _option(parse: Callable[[str], Any], default: Any, text: str, flag: str | None = None) -> Any:
    return field(default=default, metadata={"parse": parse, "help": text, "flag": flag})


@dataclass(kw_only=True)
class Options:
    """How the endpoint plays; every field is a command line option."""

    port: int = _option(int, 0, "port on 127.0.0.1; 0 takes a free one")
    latency_s: float = _option(float, 0.2, "time from request to reply")
    turns: int | None = _option(
        int, None, f"replies per conversation: {_DEFAULT_TURNS}, or 1 if no tools are offered"
    )
    tool: str | None = _option(str, None, "tool to call; the first one offered if not given")
    arguments: str = _option(
        str, "{}", "arguments of every call, a JSON object; {turn} and {conversation} are replaced"
    )
    calls_per_turn: int = _option(int, 1, "tool calls in each reply but the last")
    reasoning_chars: int = _option(int, 0, "length of the reasoning in each reply")
    text_chars: int = _option(int, 200, "length of the final text")
    journal_path: str | None = _option(str, None, "file that keeps the counts", "--journal")
    key: str | None = _option(str, None, "API key that requests must carry")
    seed: int = _option(int, 0, "seed of the faults")
    faults: Mapping[str, float] = field(default_factory=dict)
    """Share of requests that meet each kind of fault."""

    def __post_init__(self) -> None:
        if unknown := set(self.faults) - set(FAULTS):
            raise ValueError(f"unknown faults {sorted(unknown)}; known are {', '.join(FAULTS)}")
        # One draw decides between all kinds, so that each kind keeps exactly its rate.
        if not all(rate >= 0 for rate in self.faults.values()) or sum(self.faults.values()) > 1:
            raise ValueError("fault rates must not be negative or exceed 1 together")
        if not isinstance(orjson.loads(self.arguments), dict):
            raise ValueError("arguments must be a JSON object")


class Call(NamedTuple):
    """One tool call of a reply; `arguments` is text and may not be JSON."""

    key: str
    """What is unique about the call's id, without the dialect's prefix."""
    name: str
    arguments: str
    is_json: bool


@dataclass(frozen=True, slots=True)
class Reply:
    """One model reply before it is put into a dialect."""

    key: str
    model: str
    reasoning: str
    signature: str
    text: str
    calls: Sequence[Call]
    finish: Literal["stop", "tool_calls", "length", "refusal"] | None
    input_tokens: int
    cached_tokens: int
    hollow: bool
    """Whether the place where the answer belongs is left empty."""

    @property
    def output_tokens(self) -> int:
        """Plausible, not counted; includes reasoning."""
        arguments = sum(len(call.arguments) for call in self.calls)
        return (len(self.reasoning) + len(self.text) + arguments) // 4 + 1


@dataclass(frozen=True, slots=True)
class Ask:
    """One accepted request."""

    dialect: Dialect
    request: Mapping[str, Any]
    conversation: str
    turn: int
    fault: str | None
    size: int


class Dialect(Protocol):
    """How one API writes what the endpoint says."""

    def breach(self, request: Mapping[str, Any], conversation: str, options: Options) -> str | None:
        """What the API would refuse about these messages."""

    def body(self, reply: Reply) -> dict[str, Any]:
        """The reply as one JSON body."""

    def events(self, reply: Reply, request: Mapping[str, Any]) -> list[bytes]:
        """The reply as the events of a stream."""

    def error(self, status: int, message: str, code: str | int | None = None) -> dict[str, Any]:
        """The JSON body of an error."""


class OpenAIChat:
    """`POST /v1/chat/completions`."""

    _FINISH: Mapping[str | None, str] = {"refusal": "content_filter"}
    _ERRORS: Mapping[int, tuple[str, str | None]] = {
        401: ("invalid_request_error", "invalid_api_key"),
        429: ("requests", "rate_limit_exceeded"),
        500: ("server_error", None),
        529: ("server_error", None),
    }

    def breach(self, request: Mapping[str, Any], conversation: str, options: Options) -> str | None:
        """See `Dialect`: every call is answered, and every answer has a call."""
        awaited: list[str] = []
        for n, message in enumerate([*request["messages"], {"role": "end"}]):
            if message["role"] == "tool":
                if message["tool_call_id"] not in awaited:
                    return f"messages[{n}]: no call awaits {message['tool_call_id']!r}"
                awaited.remove(message["tool_call_id"])
            elif awaited:
                return (
                    f"messages[{n}]: an assistant message with 'tool_calls' must be followed by "
                    f"tool messages responding to each 'tool_call_id'; missing: {awaited}"
                )
            elif message["role"] == "assistant":
                awaited = [call["id"] for call in message.get("tool_calls") or ()]
        return None

    def body(self, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        refused = reply.finish == "refusal"
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if reply.calls or refused else reply.text,
            "refusal": reply.text if refused else None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.calls:
            message["tool_calls"] = [self._call(call) for call in reply.calls]
        choice = {"index": 0, "message": message, "finish_reason": self._finish(reply)}
        choices = [] if reply.hollow else [choice]
        return self._envelope(reply) | {"choices": choices, "usage": self._usage(reply)}

    def events(self, reply: Reply, request: Mapping[str, Any]) -> list[bytes]:
        """See `Dialect`."""
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"reasoning_content": part} for part in _halves(reply.reasoning)]
        text_field = "refusal" if reply.finish == "refusal" else "content"
        deltas += [{text_field: part} for part in _halves(reply.text)]
        for n, call in enumerate(reply.calls):
            opened = self._call(call._replace(arguments=""))
            deltas.append({"tool_calls": [{"index": n, **opened}]})
            for part in _halves(call.arguments):
                deltas.append({"tool_calls": [{"index": n, "function": {"arguments": part}}]})
        choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        choices.append({"index": 0, "delta": {}, "finish_reason": self._finish(reply)})
        envelope = self._envelope(reply) | {"object": "chat.completion.chunk"}
        chunks = [envelope | {"choices": [] if reply.hollow else [choice]} for choice in choices]
        if (request.get("stream_options") or {}).get("include_usage"):
            chunks.append(envelope | {"choices": [], "usage": self._usage(reply)})
        return [*(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]\n\n"]

    def error(self, status: int, message: str, code: str | int | None = None) -> dict[str, Any]:
        """See `Dialect`."""
        kind, usual_code = self._ERRORS.get(status, ("invalid_request_error", None))
        error = {"message": message, "type": kind, "param": None, "code": code or usual_code}
        return {"error": error}

    def _finish(self, reply: Reply) -> str | None:
        return self._FINISH.get(reply.finish, reply.finish)

    @staticmethod
    def _call(call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": f"call_{call.key}", "type": "function", "function": function}

    @staticmethod
    def _envelope(reply: Reply) -> dict[str, Any]:
        identity = {"id": f"chatcmpl-{reply.key}", "object": "chat.completion"}
        return identity | {"created": int(time.time()), "model": reply.model}

    @staticmethod
    def _usage(reply: Reply) -> dict[str, Any]:
        return {
            "prompt_tokens": reply.input_tokens,
            "completion_tokens": reply.output_tokens,
            "total_tokens": reply.input_tokens + reply.output_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": len(reply.reasoning) // 4},
        }


class AnthropicMessages:
    """`POST /v1/messages`."""

    _FINISH: Mapping[str | None, str] = {
        "stop": "end_turn",
        "tool_calls": "tool_use",
        "length": "max_tokens",
        "refusal": "refusal",
    }
    _ERRORS: Mapping[int, str] = {
        401: "authentication_error",
        404: "not_found_error",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }

    def breach(self, request: Mapping[str, Any], conversation: str, options: Options) -> str | None:
        """See `Dialect`: calls are answered, and thinking comes back as it was sent."""
        if not isinstance(request.get("max_tokens"), int):
            return "max_tokens: Field required"
        awaited: list[str] = []
        turn = 0
        for n, message in enumerate([*request["messages"], {"role": "user", "content": ""}]):
            content = message["content"]
            blocks = [] if isinstance(content, str) else content
            results = [b["tool_use_id"] for b in blocks if b["type"] == "tool_result"]
            if sorted(results) != sorted(awaited):
                return f"messages.{n}: `tool_use` ids {awaited} are followed by results {results}"
            if message["role"] not in ("user", "assistant"):
                return f"messages.{n}.role: Unexpected role {message['role']!r}"
            awaited = [b["id"] for b in blocks if b["type"] == "tool_use"]
            if message["role"] == "user":
                continue
            turn += 1
            if not options.reasoning_chars:
                continue
            sent = self._thinking(*_reasoning(options, conversation, turn))
            if any(b["type"] == "thinking" and b != sent for b in blocks):
                return f"messages.{n}: Invalid `signature` in `thinking` block, or text changed"
            if awaited and blocks[0] != sent:
                found = blocks[0]["type"]
                return f"messages.{n}.content.0.type: Expected `thinking`, but found `{found}`"
        return None

    def body(self, reply: Reply) -> dict[str, Any]:
        """See `Dialect`."""
        blocks: list[dict[str, Any]] = []
        if reply.reasoning:
            blocks.append(self._thinking(reply.reasoning, reply.signature))
        if reply.text:
            blocks.append({"type": "text", "text": reply.text})
        for call in reply.calls:
            given = orjson.Fragment(call.arguments) if call.is_json else call.arguments
            blocks.append(self._tool_use(call, given))
        return self._envelope(reply) | {
            "content": None if reply.hollow else blocks,
            "stop_reason": self._FINISH.get(reply.finish),
        }

    def events(self, reply: Reply, request: Mapping[str, Any]) -> list[bytes]:
        """See `Dialect`."""
        blocks: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
        if reply.reasoning:
            deltas = self._deltas("thinking", reply.reasoning)
            deltas.append({"type": "signature_delta", "signature": reply.signature})
            blocks.append((self._thinking("", ""), deltas))
        if reply.text:
            blocks.append(({"type": "text", "text": ""}, self._deltas("text", reply.text)))
        for call in reply.calls:
            deltas = self._deltas("input_json", call.arguments, name="partial_json")
            blocks.append((self._tool_use(call, {}), deltas))
        empty = self._envelope(reply) | {"content": [], "stop_reason": None}
        events: list[dict[str, Any]] = [{"type": "message_start", "message": empty}]
        for n, (block, deltas) in enumerate(() if reply.hollow else blocks):
            events.append({"type": "content_block_start", "index": n, "content_block": block})
            events += [{"type": "content_block_delta", "index": n, "delta": d} for d in deltas]
            events.append({"type": "content_block_stop", "index": n})
        ending = {"stop_reason": self._FINISH.get(reply.finish), "stop_sequence": None}
        events.append({"type": "message_delta", "delta": ending, "usage": empty["usage"]})
        events.append({"type": "message_stop"})
        form = b"event: %b\ndata: %b\n\n"
        return [form % (event["type"].encode(), orjson.dumps(event)) for event in events]

    def error(self, status: int, message: str, code: str | int | None = None) -> dict[str, Any]:
        """See `Dialect`; this API has no codes."""
        kind = self._ERRORS.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_0"}

    @staticmethod
    def _thinking(reasoning: str, signature: str) -> dict[str, Any]:
        return {"type": "thinking", "thinking": reasoning, "signature": signature}

    @staticmethod
    def _tool_use(call: Call, given: Any) -> dict[str, Any]:
        return {"type": "tool_use", "id": f"toolu_{call.key}", "name": call.name, "input": given}

    @staticmethod
    def _deltas(kind: str, text: str, *, name: str | None = None) -> list[dict[str, Any]]:
        return [{"type": f"{kind}_delta", name or kind: part} for part in _halves(text)]

    @staticmethod
    def _envelope(reply: Reply) -> dict[str, Any]:
        usage = {
            "input_tokens": reply.input_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"thinking_tokens": len(reply.reasoning) // 4},
        }
        identity = {"id": f"msg_{reply.key}", "type": "message", "role": "assistant"}
        return identity | {"model": reply.model, "stop_sequence": None, "usage": usage}


DIALECTS: Mapping[bytes, Dialect] = {
    b"/v1/chat/completions": OpenAIChat(),
    b"/v1/messages": AnthropicMessages(),
}


def play(ask: Ask, options: Options) -> Reply:
    """The reply of the script at this point of the conversation."""
    fault, key = ask.fault, f"{ask.conversation}_{ask.turn}"
    calls = [] if fault in ("length", "refusal") else _calls(ask, options)
    text = "" if calls else _filler("Answer", ask.conversation, ask.turn, options.text_chars)
    finish: str | None = "tool_calls" if calls else "stop"
    if fault == "empty_text":
        text = ""
    elif fault == "refusal":
        text, finish = "I cannot help with that.", fault
    elif fault == "length":
        text, finish = text[: len(text) // 2], fault
    elif fault == "no_finish":
        finish = None
    reasoning, signature = _reasoning(options, ask.conversation, ask.turn)
    ...
