"""Model clients: what goes out, what comes back, and what each failure means."""

from __future__ import annotations

import asyncio
import dataclasses
import tracemalloc
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest
from hypothesis import given as given_any
from hypothesis import strategies as st

from agent.messages.message import Message, split_inline_reasoning
from agent.models.batches.calls import has_batches
from agent.models.client.endpoint import EndpointModel
from agent.models.dialects import anthropic_messages, openai_chat, openai_responses
from agent.models.error_bodies import retry_after_s
from agent.models.errors import RULES, ModelError, classify_error
from agent.models.model import Completion, ModelSettings, Request
from agent.models.parsing import parse_object
from agent.models.prices import has_known_price, price
from agent.models.resolve import MissingKey, UnknownModel, read_key, resolve_model, resolve_sibling
from agent.models.scripted import parse_script
from batch_trajectories.basics.exact_json import is_nested_too_deep
from batch_trajectories.config.endpoint_config import EndpointConfig
from tests.helpers.answering import answering

SETTINGS = ModelSettings(name="m", api="openai_chat", base_url="http://x", key_env=None)
ANTHROPIC = dataclasses.replace(SETTINGS, api="anthropic_messages")
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}},
    }
]


def resolve(name: str, **given: Any) -> ModelSettings:
    return resolve_model(name, **{"base_url": None, "api": None, "key_env": None, **given})


def openai_reply(message: dict[str, Any], finish: Any = "stop", **more: Any) -> Completion:
    body = {"choices": [{"message": message, "finish_reason": finish}], **more}
    return openai_chat.read_reply(orjson.dumps(body))


def anthropic_reply(*blocks: dict[str, Any], stop: Any = "end_turn", **more: Any) -> Completion:
    body = {"content": list(blocks), "stop_reason": stop, **more}
    return anthropic_messages.read_reply(orjson.dumps(body))


@pytest.mark.parametrize(
    "message",
    [
        {"content": "hi", "reasoning_content": "why"},
        {"content": "hi", "reasoning": "why"},
        {"content": "hi", "reasoning": "why", "reasoning_content": "why"},
        {"content": "hi", "reasoning_details": [{"type": "reasoning.text", "text": "why"}]},
        {"content": "<think>\nwhy\n</think>\n\nhi"},
        {"content": [{"type": "text", "text": "hi"}], "reasoning": "why"},
    ],
)
def test_openai_reasoning_is_found_under_every_name_and_goes_back(message: Any) -> None:
    read = openai_reply(message).message
    assert (read["content"], read["reasoning"]) == ("hi", "why")
    sent = openai_chat.to_api(read)
    for field in message.keys() - {"content"}:
        assert sent[field] == message[field], "what came goes back verbatim"
    if isinstance(message["content"], str):
        assert sent["content"] == message["content"]


def test_openai_reasoning_goes_back_as_reasoning_content() -> None:
    """Where it did not come from this API; what came from it goes back in its own field alone."""
    sent = openai_chat.to_api(Message(role="assistant", content="hi", reasoning="why"))
    assert sent["reasoning_content"] == "why"
    own = openai_chat.to_api(openai_reply({"content": "hi", "reasoning": "why"}).message)
    assert own == {"role": "assistant", "content": "hi", "reasoning": "why"}


def test_openai_messages_carry_nothing_of_ours() -> None:
    """Private keys of the record would be refused by strict servers."""
    tool = Message(
        role="tool", tool_call_id="1", name="f", content="x", is_error=True, details={"a": 1}
    )
    assert openai_chat.to_api(tool) == {"role": "tool", "tool_call_id": "1", "content": "x"}
    plain = openai_chat.to_api(openai_reply({"content": "hi"}).message)
    assert plain == {"role": "assistant", "content": "hi"}


def test_openai_arguments_are_kept_as_text() -> None:
    """Also where a server sends an object, and also where the text is not JSON."""
    calls = [
        {"id": "1", "function": {"name": "f", "arguments": '{"a": 1'}},
        {"id": "2", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": None, "function": {"name": "f"}},
    ]
    read = openai_reply({"content": None, "tool_calls": calls}, "tool_calls").message
    assert [c["function"]["arguments"] for c in read["tool_calls"]] == ['{"a": 1', '{"a":1}', "{}"]
    assert read["content"] == ""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"<html>",
        b'{"choices": [{"mess',
        b"\xff\xfe",
        b"{}",
        b'{"choices": null}',
        b'{"choices": []}',
        b'{"choices": [{"finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"content": "cut"}}]}',
        b'{"choices": [{"message": {"content": ""}, "finish_reason": null}]}',
        b'{"choices": [{"message": {"content": "cut"}, "finish_reason": "error"}]}',
        b'{"choices": [{"message": {"tool_calls": "x"}, "finish_reason": "stop"}]}',
        b'{"choices": [{"message": {"tool_calls": [1]}, "finish_reason": "stop"}]}',
        b'{"error": {"message": "boom"}}',
        b'{"choices": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a": "\\ud83d", "n": 123456789012345678901234567890}',
    ],
)
def test_an_incomplete_openai_reply_is_malformed_and_never_a_result(body: bytes) -> None:
    with pytest.raises(ModelError) as caught:
        openai_chat.read_reply(body)
    assert caught.value.kind == "malformed"
    assert caught.value.action == "retry"


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"content": "text", "stop_reason": "end_turn"}',
        b'{"content": [1], "stop_reason": "end_turn"}',
        b'{"content": [], "stop_reason": null}',
        b'{"type": "error", "error": {"type": "odd_error", "message": "x"}}',
    ],
)
def test_an_incomplete_anthropic_reply_is_malformed(body: bytes) -> None:
    with pytest.raises(ModelError) as caught:
        anthropic_messages.read_reply(body)
    assert caught.value.kind == "malformed"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ({"code": 429, "message": "slow down"}, "rate_limited"),
        ({"code": "429"}, "rate_limited"),
        ({"code": "rate_limit_exceeded"}, "rate_limited"),
        ({"code": None, "type": "overloaded_error"}, "overloaded"),
        ({"type": "insufficient_quota", "code": "insufficient_quota"}, "no_credit"),
        ({"code": 200, "message": "odd"}, "malformed"),
        ("boom", "malformed"),
    ],
)
def test_an_error_in_a_200_reply_counts_by_its_code_or_type(error: Any, kind: str) -> None:
    with pytest.raises(ModelError) as caught:
        parse_object(orjson.dumps({"error": error}))
    assert caught.value.kind == kind


def test_half_an_emoji_in_a_reply_is_replaced() -> None:
    """A token limit can cut a character in two; asking again would pay twice."""
    assert parse_object(b'{"a": "x\\ud83d"}') == {"a": "x\ufffd"}


@pytest.mark.parametrize(
    ("finish", "means"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("content_filter", "refusal"),
    ],
)
def test_openai_finish_reasons(finish: str, means: str) -> None:
    assert openai_reply({"content": "x"}, finish).finish_reason == means


def test_openai_usage_keeps_unknown_unknown() -> None:
    assert openai_reply({"content": "x"}).usage is None
    usage = openai_reply(
        {"content": "x"},
        usage={
            "prompt_tokens": 10,
            "completion_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 4.0, "cache_write_tokens": 0.5},
            "cost": 0.25,
        },
    )
    assert usage.usage == {
        "input_tokens": 10,
        "output_tokens": 5,
        "cache_read_tokens": 4,
        "cache_write_tokens": None,
        "reasoning_tokens": None,
    }
    assert usage.cost_usd == 0.25


THINKING: dict[str, Any] = {"type": "thinking", "thinking": "why", "signature": "sig"}
REDACTED: dict[str, Any] = {"type": "redacted_thinking", "data": "opaque"}
TOOL_USE: dict[str, Any] = {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}


def test_anthropic_thinking_goes_back_verbatim_and_in_order() -> None:
    blocks = (THINKING, REDACTED, {"type": "text", "text": "hi"}, TOOL_USE)
    read = anthropic_reply(*blocks, stop="tool_use").message
    assert (read["content"], read["reasoning"]) == ("hi", "why")
    assert read["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a":1}'}
    body = anthropic_messages.request_body(SETTINGS, Request([read]))
    assert body["messages"] == [{"role": "assistant", "content": list(blocks)}]


def test_anthropic_text_of_white_space_does_not_go_back() -> None:
    """The API gives such blocks before a tool call, and refuses to take them."""
    blank: dict[str, Any] = {"type": "text", "text": "\n\n"}
    for blocks in ([THINKING, blank, TOOL_USE], [blank, TOOL_USE]):
        read = anthropic_reply(*blocks, stop="tool_use").message
        (sent,) = anthropic_messages.request_body(SETTINGS, Request([read]))["messages"]
        assert blank not in sent["content"]


def test_an_openai_refusal_is_a_refusal_and_its_words_are_kept() -> None:
    reply = openai_reply({"content": None, "refusal": "I cannot help with that."})
    assert (reply.finish_reason, reply.message["content"]) == (
        "refusal",
        "I cannot help with that.",
    )


@pytest.mark.parametrize(
    ("url", "key"),
    [("https://api.openai.com/v1", "max_completion_tokens"), ("http://h/v1", "max_tokens")],
)
def test_max_tokens_has_the_name_that_the_endpoint_knows(url: str, key: str) -> None:
    settings = resolve("openai:m", base_url=url)
    body = openai_chat.request_body(dataclasses.replace(settings, max_tokens=5), Request([]))
    assert body[key] == 5


def test_an_empty_text_beside_calls_is_said_as_openai_says_it() -> None:
    """Where there are no calls it stays a text, for null is refused there."""
    called = openai_reply({"content": None, "tool_calls": [CALL]}, "tool_calls").message
    assert called["content"] == "", "the record holds texts"
    assert openai_chat.to_api(called)["content"] is None
    assert openai_chat.to_api({**called, "content": "so"})["content"] == "so"
    assert openai_chat.to_api(Message(role="assistant", content=""))["content"] == ""
    for cut, sent in (("", None), ("a", "a")):
        views = openai_chat.to_api_messages([Message(role="assistant", content=cut), called])
        assert [view["content"] for view in views] == [sent]


@pytest.mark.parametrize("listens", [False, True])
def test_thinking_blocks_of_litellm_are_sent_back_verbatim(listens: bool) -> None:
    """It takes signed thoughts only so, and shows the model a sentence for an empty text."""
    block = {"type": "thinking", "thinking": "why", "signature": "s"}
    said = {"role": "assistant", "content": None, "tool_calls": [CALL], "thinking_blocks": [block]}
    said["reasoning_content"] = "why"

    def answer(path: str, body: Any) -> tuple[int, Any]:
        return 200, {"choices": [{"message": said, "finish_reason": "tool_calls"}]}

    async def converse(root: str) -> Message:
        model = EndpointModel(dataclasses.replace(SETTINGS, base_url=root), "k")
        opening = [Message(role="user", content="a")]
        handler = (lambda event: None) if listens else None
        reply = await model.complete(Request(opening, TOOLS, on_delta=handler))
        result = Message(role="tool", tool_call_id="1", name="f", content="x")
        await model.complete(Request([*opening, reply.message, result], TOOLS, on_delta=handler))
        await model.close()
        return reply.message

    with answering(answer) as (root, requests):
        message = asyncio.run(converse(root))
    assert (message["content"], message["reasoning"]) == ("", "why")
    assert requests[1]["messages"][1] == said


@pytest.mark.parametrize("host", ["api.openai.com", "eu.api.openai.com"])
def test_the_turns_of_one_conversation_share_a_cache_key_at_openai(host: str) -> None:
    settings = resolve("openai:m", base_url=f"https://{host}/v1")

    def key(*messages: Message) -> Any:
        return openai_chat.request_body(settings, Request(messages))["prompt_cache_key"]

    a, b = (Message(role="user", content=text) for text in "ab")
    reply = Message(role="assistant", content="x")
    assert key(a) == key(a, reply, b) != key(b)
    responses = openai_responses.request_body(settings, Request([a]))
    assert responses["prompt_cache_key"] == key(a)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/v1", "https://api.openai.com.example/v1"])
@pytest.mark.parametrize("dialect", [openai_chat, openai_responses])
def test_no_other_endpoint_is_sent_a_cache_key(url: str, dialect: Any) -> None:
    settings = resolve("openai:m", base_url=url)
    body = dialect.request_body(settings, Request([Message(role="user", content="a")]))
    assert "prompt_cache_key" not in body


def test_anthropic_body_has_system_beside_and_results_together() -> None:
    messages = [
        Message(role="system", content="be brief"),
        Message(role="user", content="hi"),
        anthropic_reply(TOOL_USE, {**TOOL_USE, "id": "t2"}, stop="tool_use").message,
        Message(role="tool", tool_call_id="t1", name="f", content="A", is_error=False),
        Message(role="tool", tool_call_id="t2", name="f", content="B", is_error=True),
    ]
    body = anthropic_messages.request_body(ANTHROPIC, Request(messages, TOOLS))
    assert body["system"][0]["text"] == "be brief"
    assert body["max_tokens"] == 16_000
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    assert [b["is_error"] for b in body["messages"][2]["content"]] == [False, True]
    assert body["tools"] == [{"name": "f", "description": "F.", "input_schema": {"type": "object"}}]


def user(content: str) -> Message:
    return Message(role="user", content=content)


def calling_message(content: str, *ids: str, kept: Any = None) -> Message:
    """An assistant message that calls `f` once for each id."""
    message = Message(role="assistant", content=content)
    if ids:
        function: Any = {"name": "f", "arguments": "{}"}
        message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id in ids]
    if kept is not None:
        message["provider_blocks"] = kept
    return message


def result(id: str) -> Message:
    return Message(role="tool", tool_call_id=id, name="f", content="x", is_error=False)


def sent_to_openai(*messages: Message, **settings: Any) -> list[dict[str, Any]]:
    body = openai_chat.request_body(
        dataclasses.replace(SETTINGS, **settings), Request(list(messages))
    )
    views: list[dict[str, Any]] = body["messages"]
    return views


def sent_to_anthropic(*messages: Message) -> list[dict[str, Any]]:
    body = anthropic_messages.request_body(SETTINGS, Request(list(messages)))
    views: list[dict[str, Any]] = body["messages"]
    return views


def test_tools_can_be_offered_and_forbidden_at_once() -> None:
    """Without tools the field itself would be refused."""
    forbidden = Request([user("hi")], TOOLS, tool_choice="none")
    body = openai_chat.request_body(SETTINGS, forbidden)
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "none")
    body = anthropic_messages.request_body(SETTINGS, forbidden)
    assert (len(body["tools"]), body["tool_choice"]) == (1, {"type": "none"})
    for request in (Request([user("hi")], tool_choice="none"), Request([user("hi")], TOOLS)):
        for dialect in (openai_chat, anthropic_messages):
            assert "tool_choice" not in dialect.request_body(SETTINGS, request)


def test_consecutive_messages_of_a_role_are_merged_for_anthropic() -> None:
    text = {"type": "text", "text": "go on"}
    calls, outcome = calling_message("", "1"), result("1")
    sent = sent_to_anthropic(user("hi"), calls, outcome, user("go on"))
    assert [block["type"] for block in sent[2]["content"]] == ["tool_result", "text"]
    assert sent[2]["content"][1] == text
    assert sent_to_anthropic(user("a"), user("go on"))[0]["content"] == [
        {**text, "text": "a"},
        text,
    ]
    assert sent_to_anthropic(user("hi")) == [{"role": "user", "content": "hi"}]


def test_an_interrupted_anthropic_reply_goes_back_with_its_continuation() -> None:
    server: dict[str, Any] = {"type": "server_tool_use", "id": "s", "name": "search", "input": {}}
    paused = anthropic_reply(THINKING, server, stop="pause_turn")
    assert paused.finish_reason == "pause"
    later = anthropic_reply(THINKING, TOOL_USE, stop="tool_use")
    sent = sent_to_anthropic(user("hi"), paused.message, later.message)
    assert [message["role"] for message in sent] == ["user", "assistant"]
    assert sent[1]["content"] == [THINKING, server, THINKING, TOOL_USE]


def test_an_assistant_message_with_nothing_in_it_is_not_sent_to_anthropic() -> None:
    """It would be refused; those around it become one."""
    sent = sent_to_anthropic(user("a"), calling_message(" "), user("b"))
    assert [(message["role"], len(message["content"])) for message in sent] == [("user", 2)]


def test_consecutive_messages_of_a_role_are_merged_for_openai() -> None:
    first = openai_reply({"content": "one ", "reasoning_content": "why"}).message
    second = openai_reply(
        {
            "content": "two",
            "reasoning_content": "because",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        "tool_calls",
    ).message
    before = orjson.dumps([first, second])
    sent = sent_to_openai(user("a"), user("b"), first, second, result("1"))
    assert sent[0] == {"role": "user", "content": "a\n\nb"}
    assert (sent[1]["content"], sent[1]["reasoning_content"]) == (
        "one two",
        "why\n\nbecause",
    )
    assert sent[1]["tool_calls"] == second["tool_calls"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert orjson.dumps([first, second]) == before, "what is recorded is not altered"
    assert len(sent_to_openai(calling_message("", "1"), calling_message("a"))) == 2, (
        "open calls are not continued"
    )


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Any legal conversation: replies may be interrupted, and anybody may speak twice."""
    text = st.sampled_from(["", " ", "a", "b\n"])
    messages = [Message(role="system", content=draw(text))] if draw(st.booleans()) else []
    messages.append(user(draw(text)))
    for turn in range(draw(st.integers(0, 4))):
        for n in range(draw(st.integers(0, 2))):
            messages.append(draw(st.sampled_from([user(f"{turn}.{n}"), user("")])))
        pauses = draw(st.integers(0, 2))
        messages += [
            calling_message(draw(text), kept=draw(kept_parts(None))) for _ in range(pauses)
        ]
        ids = [f"{turn}_{n}" for n in range(draw(st.integers(0, 2)))]
        messages.append(calling_message(draw(text), *ids, kept=draw(kept_parts(ids))))
        messages += [result(id) for id in draw(st.permutations(ids))]
    return messages


def kept_parts(ids: list[str] | None) -> st.SearchStrategy[dict[str, Any] | None]:
    """What the dialects keep of their own replies."""
    calls = [{**TOOL_USE, "id": id} for id in ids or ()]
    anthropic = {"api": "anthropic_messages", "blocks": [THINKING, *calls]}
    openai = {"api": "openai_chat", "blocks": [{"reasoning_content": "why"}]}
    return st.sampled_from([None, anthropic, openai])


@given_any(conversations())
def test_roles_alternate_on_anthropic(messages: list[Message]) -> None:
    before = orjson.dumps(messages)
    sent = sent_to_anthropic(*messages)
    roles = [message["role"] for message in sent]
    assert roles == (["user", "assistant"] * len(sent))[: len(sent)]
    called: list[str] = []
    for message in sent:
        content = message["content"]
        blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
        assert len(blocks) == 1 or all(block.get("text", "x").strip() for block in blocks)
        assert blocks
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        assert sorted(results) == sorted(called)
        assert all(block["type"] == "tool_result" for block in blocks[: len(results)])
        called = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert orjson.dumps(messages) == before


@given_any(conversations())
def test_roles_alternate_on_openai(messages: list[Message]) -> None:
    before = orjson.dumps(messages)
    sent = sent_to_openai(*messages)
    for earlier, later in pairwise(sent):
        assert earlier["role"] != later["role"] or later["role"] == "tool"
    called: list[str] = []
    for message in sent:
        if message["role"] == "tool":
            assert message["tool_call_id"] in called
            called.remove(message["tool_call_id"])
        else:
            assert not called
            called = [call["id"] for call in message.get("tool_calls", ())]
    assert orjson.dumps(messages) == before


def test_anthropic_cache_marks_are_on_the_system_message_and_on_the_last_message() -> None:
    """On the last tool where there is no system message; without tools no turn follows."""
    mark = {"cache_control": {"type": "ephemeral"}}
    system = Message(role="system", content="be brief")
    two = [*TOOLS, *TOOLS]

    def body(*messages: Message, tools: Any = (), caching: bool = True) -> dict[str, Any]:
        settings = dataclasses.replace(SETTINGS, prompt_caching=caching)
        return anthropic_messages.request_body(settings, Request(messages, tools))

    whole = body(system, user("hi"), tools=two)
    assert whole["system"] == [{"type": "text", "text": "be brief", **mark}]
    assert whole["messages"][-1]["content"] == [{"type": "text", "text": "hi", **mark}]
    assert orjson.dumps(whole).count(b"cache_control") == 2
    assert orjson.dumps(body(system, user("hi"))).count(b"cache_control") == 1
    called = calling_message("", "a", "b")
    results = [result("a"), result("b")]
    *_, reply, last = body(system, user("hi"), called, *results, tools=two)["messages"]
    assert b"cache_control" not in orjson.dumps(reply)
    assert ["cache_control" in block for block in last["content"]] == [False, True]
    thought = anthropic_reply(THINKING, {"type": "text", "text": "so"}).message
    before = orjson.dumps(thought)
    paused = body(system, user("hi"), thought, tools=two)["messages"][-1]
    assert ["cache_control" in block for block in paused["content"]] == [False, True]
    assert orjson.dumps(thought) == before, "the record keeps its blocks"
    blank_end = body(system, user(" "), tools=two)["messages"][-1]
    assert b"cache_control" not in orjson.dumps(blank_end)
    assert [tool.get("cache_control") for tool in body(user("hi"), tools=two)["tools"]] == [
        None,
        {"type": "ephemeral"},
    ]
    blank = body(Message(role="system", content=" "), user("hi"), tools=two)
    assert "cache_control" in blank["tools"][1], "a blank text cannot be marked"
    assert b"cache_control" not in orjson.dumps(body(user("hi")))
    plain = body(system, user("hi"), tools=two, caching=False)
    assert plain["system"] == "be brief"
    assert b"cache_control" not in orjson.dumps(plain)


def test_messages_without_reasoning_are_sent_with_a_blank_one() -> None:
    own = openai_reply({"content": "b", "reasoning": "why"}).message
    messages = (user("hi"), calling_message("a"), user("go on"), own)
    assert sent_to_openai(*messages, blank_reasoning=True)[1::2] == [
        {"role": "assistant", "content": "a", "reasoning_content": " "},
        {"role": "assistant", "content": "b", "reasoning": "why"},
    ]
    assert "reasoning_content" not in sent_to_openai(*messages)[1]


@pytest.mark.parametrize(
    ("effort", "openai", "openrouter", "anthropic"),
    [
        (None, {}, {}, {}),
        (
            "none",
            {"reasoning_effort": "none"},
            {"reasoning": {"enabled": False}},
            {"thinking": {"type": "disabled"}},
        ),
        (
            "minimal",
            {"reasoning_effort": "minimal"},
            {"reasoning": {"effort": "minimal"}},
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
        ),
        (
            "max",
            {"reasoning_effort": "max"},
            {"reasoning": {"effort": "max"}},
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
        ),
    ],
)
def test_reasoning_effort_in_each_dialect(
    effort: str | None, openai: Any, openrouter: Any, anthropic: Any
) -> None:
    settings = dataclasses.replace(SETTINGS, reasoning_effort=effort)
    routed = dataclasses.replace(settings, provider="openrouter")
    for dialect, setting, means in (
        (openai_chat, settings, openai),
        (openai_chat, routed, openrouter),
        (anthropic_messages, settings, anthropic),
    ):
        plain = dialect.request_body(SETTINGS, Request([]))
        body = dialect.request_body(setting, Request([]))
        assert {key: body[key] for key in body.keys() - plain.keys()} == means
        assert body.keys() >= plain.keys()


def test_fields_of_the_user_win_over_those_of_an_option() -> None:
    own = {"reasoning_effort": "high", "thinking": {"type": "enabled"}, "stream": False}
    settings = dataclasses.replace(SETTINGS, reasoning_effort="low", extra_body=own)
    request = Request([user("hi")], on_delta=lambda event: None)
    for dialect in (openai_chat, anthropic_messages):
        assert dialect.request_body(settings, request).items() >= own.items()


def test_an_input_that_was_cut_goes_back_inside_an_object() -> None:
    """Beside thinking the blocks go back as they came, and this one would be refused."""
    read = anthropic_reply(THINKING, {**TOOL_USE, "input": '{"a": '}, stop="max_tokens").message
    assert read["tool_calls"][0]["function"]["arguments"] == '{"a": '
    (sent,) = sent_to_anthropic(read)
    assert sent["content"][1]["input"] == {"raw_arguments": '{"a": '}


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "null", '"x"'])
def test_broken_arguments_reach_anthropic_inside_an_object(arguments: str) -> None:
    message = Message(role="assistant", content="")
    function: Any = {"name": "f", "arguments": arguments}
    message["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    body = anthropic_messages.request_body(SETTINGS, Request([message]))
    assert body["messages"][0]["content"][0]["input"] == {"raw_arguments": arguments}


@pytest.mark.parametrize("given", [["a"], None, 5, "a", True])
def test_a_kept_input_that_is_not_an_object_goes_back_inside_an_object(given: Any) -> None:
    read = anthropic_reply(THINKING, {**TOOL_USE, "input": given}, stop="tool_use").message
    assert read["provider_blocks"]["blocks"][1]["input"] == given, "the record keeps what came"
    (sent,) = anthropic_messages.request_body(SETTINGS, Request([read]))["messages"]
    text = given if isinstance(given, str) else orjson.dumps(given).decode()
    assert sent["content"][1]["input"] == {"raw_arguments": text}


def test_anthropic_input_tokens_include_what_was_cached() -> None:
    usage = anthropic_reply(
        {"type": "text", "text": "x"},
        usage={
            "input_tokens": 10,
            "output_tokens": 5,
            "cache_read_input_tokens": 100,
            "cache_creation_input_tokens": 50,
            "output_tokens_details": {"thinking_tokens": 3},
        },
    ).usage
    assert usage == {
        "input_tokens": 160,
        "output_tokens": 5,
        "cache_read_tokens": 100,
        "cache_write_tokens": 50,
        "reasoning_tokens": 3,
    }


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (400, "", "bad", "bad_request"),
        (400, "", "how do I read my billing details?", "bad_request"),
        (400, "", "This model's maximum context length is 8192 tokens", "context_exceeded"),
        (400, "", "prompt is too long: 250000 tokens", "context_exceeded"),
        (400, "", "input length and max_tokens exceed context limit", "context_exceeded"),
        (400, "", "the request exceeds the available context size", "context_exceeded"),
        (400, "context_length_exceeded", "x", "context_exceeded"),
        (400, "", "Your credit balance is too low to access the API", "no_credit"),
        (401, "", "", "auth"),
        (402, "", "", "no_credit"),
        (403, "", "", "forbidden"),
        (404, "", "", "not_found"),
        (408, "", "", "overloaded"),
        (409, "", "", "overloaded"),
        (413, "", "", "bad_request"),
        (422, "", "", "bad_request"),
        (429, "", "", "rate_limited"),
        (429, "rate_limit_exceeded", "add a payment method under account/billing", "rate_limited"),
        (429, "insufficient_quota", "You exceeded your current quota", "no_credit"),
        (500, "", "", "overloaded"),
        (529, "", "", "overloaded"),
    ],
)
def test_the_kind_of_an_http_error(status: int, code: str, message: str, kind: str) -> None:
    assert classify_error(status, (code,), message) == kind


def test_an_error_message_holds_nothing_that_a_terminal_obeys() -> None:
    assert str(ModelError("bad_request", "a\x1b[31mb\x00c\nd")) == "a [31mb c d"


def test_looking_for_deep_nesting_takes_little_memory() -> None:
    """Every reply with a good deal of brackets in it is looked at, also one of many megabytes."""
    text = b'{"a": "' + b"x[\\n" * 1_000_000 + b'"}'
    tracemalloc.start()
    assert not is_nested_too_deep(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3 * len(text)
    assert is_nested_too_deep(b"[" * 101 + b"]" * 101)
    assert not is_nested_too_deep(b"[" * 100 + b"]" * 100)


def test_every_kind_has_a_rule_with_words() -> None:
    from typing import get_args

    from agent.models.errors import Kind

    assert set(RULES) == set(get_args(Kind))
    assert all(rule.meaning for rule in RULES.values())


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (None, None),
        ("1", 1.0),
        ("0.5", 0.5),
        ("-1", None),
        ("nan", None),
        ("inf", None),
        ("soon", None),
        ("Sat, 21 Nov 2026 12:00:10 GMT", 10.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", None),
        ("Sat, 21 Nov 2026 12:00:10", 10.0),
        ("Sat, 21 Nov 2026 13:00:10 +0100", 10.0),
        ("Sat, 21 Nov 2026 12:00:10 +99999999999", None),
        ("Sat, 99999999999999999999 Nov 2026 12:00:10 GMT", None),
        (" 2 ", 2.0),
        ("7200", 7200.0),
        ("-inf", None),
        ("1e999", None),
        ("", None),
        ("1, 2", None),
    ],
)
def test_retry_after_in_its_forms(value: str | None, seconds: float | None) -> None:
    now = datetime(2026, 11, 21, 12, tzinfo=UTC)
    headers = {} if value is None else {"retry-after": value}
    assert retry_after_s(headers, now=now) == seconds


@pytest.mark.parametrize(
    ("milliseconds", "seconds"),
    [("250", 0.25), ("0", 0.0), ("-5", 3.0), ("nan", 3.0), ("soon", 3.0), ("", 3.0)],
)
def test_milliseconds_go_before_seconds_where_they_are_usable(
    milliseconds: str, seconds: float
) -> None:
    headers = {"retry-after-ms": milliseconds, "retry-after": "3"}
    assert retry_after_s(headers) == seconds


@given_any(st.text())
def test_any_text_is_a_wait_or_none(value: str) -> None:
    seconds = retry_after_s({"retry-after": value})
    assert seconds is None or seconds >= 0


@pytest.mark.parametrize(
    ("name", "given", "means"),
    [
        ("scripted", {}, ("scripted", "scripted", None, None)),
        (
            "openai:gpt-5",
            {},
            ("gpt-5", "openai_chat", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ),
        (
            "anthropic:claude",
            {},
            ("claude", "anthropic_messages", "https://api.anthropic.com", "ANTHROPIC_API_KEY"),
        ),
        (
            "openrouter:anthropic/claude-sonnet-4",
            {},
            (
                "anthropic/claude-sonnet-4",
                "openai_chat",
                "https://openrouter.ai/api/v1",
                "OPENROUTER_API_KEY",
            ),
        ),
        (
            "llama3:8b",
            {"base_url": "http://h/v1"},
            ("llama3:8b", "openai_chat", "http://h/v1", None),
        ),
        (
            "m",
            {"base_url": "http://h", "api": "anthropic_messages"},
            ("m", "anthropic_messages", "http://h", None),
        ),
        (
            "openai:m",
            {"base_url": "http://h/v1", "key_env": "K"},
            ("m", "openai_chat", "http://h/v1", "K"),
        ),
    ],
)
def test_a_model_name_gives_provider_url_and_key(name: str, given: Any, means: Any) -> None:
    model = resolve(name, **given)
    assert (model.name, model.api, model.base_url, model.key_env) == means


@pytest.mark.parametrize("name", ["qwen3", "qwen/qwen3", "qwen/qwen3:free", ""])
def test_a_name_without_a_provider_needs_a_base_url(name: str) -> None:
    """No company is the default."""
    with pytest.raises(UnknownModel, match="openai:NAME, anthropic:NAME or openrouter:VENDOR/"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "variable", "value", "means"),
    [
        ("openai:m", "OPENAI_BASE_URL", "http://h/v1/", "http://h/v1"),
        ("responses:m", "OPENAI_BASE_URL", "http://h/v1", "http://h/v1"),
        ("openai:m", "OPENAI_BASE_URL", " ", "https://api.openai.com/v1"),
        ("anthropic:m", "ANTHROPIC_BASE_URL", "http://h:1", "http://h:1"),
        ("anthropic:m", "OPENAI_BASE_URL", "http://h:1", "https://api.anthropic.com"),
        ("openrouter:m", "OPENAI_BASE_URL", "http://h:1", "https://openrouter.ai/api/v1"),
    ],
)
def test_the_variables_of_the_sdks_are_honoured(
    name: str, variable: str, value: str, means: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    assert resolve(name).base_url == means
    assert resolve(name, base_url="http://own/v1").base_url == "http://own/v1"
    assert resolve_sibling("groq:n", resolve(name)).base_url == "https://api.groq.com/openai/v1"
    assert resolve_sibling("n", resolve(name)).base_url == means


@pytest.mark.parametrize("value", ["h/v1", "http://user:secret@h/v1", "http://h/v1?key=secret"])
def test_a_variable_that_no_call_can_use_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", value)
    with pytest.raises(UnknownModel, match="OPENAI_BASE_URL must hold") as caught:
        resolve("openai:m")
    assert "secret" not in str(caught.value)
    assert resolve("anthropic:m").base_url == "https://api.anthropic.com"


KNOWN_URLS = {
    "https://openrouter.ai/api/v1": "openrouter",
    "https://openrouter.ai/api/v1/": "openrouter",
    "https://OpenRouter.AI:443/api/v1": "openrouter",
    "https://openrouter.ai./api": "openrouter",
    "https://eu.openrouter.ai": "openrouter",
    "https://api.openai.com/v1": "openai",
    "https://API.openai.com": "openai",
    "https://eu.api.openai.com:443/v1/": "openai",
    "https://api.anthropic.com": "anthropic",
    "https://api.anthropic.com/v1/": "anthropic",
}
PREFIXES = ("", "openai:", "responses:", "anthropic:", "openrouter:")


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("url", "provider"), KNOWN_URLS.items())
def test_the_url_of_a_known_provider_means_that_provider(
    url: str, provider: str, prefix: str
) -> None:
    """Its key and its prices; so no name sends the key of one to another."""
    model = resolve(f"{prefix}m", base_url=url)
    assert (model.provider, model.key_env) == (provider, f"{provider.upper()}_API_KEY")
    own = EndpointConfig.model_validate({"base_url": url}).to_endpoint()
    assert (own.provider, own.key_env) == (model.provider, model.key_env)
    assert resolve(f"{prefix}m", base_url=url, key_env="MINE").key_env == "MINE"
    if not prefix:
        assert model.api == own.api == resolve(f"{provider}:m").api
        assert resolve_sibling("n", model).key_env == model.key_env
    path = urlsplit(model.base_url or "").path
    due = "/api/v1" if provider == "openrouter" else "/v1"
    if model.api == "anthropic_messages":
        due = due.removesuffix("/v1")
    assert path.rstrip("/") == due


@pytest.mark.parametrize(
    "url",
    [
        "https://openrouter.ai.example/api/v1",
        "https://notopenrouter.ai/v1",
        "https://example.com/openrouter.ai",
        "http://127.0.0.1:8000/api.openai.com",
    ],
)
def test_a_url_that_only_looks_like_a_known_provider_s_is_one_s_own(url: str) -> None:
    model = resolve("m", base_url=url)
    assert (model.provider, model.key_env, model.base_url) == (None, None, url)
    assert EndpointConfig.model_validate({"base_url": url}).to_endpoint().key_env == "none"


def test_a_known_url_is_treated_as_its_provider() -> None:
    by_url = resolve("m", base_url="https://openrouter.ai/api/v1/", reasoning_effort="low")
    plain = resolve("openrouter:m", reasoning_effort="low")
    hello = Request([{"role": "user", "content": "Hello"}])
    assert openai_chat.request_body(by_url, hello) == openai_chat.request_body(plain, hello)
    assert not has_batches(by_url)


@pytest.mark.parametrize("name", ["foo:bar", ":x"])
def test_an_unknown_prefix_names_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"anthropic, azure, bedrock, .*, openai, openrouter"):
        resolve(name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("gemeni:x", "gemini"), ("deep-seek:x", "deepseek"), ("mistrall:x", "mistral")],
)
def test_an_unknown_prefix_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(UnknownModel, match=f"did you mean '{nearest}'"):
        resolve(name)


@pytest.mark.parametrize("name", ["openai:", "mine: ", " "])
def test_a_prefix_alone_is_not_a_model(name: str) -> None:
    for ask in (resolve, lambda name: resolve_sibling(name, resolve("openai:m"))):
        with pytest.raises(UnknownModel, match="the name of a model is missing"):
            ask(name)
    with pytest.raises(UnknownModel, match="the name of a model is missing"):
        resolve(name, base_url="http://127.0.0.1:1/v1")


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    assert read_key(resolve("openai:m")) == "secret"
    with pytest.raises(MissingKey, match="ANTHROPIC_API_KEY"):
        read_key(resolve("anthropic:m"))
    assert read_key(resolve("anthropic:m", key_env="none")) == "no-key"
    monkeypatch.setenv("OPENAI_API_KEY", " secret\n")
    assert read_key(resolve("openai:m")) == "secret"


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel", "tab\tbed"])
def test_a_key_that_no_header_can_carry_is_refused(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(MissingKey, match="OPENAI_API_KEY holds characters"):
        read_key(resolve("openai:m"))


def test_a_price_is_known_or_none_and_never_zero_by_default() -> None:
    reply = openai_reply(
        {"content": "x"}, usage={"prompt_tokens": 1_000_000, "completion_tokens": 0}
    )
    known = price(reply, resolve("openai:gpt-4o"))
    assert known is not None
    assert known > 0
    assert price(reply, resolve("my-own-model", base_url="http://h/v1")) is None
    assert price(openai_reply({"content": "x"}), resolve("openai:gpt-4o")) is None
    odd = {
        "prompt_tokens": 1,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 9},
    }
    contradictory = openai_reply({"content": "x"}, usage=odd)
    assert price(contradictory, resolve("openai:gpt-4o")) is None


@pytest.mark.parametrize(
    ("text", "reasoning", "rest"),
    [
        ("plain", None, "plain"),
        ("<think>a</think>b", "a", "b"),
        ("\n<think>\na\n</think>\n\n<think>c</think>\nb", "a\n\nc", "b"),
        ("<think>never closed", None, "<think>never closed"),
        ("say <think>a</think>", None, "say <think>a</think>"),
        ("<think></think>b", None, "b"),
        ("<REASONING_SCRATCHPAD>a</REASONING_SCRATCHPAD>b", "a", "b"),
    ],
)
def test_inline_reasoning_is_lifted_from_the_start_only(
    text: str, reasoning: str | None, rest: str
) -> None:
    assert split_inline_reasoning(text) == (reasoning, rest)


def test_a_wrong_script_names_turn_and_key() -> None:
    with pytest.raises(ValueError, match=r"script\.1\.tool_calls\.0\.name"):
        parse_script([{"content": "a"}, {"tool_calls": [{"arguments": {}}]}])
    with pytest.raises(ValueError, match="script"):
        parse_script([])


@pytest.mark.parametrize("name", ["gpt-4.1-2099-01-01", "gpt-4.1-20990101"])
def test_the_day_of_a_snapshot_is_not_needed_to_know_its_price(name: str) -> None:
    """A model's date is ignored unless the table lists that very day."""
    assert has_known_price(dataclasses.replace(SETTINGS, name=name, provider="openai"))
    assert not has_known_price(dataclasses.replace(SETTINGS, name="nobody-knows-2099-01-01"))
