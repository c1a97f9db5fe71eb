"""Replies in which any field has a value of any JSON type: read, or malformed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.dialects.dialect import get_dialect, read_own_reply, read_reply
from agent.models.error_bodies import error_behind_200, read_refusal
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, ignore_event
from agent.models.parsing import load_object
from agent.state.events import Clock, reply_event
from agent.wires.wires import WIRES
from batch_trajectories.basics import exact_json

JSON = dict[str, Any]
LOGPROBS = {"content": [{"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []}]}
USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 1}}
CHAT: JSON = {
    "id": "c1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "token_ids": [1],
            "logprobs": LOGPROBS,
            "meta_info": {"output_token_logprobs": [[-0.1, 1, None]]},
            "message": {
                "role": "assistant",
                "content": "a",
                "refusal": None,
                "reasoning_content": "b",
                "reasoning_details": [{"type": "reasoning.text", "text": "b", "index": 0}],
                "thinking_blocks": [{"type": "thinking", "thinking": "b", "signature": "s"}],
                "audio": {"data": "x"},
                "tool_calls": [
                    {
                        "id": "t1",
                        "type": "function",
                        "function": {"name": "f", "arguments": "{}"},
                    },
                    {"id": "t2", "type": "custom", "custom": {"name": "f", "input": "x"}},
                ],
            },
        },
        {"index": 1, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}},
    ],
    "prompt_token_ids": [1],
    "usage": USAGE,
}
MESSAGES: JSON = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "thinking", "thinking": "b", "signature": "s"},
        {"type": "text", "text": "a", "citations": [{"type": "page_location", "cited_text": "x"}]},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": {"input_tokens": 1, "output_tokens": 1, "cache_creation": {"a": 1}},
}
RESPONSES: JSON = {
    "id": "r1",
    "object": "response",
    "status": "completed",
    "error": None,
    "incomplete_details": {"reason": "max_output_tokens"},
    "model": "m",
    "output": [
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "b"}],
            "content": [{"type": "reasoning_text", "text": "b"}],
        },
        {
            "type": "message",
            "id": "m_1",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "no"},
            ],
        },
        {"type": "function_call", "id": "f1", "call_id": "t1", "name": "f", "arguments": "{}"},
        {"type": "custom_tool_call", "id": "f2", "call_id": "t2", "name": "f", "input": "x"},
        {"type": "local_shell_call", "id": "f3", "call_id": "t3", "action": {"command": ["ls"]}},
    ],
    "usage": {"input_tokens": 1, "output_tokens": 1, "output_tokens_details": {}},
}
GEMINI: JSON = {
    "candidates": [
        {
            "content": {
                "role": "model",
                "parts": [
                    {"text": "b", "thought": True, "thoughtSignature": "s"},
                    {"text": "a"},
                    {"functionCall": {"id": "t1", "name": "f", "args": {"a": 1}}},
                ],
            },
            "finishReason": "STOP",
            "index": 0,
        },
        {"content": {"parts": [{"text": "c"}]}, "finishReason": "STOP", "index": 1},
    ],
    "promptFeedback": {"blockReason": None},
    "usageMetadata": {"promptTokenCount": 1, "candidatesTokenCount": 1},
    "modelVersion": "m",
    "responseId": "g1",
}
WHOLE = {
    "openai_chat": CHAT,
    "anthropic_messages": MESSAGES,
    "openai_responses": RESPONSES,
    "gemini": GEMINI,
}
VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    1.5,
    2**70,
    "",
    "odd",
    [],
    [[]],
    [1],
    ["a"],
    [None],
    [{}],
    {},
    {"a": [1]},
)
"""One of each type, and those that hold others."""


def spoilt(value: Any) -> Iterator[Any]:
    """Copies of a JSON value in which one place has another value, or is missing."""
    yield from VALUES
    if isinstance(value, dict):
        for key in value:
            yield {name: value[name] for name in value if name != key}
            for odd in spoilt(value[key]):
                yield value | {key: odd}
    elif isinstance(value, list):
        for n, item in enumerate(value):
            for odd in spoilt(item):
                yield [*value[:n], odd, *value[n + 1 :]]


def settings_of(api: str) -> ModelSettings:
    return ModelSettings(name="m", api=api, base_url="http://x", key_env=None, token_ids=True)


def read(api: str, body: bytes) -> Completion | None:
    """What the body says, as it is recorded and priced; None if it is malformed or an error."""
    try:
        completion = read_own_reply(settings_of(api), body)
    except ModelError:
        return None
    message: Message = completion.message
    assert isinstance(message["content"], str)
    assert isinstance(message.get("reasoning", ""), str)
    for call in message.get("tool_calls", ()):
        assert all(isinstance(call["function"][key], str) for key in ("name", "arguments"))
        assert isinstance(call["id"], str)
    assert exact_json.dumps(reply_event(1, completion, Clock(), discarded=None))
    return completion


@pytest.mark.parametrize("api", WHOLE)
def test_any_value_in_a_whole_reply_is_read_or_malformed(api: str) -> None:
    wire, readable = WIRES[api], 0
    for odd in spoilt(WHOLE[api]):
        body = exact_json.dumps(odd) if not isinstance(odd, float) else b"1.5"
        if read(api, body) is not None:
            readable += 1
            assert wire.write_whole(load_object(body))
            assert all(isinstance(event, bytes) for event in wire.write_stream(load_object(body)))
    assert readable > 100


def events_of(api: str) -> list[JSON]:
    """The data of the events of a stream."""
    events = [event.partition(b"data: ")[2] for event in WIRES[api].write_stream(WHOLE[api])]
    return [json.loads(event) for event in events if event.startswith(b"{")]


@pytest.mark.parametrize("api", WHOLE)
def test_any_value_in_a_stream_is_read_or_malformed(api: str) -> None:
    wire, events, readable = WIRES[api], events_of(api), 0
    kinds = [(event.get("type"), sorted(event)) for event in events]
    for n, event in enumerate(events):
        for odd in spoilt(event) if kinds.index(kinds[n]) == n else ():
            assembly = get_dialect(api).assembly(ignore_event)
            assert wire.ends_reply(json.dumps(odd)) in (True, False)
            for part in (*events[:n], odd, *events[n + 1 :]):
                if isinstance(part, dict) and not part.get("error"):
                    assembly.add(part)
            readable += read(api, assembly.finish()) is not None
    assert readable > 100


@pytest.mark.parametrize("odd", VALUES)
def test_an_error_of_any_form_is_an_error(odd: Any) -> None:
    assert isinstance(error_behind_200(odd, "a reply"), ModelError)
    for key in ("message", "type", "code", "details", "param"):
        assert isinstance(error_behind_200({"message": "m", key: odd}, "a reply"), ModelError)
        body = json.dumps({"error": {key: odd}}).encode()
        assert isinstance(read_refusal(400, {}, body), ModelError)
    assert isinstance(read_refusal(400, {}, json.dumps(odd).encode()), ModelError)


@pytest.mark.parametrize(
    ("api", "key"),
    [("openai_chat", "finish_reason"), ("anthropic_messages", "stop_reason")],
)
@pytest.mark.parametrize("odd", [["stop"], {"a": 1}, 1, True])
def test_a_reason_that_is_no_text_is_malformed(api: str, key: str, odd: Any) -> None:
    whole = json.loads(json.dumps(WHOLE[api]))
    (whole["choices"][0] if api == "openai_chat" else whole)[key] = odd
    with pytest.raises(ModelError, match=key) as caught:
        read_reply(api, json.dumps(whole).encode())
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (429, r'{"error": {"code": "insufficient_quota", "message": "cut \ud83d"}}', "no_credit"),
        (400, r'{"error": {"type": "rate_limit_error", "message": "\udc00 cut"}}', "rate_limited"),
        (
            429,
            json.dumps({"error": {"message": r'{"code": "insufficient_quota", "why": "\ud83d"}'}}),
            "no_credit",
        ),
    ],
)
def test_half_an_emoji_in_an_error_hides_none_of_its_codes(
    status: int, body: str, kind: str
) -> None:
    """Servers that cut a text at a number of characters send one, whole and in a stream."""
    assert json.loads(body)
    refused = read_refusal(status, {}, body.encode())
    assert refused.kind == kind, str(refused)
    str(refused).encode()
    streamed = error_behind_200(exact_json.loads_part(body), "the stream")
    assert streamed.kind == kind, str(streamed)
    str(streamed).encode()
