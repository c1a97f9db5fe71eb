"""What a reply holds beyond what is known here is kept, and what belongs to a message goes back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.messages.message import Message, hides_reasoning
from agent.models.dialects import anthropic_messages, openai_chat, openai_responses
from agent.models.dialects.anthropic_messages import MessagesAssembly
from agent.models.dialects.dialect import merge
from agent.models.dialects.openai_chat import ChatAssembly, to_api
from agent.models.dialects.openai_responses import ResponsesAssembly
from agent.models.model import Completion, ModelSettings, Request
from agent.views.react import read_completion
from agent.views.views import compact
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.running import lines, run, write_rows

SIGNED = {"google": {"thought_signature": "c2lnbmF0dXJl"}}
LOGPROBS = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -1.5}]}


def signed_call(id: str = "c1", **more: Any) -> JSON:
    function = {"name": "list_files", "arguments": "{}", "strict": True}
    return {"id": id, "type": "function", "function": function, "extra_content": SIGNED, **more}


CHAT: JSON = {
    "id": "r",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "system_fingerprint": "fp_1",
    "service_tier": "default",
    "provider": "Somebody",
    "prompt_token_ids": [1, 2, 3],
    "x_trace": {"id": "t", "hops": [1, 2]},
    "choices": [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": "See.",
                "extra_content": {"google": {"thought_signature": "of the text"}},
                "annotations": [{"type": "url_citation", "url": "u"}],
                "audio": None,
                "tool_calls": [signed_call()],
            },
            "finish_reason": "tool_calls",
            "stop_reason": 128001,
            "logprobs": LOGPROBS,
            "token_ids": [7, 8],
            "content_filter_results": {"hate": {"filtered": False}},
        }
    ],
    "usage": {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 1, "audio_tokens": 0, "image_tokens": 4},
    },
}
"""A reply in one piece."""


def part(**more: Any) -> JSON:
    return {"id": "r", "object": "chat.completion.chunk", "created": 1, "model": "m", **more}


def delta(_choice: JSON | None = None, **fields: Any) -> JSON:
    choice = {"index": 0, "delta": fields, "logprobs": None, "finish_reason": None}
    return part(obfuscation="x7", choices=[{**choice, **(_choice or {})}])


CHUNKS: list[JSON] = [
    part(choices=[], prompt_token_ids=[1, 2, 3], system_fingerprint="fp_1", provider="Somebody"),
    delta({"content_filter_results": {}}, role="assistant", content="", annotations=[]),
    delta({"logprobs": {"content": LOGPROBS["content"][:1]}, "token_ids": [7]}, content="Se"),
    delta(
        {"logprobs": {"content": LOGPROBS["content"][1:]}, "token_ids": [8]},
        content="e.",
        extra_content={"google": {"thought_signature": "of the text"}},
    ),
    delta({"content_filter_results": {"hate": {"filtered": False}}}),
    delta(annotations=[{"type": "url_citation", "url": "u"}]),
    delta(tool_calls=[{"index": 0, **signed_call()}]),
    delta({"finish_reason": "tool_calls", "stop_reason": 128001}),
    part(
        choices=[],
        usage=CHAT["usage"],
        service_tier="default",
        x_trace={"id": "t", "hops": [1, 2]},
        provider="",
    ),
]
"""The same reply in parts."""


def chat(*parts: JSON) -> Completion:
    assembly = ChatAssembly(lambda _: None)
    for one in parts:
        assembly.add(one)
    return openai_chat.read_reply(assembly.finish())


def read_whole(reply: JSON = CHAT) -> Completion:
    return openai_chat.read_reply(json.dumps(reply).encode())


def test_a_chat_reply_keeps_all_that_it_held() -> None:
    reply = read_whole()
    assert reply.extra == {
        "reply": {
            "system_fingerprint": "fp_1",
            "service_tier": "default",
            "provider": "Somebody",
            "prompt_token_ids": [1, 2, 3],
            "x_trace": {"id": "t", "hops": [1, 2]},
        },
        "choice": {
            "stop_reason": 128001,
            "logprobs": LOGPROBS,
            "token_ids": [7, 8],
            "content_filter_results": {"hate": {"filtered": False}},
        },
        "usage": {"completion_tokens_details": {"image_tokens": 4}},
    }
    assert reply.message["tool_calls"] == [signed_call()]
    assert reply.message["provider_blocks"]["blocks"] == [
        {
            "extra_content": {"google": {"thought_signature": "of the text"}},
            "annotations": [{"type": "url_citation", "url": "u"}],
        }
    ]


def test_a_chat_stream_gives_the_same() -> None:
    assert chat(*CHUNKS) == read_whole()


def test_fields_of_a_message_are_sent_back_and_metadata_is_not() -> None:
    assert to_api(read_whole().message) == {
        "role": "assistant",
        "content": "See.",
        "tool_calls": [signed_call()],
        "extra_content": {"google": {"thought_signature": "of the text"}},
    }


def test_a_signed_text_shows_that_the_model_reasoned() -> None:
    reply = read_whole({**CHAT, "choices": [{**CHAT["choices"][0], "finish_reason": "stop"}]})
    blocks = reply.message["provider_blocks"]["blocks"]
    assert hides_reasoning(blocks, (), None)


def test_further_choices_are_kept_streamed_or_not() -> None:
    other = {"index": 1, "message": {"role": "assistant", "content": "Or so."}}
    other |= {"finish_reason": "stop", "token_ids": [9, 9]}
    reply = read_whole({**CHAT, "choices": [*CHAT["choices"], other]})
    assert reply.extra is not None
    assert reply.extra["choices"] == [other]
    of_other = [
        {"index": 1, "delta": {"content": "Or "}, "token_ids": [9]},
        {"index": 1, "delta": {"content": "so."}, "token_ids": [9], "finish_reason": "stop"},
    ]
    streamed = chat(*CHUNKS[:3], *(part(choices=[one]) for one in of_other), *CHUNKS[3:])
    assert streamed == reply
    odd: tuple[Any, ...] = ("1", [1], {"a": 1}, 1.5)
    assert chat(*(part(choices=[{"index": n, "delta": {}}]) for n in odd), *CHUNKS) == read_whole()


def test_a_plain_reply_has_nothing_more() -> None:
    """What says nothing costs a record nothing."""
    message: JSON = {"role": "assistant", "content": "Hi.", "refusal": None, "annotations": []}
    message |= {"function_call": None, "tool_calls": [{**signed_call(), "index": 0}]}
    del message["tool_calls"][0]["extra_content"], message["tool_calls"][0]["function"]["strict"]
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    details = {"cached_tokens": 0, "audio_tokens": 0}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": details}
    reply = read_whole({"id": "r", "choices": [choice], "usage": usage, "system_fingerprint": ""})
    assert reply.extra is None
    assert reply.message.keys() == {"role", "content", "tool_calls"}
    assert reply.message["tool_calls"][0].keys() == {"id", "type", "function"}


@pytest.mark.parametrize(
    ("parts", "merged"),
    [
        ([{"a": "x"}, {"a": "y"}, {"a": None}, {"a": ""}], {"a": "y"}),
        ([{"a": {"b": 1}}, {"a": {"c": {"d": 2}}}], {"a": {"b": 1, "c": {"d": 2}}}),
        (
            [{"token_ids": [5]}, {"token_ids": [5]}, {"token_ids": [5, 6]}],
            {"token_ids": [5, 5, 5, 6]},
        ),
        ([{"seen": [1]}, {"seen": [1]}, {"seen": [1, 2]}, {"seen": [3]}], {"seen": [1, 2, 3]}),
        (
            [{"logprobs": {"tokens": ["a"]}}, {"logprobs": {"tokens": ["a"]}}],
            {"logprobs": {"tokens": ["a", "a"]}},
        ),
        (
            [{"audio": {"id": "1", "data": "QU"}}, {"audio": {"id": "1", "data": "JD"}}],
            {"audio": {"id": "1", "data": "QUJD"}},
        ),
        ([{"a": [1]}, {"a": {"b": 1}}, {"a": 0}], {"a": 0}),
    ],
)
def test_parts_are_merged_by_one_rule(parts: list[JSON], merged: JSON) -> None:
    collected: JSON = {}
    for one in parts:
        merge(collected, one)
    assert collected == merged


def test_a_call_streamed_in_many_parts_keeps_its_signature() -> None:
    """Some send it with the first part, some with a part of its own."""
    first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    for where in range(3):
        parts: list[JSON] = [first, {"index": 0, "function": {"arguments": "{}"}}, {"index": 0}]
        parts[where] = {**parts[where], "extra_content": SIGNED}
        reply = chat(*(delta(tool_calls=[one]) for one in parts), delta({"finish_reason": "stop"}))
        (call,) = reply.message["tool_calls"]
        assert call.get("extra_content") == SIGNED
        assert call["function"] == {"name": "f", "arguments": "{}"}


def test_a_call_shown_in_short_keeps_its_signature() -> None:
    message = read_whole().message
    message["tool_calls"][0]["function"]["arguments"] = json.dumps({"text": "x" * 5000})
    later = Message(role="assistant", content="Later.")
    view = compact([message, *[later] * 9], after=1)
    (call,) = to_api(view[0])["tool_calls"]
    assert len(call["function"]["arguments"]) < 5000
    assert call["extra_content"] == SIGNED
    assert call["function"]["strict"] is True


def test_other_dialects_are_not_sent_fields_of_this_one() -> None:
    message = read_whole().message
    sent = [openai_responses.to_api_items([message]), anthropic_messages.to_api_messages([message])]
    assert "extra_content" not in json.dumps(sent)
    assert "strict" not in json.dumps(sent)


def test_the_text_protocol_keeps_what_it_does_not_send() -> None:
    plain = {**CHAT["choices"][0]["message"], "content": "Final Answer: 4", "tool_calls": None}
    choice = {"message": {**plain, "reasoning": "Hm."}, "finish_reason": "stop"}
    tools = [{"function": {"name": "f"}}]
    request = Request([Message(role="user", content="Go.")], tools)
    reply = read_completion(read_whole({**CHAT, "choices": [choice], "usage": None}), request)
    assert reply.message["content"] == "4"
    assert reply.extra is not None
    assert reply.extra["reply"]["system_fingerprint"] == "fp_1"
    assert reply.extra["message"] == [{key: plain[key] for key in ("extra_content", "annotations")}]


@pytest.mark.parametrize("thinks", [False, True])
def test_a_block_goes_back_with_its_own_fields_only(thinks: bool) -> None:
    """What a server puts into a call besides is refused by Anthropic; its text is not lost."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {"text": "own"}}
    more: JSON = {"text": "\nNow g.", "signature": "s", "data": "d", "citations": None}
    more |= {"caller": {"type": "direct"}, "content": [], "cited": 1, "is_error": False}
    if thinks:
        more["thinking"] = "Hm."
    said: JSON = {"type": "text", "text": "I look.", "citations": None, "id": "x", "input": {}}
    thought = {"type": "thinking", "thinking": "So.", "signature": "sig", "text": ""}
    empty = {"type": "tool_use", "id": "u", "name": "g", "input": None, "text": None}
    of_tomorrow = {"type": "of_tomorrow", "text": None, "data": "d"}
    blocks = [thought, said, {**call, **more}, empty, of_tomorrow]
    reply = {"role": "assistant", "content": blocks, "stop_reason": "tool_use"}
    message = anthropic_messages.read_reply(json.dumps(reply).encode()).message
    assert message["content"] == "I look.\nNow g."
    assert message["reasoning"] == ("So.\n\nHm." if thinks else "So.")
    assert message["provider_blocks"]["blocks"] == blocks, "as it came"
    (sent,) = anthropic_messages.to_api_messages([message])
    assert sent["content"] == [
        {"type": "thinking", "thinking": "So.", "signature": "sig"},
        {"type": "text", "text": "I look."},
        {"type": "text", "text": "\nNow g."},
        {**call, "caller": {"type": "direct"}, "cited": 1},
        {"type": "tool_use", "id": "u", "name": "g", "input": {"raw_arguments": "null"}},
        of_tomorrow,
    ]


ANTHROPIC: JSON = {
    "id": "m1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [
        {"type": "text", "text": "hi", "marks": {"a": 1}},
        {"type": "tool_use", "id": "t", "name": "f", "input": {}, "caller": {"type": "direct"}},
    ],
    "stop_reason": "tool_use",
    "stop_sequence": "END",
    "container": {"id": "box"},
    "context_management": {"applied_edits": [{"type": "cleared", "count": 2}]},
    "usage": {
        "input_tokens": 5,
        "output_tokens": 7,
        "service_tier": "standard",
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 9},
        "server_tool_use": {"web_search_requests": 0},
    },
}


def test_an_anthropic_reply_keeps_all_that_it_held_streamed_or_not() -> None:
    reply = anthropic_messages.read_reply(json.dumps(ANTHROPIC).encode())
    assert reply.extra == {
        "reply": {
            "stop_sequence": "END",
            "container": {"id": "box"},
            "context_management": {"applied_edits": [{"type": "cleared", "count": 2}]},
        },
        "usage": {
            "service_tier": "standard",
            "cache_creation": {"ephemeral_1h_input_tokens": 9},
        },
    }
    assert reply.message["provider_blocks"]["blocks"] == ANTHROPIC["content"]
    sent = anthropic_messages.to_api_messages([reply.message])
    assert sent == [{"role": "assistant", "content": ANTHROPIC["content"]}]
    assembly = MessagesAssembly(lambda _: None)
    text, use = ANTHROPIC["content"]
    opening = {**ANTHROPIC, "content": [], "stop_reason": None, "stop_sequence": None}
    end = {"stop_reason": "tool_use", "stop_sequence": "END", "container": {"id": "box"}}
    del opening["context_management"], opening["container"]
    for event in (
        {"type": "message_start", "message": opening},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "h"}},
        {
            "type": "content_block_delta",
            "index": 0,
            "delta": {"type": "text_delta", "text": "i", "marks": text["marks"]},
        },
        {"type": "content_block_start", "index": 1, "content_block": use},
        {
            "type": "message_delta",
            "delta": end,
            "usage": {"output_tokens": 7},
            "context_management": ANTHROPIC["context_management"],
        },
    ):
        assembly.add(event)
    assert anthropic_messages.read_reply(assembly.finish()) == reply


RESPONSE: JSON = {
    "id": "resp_1",
    "object": "response",
    "status": "completed",
    "model": "m",
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f"}],
    "temperature": 1.0,
    "service_tier": "flex",
    "billing": {"payer": "us"},
    "output": [
        {
            "type": "message",
            "id": "msg",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "hi", "logprobs": [{"token": "hi"}]}],
        },
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "signature": "s"},
    ],
    "usage": {"input_tokens": 5, "output_tokens": 2, "cost_in_ticks": 12, "total_tokens": 7},
}


def test_a_response_keeps_all_that_it_held_streamed_or_not() -> None:
    reply = openai_responses.read_reply(json.dumps(RESPONSE).encode())
    assert reply.extra == {
        "reply": {"service_tier": "flex", "billing": {"payer": "us"}},
        "usage": {"cost_in_ticks": 12},
    }
    assert reply.message["provider_blocks"]["blocks"] == RESPONSE["output"]
    text, call = openai_responses.to_api_items([reply.message])
    assert text["content"] == [{"type": "output_text", "text": "hi"}]
    assert call == RESPONSE["output"][1]
    assembly = ResponsesAssembly(lambda _: None)
    assembly.add({"type": "response.completed", "response": RESPONSE})
    assert openai_responses.read_reply(assembly.finish()) == reply


def answer(reply: JSON) -> JSON:
    """The last reply of a conversation."""
    return {**reply, **chat_reply("done")}


SETTINGS = ModelSettings(name="m", api="openai_chat", base_url=None, key_env=None)


@pytest.mark.slow
def test_a_resumed_run_and_its_forks_send_back_what_came(tmp_path: Path) -> None:
    """Through journal, record and branch the signature is what Gemini wants to see again."""
    write_rows(tmp_path / "p.jsonl", {"id": "a", "prompt": "x"})
    refused = True

    def endpoint(_: str, body: JSON) -> tuple[int, JSON]:
        if not any(message["role"] == "tool" for message in body["messages"]):
            return 200, CHAT
        return (401, {"error": {"message": "no"}}) if refused else (200, answer(CHAT))

    options: dict[str, Any] = {
        "model": "m",
        "key_env": "none",
        "enabled_toolsets": "file",
        "num_workers": 1,
    }
    with answering(endpoint) as (root, requests):
        given: dict[str, Any] = {
            **options,
            "base_url": f"{root}/v1",
            "run_name": "r",
            "dataset_file": "p.jsonl",
        }
        assert run(tmp_path, **given).returncode != 0
        refused = False
        before = len(requests)
        done = run(tmp_path, **given)
        assert done.returncode == 0, done.stderr
        assert len(requests) == before + 1, "the first reply is in the journal"
        given = {"base_url": f"{root}/v1", "run_name": "b", "at_turn": 1, "n": 1}
        done = run(tmp_path, "fork", "trajectories/r", **given)
        assert done.returncode == 0, done.stderr
    signed = to_api(read_whole().message)
    assert requests[-1]["messages"][1] == requests[before]["messages"][1] == signed
    for name in ("r", "b"):
        record = lines(tmp_path / "trajectories" / name / "records.jsonl")[0]
        assert record["messages"][1] == read_whole().message
        assert record["turns"][0]["extra"] == read_whole().extra
        assert "thought_signature" not in (tmp_path / "trajectories" / f"{name}.jsonl").read_text()


def test_a_request_is_the_same_for_messages_without_unknown_fields() -> None:
    plain = Message(role="assistant", content="Hi.", reasoning="Hm.")
    plain["provider_blocks"] = {"api": "openai_chat", "blocks": [{"reasoning_content": "Hm."}]}
    body = openai_chat.request_body(SETTINGS, Request([plain]))
    said = {"role": "assistant", "content": "Hi.", "reasoning_content": "Hm."}
    assert body["messages"] == [said]
