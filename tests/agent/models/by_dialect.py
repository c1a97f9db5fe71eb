"""What tests have to know of each dialect: one `Sample` each, in `SAMPLES`.

The clients of the providers are imported where they are used: they take seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

JSON = dict[str, Any]


class Sample(NamedTuple):
    """Replies in a dialect, and requests by the client of its provider."""

    whole: Callable[[str, str], JSON]
    """A reply with a text, and a call of `f` with these arguments."""
    events: Callable[[Sequence[str]], list[JSON]]
    """The parts of a streamed reply that says these pieces of a text."""
    usage: JSON
    """The `usage` of a reply: 7 tokens of input, 3 of output."""
    cost_usd: float | None
    """What that says of its cost."""
    options: JSON
    """Those that the requests of client and program are compared with."""
    send: Callable[[str, str, JSON], Coroutine[Any, Any, None]]
    """Has the client send a body to a server at a root, with a key; the server refuses it."""


def _chat(text: str, arguments: str) -> JSON:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    return {"id": "r", "choices": [{"message": message, "finish_reason": "tool_calls"}]}


def _chat_events(pieces: Sequence[str]) -> list[JSON]:
    parts = [{"choices": [{"delta": {"content": piece}}]} for piece in pieces]
    return [*parts, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]


async def _send_chat(root: str, key: str, body: JSON) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=root + "/v1", api_key=key) as client:
        try:
            await client.chat.completions.create(**body)
        except openai.APIStatusError:
            return
    raise AssertionError("the server took it")


def _responses(text: str, arguments: str) -> JSON:
    said = {"type": "message", "content": [{"type": "output_text", "text": text}]}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    return {"status": "completed", "output": [said, call]}


def _responses_events(pieces: Sequence[str]) -> list[JSON]:
    item = {"type": "message", "content": [{"type": "output_text", "text": "".join(pieces)}]}
    return [
        *({"type": "response.output_text.delta", "delta": piece} for piece in pieces),
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"status": "completed", "output": [item]}},
    ]


async def _send_responses(root: str, key: str, body: JSON) -> None:
    import openai

    async with openai.AsyncOpenAI(base_url=root + "/v1", api_key=key) as client:
        try:
            await client.responses.create(**body)
        except openai.APIStatusError:
            return
    raise AssertionError("the server took it")


def _messages(text: str, arguments: str) -> JSON:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": json.loads(arguments)}
    return {"content": [{"type": "text", "text": text}, call], "stop_reason": "tool_use"}


def _messages_events(pieces: Sequence[str]) -> list[JSON]:
    deltas = [{"type": "text_delta", "text": piece} for piece in pieces]
    return [
        {"type": "message_start", "message": {"id": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text"}},
        *({"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas),
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}},
    ]


async def _send_messages(root: str, key: str, body: JSON) -> None:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=root, api_key=key) as client:
        try:
            await client.messages.create(**body)
        except anthropic.APIStatusError:
            return
    raise AssertionError("the server took it")


SAMPLES: Mapping[str, Sample] = {
    "openai_chat": Sample(
        whole=_chat,
        events=_chat_events,
        usage={"prompt_tokens": 7, "completion_tokens": 3, "cost": 0.5},
        cost_usd=0.5,
        options={"temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "reasoning_effort": "low"},
        send=_send_chat,
    ),
    "openai_responses": Sample(
        whole=_responses,
        events=_responses_events,
        usage={"input_tokens": 7, "output_tokens": 3},
        cost_usd=None,
        options={"temperature": 0.5, "max_tokens": 9, "reasoning_effort": "low"},
        send=_send_responses,
    ),
    "anthropic_messages": Sample(
        whole=_messages,
        events=_messages_events,
        usage={"input_tokens": 7, "output_tokens": 3},
        cost_usd=None,
        options={"max_tokens": 9, "reasoning_effort": "low"},
        send=_send_messages,
    ),
}
