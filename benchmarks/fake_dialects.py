"""What the fake endpoint says: two dialects of the same scripted replies, and their faults."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

JSON = dict[str, Any]
Key = tuple[str, int]
"""A conversation and the number of a reply in it, from 1."""

REPLY_FAULTS = ("length", "refusal", "empty_text", "bad_arguments")
"""Faults that are well-formed replies and count as delivered."""
FAULTS = (
    *("http500", "http429", "http529", "http403", "context", "disconnect", "reset", "hang", "html"),
    *("empty", "null", "cut", "bad_utf8", "error200", "no_choices", "no_finish", *REPLY_FAULTS),
)
BROKEN_ARGUMENTS = '{"cut": "'
KINDS = {
    **{400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"},
    403: "permission_error",
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


def openai_error(status: int, message: str) -> JSON:
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
        *(_openai_breach, _openai_body, _openai_events, openai_error),
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


def read_ask(path: str, headers: Mapping[str, str], body: bytes, options: Options) -> Ask:
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


def draw(ask: Ask, attempt: int, options: Options) -> Ask:
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


def respond(ask: Ask, options: Options) -> bytes:
    """The bytes that answer a request."""
    dialect = ask.dialect
    match ask.fault:
        case "http500" | "http429" | "http529" | "http403" as fault:
            error = dialect.error(int(fault[4:]), "the fault that was asked for")
            return frame(int(fault[4:]), error, "Retry-After: 0.05\r\n" if "429" in fault else "")
        case "context":
            return frame(400, dialect.error(400, dialect.too_long))
        case "error200":
            return frame(200, dialect.error(500, "the provider failed"))
        case "html":
            return frame(200, b"<html><body>Bad gateway</body></html>", mime="text/html")
        case "empty" | "null" as fault:
            return frame(200, b"" if fault == "empty" else b"null")
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
        return frame(200, parts[0])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])


def frame(status: int, body: JSON | bytes, more: str = "", mime: str = "application/json") -> bytes:
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
