"""The OpenAI chat and the Anthropic messages dialect of the fake endpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import orjson

from tests.fakes.fake_script import JSON, Dialect, Key, Options, Reply, digest, thought_of
from tests.fakes.fake_tokens import in_parts

KINDS = {
    **dict.fromkeys((400, 422), "invalid_request_error"),
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    **dict.fromkeys((500, 502, 503), "api_error"),
    529: "overloaded_error",
}
"""What an error of each status is called."""


def opening(request: JSON) -> tuple[str, int]:
    """See `Dialect.opening`."""
    messages = request["messages"]
    first = next((m["content"] for m in messages if m["role"] == "user"), "")
    return text_of(first), sum(m["role"] == "assistant" for m in messages)


def text_of(content: Any) -> str:
    """The text of a message, which may be in parts."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


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
            if len(set(awaited)) < len(awaited):
                return f"messages[{n}]: ids of tool_calls are repeated"
    return None


def _openai_body(reply: Reply) -> JSON:
    message: JSON = {
        "role": "assistant",
        "content": None if reply.calls and not reply.text else reply.text,
    }
    if reply.thought:
        message["reasoning_content"] = reply.thought
    if reply.finish == "refusal":
        message |= {"content": None, "refusal": reply.text}
    if reply.calls:
        message["tool_calls"] = [
            ({} if call["id"] is None else {"id": "call_" + call["id"]})
            | {"type": "function"}
            | {"function": {"name": call["name"], "arguments": call["arguments"]}}
            for call in reply.calls
        ]
    finish = "content_filter" if reply.finish == "refusal" else reply.finish
    return {
        "id": "chatcmpl-{}_{}".format(*reply.key),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.model,
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
    usage, steps = chunk.pop("usage", None), []
    prompt = chunk.pop("prompt_token_ids", None)
    for choice in body["choices"]:
        message = choice["message"]
        calls = message.pop("tool_calls", ())
        deltas = [{name: said} for name, said in message.items() if said]
        deltas += [{"tool_calls": [{"index": n, **call}]} for n, call in enumerate(calls)]
        steps = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
        steps.append({"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]})
        steps = [
            step | part for step, part in zip(steps, in_parts(choice, len(steps)), strict=True)
        ]
    chunks = [{**chunk, "choices": [step]} for step in steps] or [chunk]
    if prompt is not None:
        chunks[0]["prompt_token_ids"] = prompt
    if usage and (request.get("stream_options") or {}).get("include_usage"):
        chunks.append({**chunk, "usage": usage})
    return [*(b"data: %b\n\n" % orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]\n\n"]


def openai_error(status: int, message: str) -> JSON:
    """The body of an error, as both OpenAI dialects have it."""
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
        calls = [block for block in blocks if block["type"] == "tool_use"]
        if not all(isinstance(call["input"], dict) for call in calls):
            return f"messages.{n}: tool_use.input: Input should be a valid dictionary"
        awaited = [call["id"] for call in calls]
        if len(set(awaited)) < len(awaited):
            return f"messages.{n}: `tool_use` ids must be unique"
        if message["role"] == "user" or not options.reasoning_chars:
            continue
        turn += 1
        thoughts = [block for block in blocks if block["type"] == "thinking"]
        # After a reply that paused, its continuation stands in the same message.
        turns = (turn, *range(1, len(request["messages"]) + 2))
        if not all(_is_genuine(thought, conversation, turns, options) for thought in thoughts):
            return f"messages.{n}: Invalid `signature` in `thinking` block, or altered thinking"
        if awaited and blocks[0] not in thoughts:
            return f"messages.{n}.content.0: Expected `thinking`, found `{blocks[0]['type']}`"
    return None


def _is_genuine(thought: JSON, conversation: str, turns: tuple[int, ...], options: Options) -> bool:
    keys = ((conversation, turn) for turn in turns)
    return any(
        thought["signature"] == _signature(key) and thought["thinking"] == thought_of(options, key)
        for key in keys
    )


def _signature(key: Key) -> str:
    return digest(f"signed {key}", 32)


def _anthropic_body(reply: Reply) -> JSON:
    names = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
    blocks: list[JSON] = []
    if reply.thought:
        signature = _signature(reply.key)
        blocks.append({"type": "thinking", "thinking": reply.thought, "signature": signature})
    if reply.text:
        blocks.append({"type": "text", "text": reply.text})
    for call in reply.calls:
        block = {"type": "tool_use", "name": call["name"], "input": _input(call["arguments"])}
        blocks.append(block if call["id"] is None else {**block, "id": "toolu_" + call["id"]})
    return {
        "id": "msg_{}_{}".format(*reply.key),
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": blocks,
        "stop_sequence": None,
        "stop_reason": names.get(reply.finish or "", reply.finish),
        "usage": {
            "input_tokens": reply.input_tokens - reply.cached_tokens,
            "cache_read_input_tokens": reply.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": reply.output_tokens,
            "output_tokens_details": {"thinking_tokens": len(reply.thought) // 4},
        },
    }


def _input(arguments: str) -> Any:
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments


def _anthropic_events(body: JSON, request: JSON) -> list[bytes]:
    message = {**body, "content": [], "stop_reason": None}
    events: list[JSON] = [{"type": "message_start", "message": message}]
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
    usage = {"usage": body["usage"]} if "usage" in body else {}
    events.append({"type": "message_delta", "delta": ending, **usage})
    events.append({"type": "message_stop"})
    return [named_event(event) for event in events]


def named_event(event: JSON) -> bytes:
    """An event of a stream whose name is its type."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


def _anthropic_error(status: int, message: str) -> JSON:
    error = {"type": KINDS[status], "message": message}
    return {"type": "error", "error": error, "request_id": "req_fake"}


NO_QUOTA = {"message": "You exceeded your current quota", "type": "insufficient_quota"}
NO_QUOTA["code"] = "insufficient_quota"

CHAT = Dialect(
    opening=opening,
    breach=_openai_breach,
    body=_openai_body,
    events=_openai_events,
    error=openai_error,
    error_event=lambda error: b"data: %b\n\n" % orjson.dumps(error),
    quota=(429, {"error": NO_QUOTA}),
    too_long="This model's maximum context length is 128000 tokens, you sent 130000",
    hollow={"choices": []},
    lacks=frozenset({"pause", "context_stop"}),
)

MESSAGES = Dialect(
    opening=opening,
    breach=_anthropic_breach,
    body=_anthropic_body,
    events=_anthropic_events,
    error=_anthropic_error,
    error_event=named_event,
    quota=(400, _anthropic_error(400, "Your credit balance is too low to access the API.")),
    too_long="prompt is too long: 210000 tokens > 200000 maximum",
    hollow={"content": None},
    lacks=frozenset({"roles", "other_reasoning"}),
)
