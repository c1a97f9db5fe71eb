"""What single servers of the OpenAI chat API write otherwise than OpenAI does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from agent.messages.message import Message
from agent.models.dialects import openai_chat
from agent.models.dialects.openai_chat import ChatAssembly, to_api, to_api_messages
from agent.models.model import Completion, ModelSettings, Request, StreamEvent

JSON = dict[str, Any]


def read_whole(message: JSON, finish: str = "stop") -> Completion:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return openai_chat.read_reply(json.dumps({"choices": [choice]}).encode())


def read_stream(*deltas: JSON, finish: str = "stop") -> tuple[Completion, list[StreamEvent]]:
    events: list[StreamEvent] = []
    assembly = ChatAssembly(events.append)
    for delta in deltas:
        assembly.add({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    assembly.add({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    return openai_chat.read_reply(assembly.finish()), events


def text(said: str) -> JSON:
    return {"type": "text", "text": said}


def thinking(thought: str) -> JSON:
    return {"type": "thinking", "thinking": [text(thought)]}


def call(arguments: Any) -> JSON:
    function = {"name": "f", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


MISTRAL = [thinking("Count them."), text("Three.")]


@pytest.mark.parametrize(
    ("deltas", "given"),
    [
        (
            [
                {"role": "assistant", "content": [thinking("Count ")]},
                {"content": [thinking("them.")]},
                {"content": "Thr"},
                {"content": "ee."},
            ],
            MISTRAL,
        ),
        (
            [{"content": [thinking("Count them.")]}, {"content": [text("Three.")]}],
            MISTRAL,
        ),
        (
            [{"content": "A"}, {"content": [text("h. "), thinking("Count")]}, {"content": "3"}],
            [text("Ah. "), thinking("Count"), text("3")],
        ),
        ([{"content": [thinking("Call f.")]}, {"tool_calls": [call("{}")]}], [thinking("Call f.")]),
    ],
)
def test_thoughts_in_the_content_are_reasoning_and_go_back(
    deltas: list[JSON], given: list[JSON]
) -> None:
    """Mistral's models that reason answer so."""
    calls = {"tool_calls": [call("{}")]} if "tool_calls" in deltas[-1] else {}
    reply = read_whole({"content": given, **calls})
    told, events = read_stream(*deltas)
    assert told == reply
    message = reply.message
    thoughts = [part["thinking"][0]["text"] for part in given if "thinking" in part]
    assert message.get("reasoning") == "".join(thoughts)
    assert message["content"] == "".join(part["text"] for part in given if "text" in part)
    assert to_api(message) == {"role": "assistant", "content": given, **calls}
    heard = [event["text"] for event in events if event["type"] == "thinking_delta"]
    assert "".join(heard) == "".join(thoughts)


@pytest.mark.parametrize(
    ("field", "earlier", "later", "both"),
    [
        ("reasoning_content", "First.", "Second.", "First.\n\nSecond."),
        ("reasoning_details", [{"text": "1"}], [{"text": "2"}], [{"text": "1"}, {"text": "2"}]),
        (
            "thinking_blocks",
            [{"thinking": "1"}],
            [{"thinking": "2"}],
            [{"thinking": "1"}, {"thinking": "2"}],
        ),
    ],
)
def test_a_reply_that_goes_on_keeps_its_first_thoughts(
    field: str, earlier: Any, later: Any, both: Any
) -> None:
    cut = read_whole({"content": "One, ", field: earlier}).message
    rest = read_whole({"content": "two.", field: later}).message
    (joined,) = to_api_messages([cut, rest])
    assert joined["content"] == "One, two."
    assert joined[field] == both


def test_a_text_that_follows_thoughts_and_texts_joins_them() -> None:
    first = read_whole({"content": MISTRAL}).message
    then = Message(role="assistant", content="And four.")
    (joined,) = to_api_messages([first, then])
    assert joined["content"] == [*MISTRAL, text("And four.")]


@pytest.mark.parametrize(("finish", "means"), [("eos", "stop"), ("model_length", "length")])
def test_ends_by_other_names(finish: str, means: str) -> None:
    """Together and Mistral document these; a reply that is refused would be paid eight times."""
    assert read_whole({"content": "x"}, finish).finish_reason == means
    assert read_stream({"content": "x"}, finish=finish)[0].finish_reason == means


@pytest.mark.parametrize("arguments", ["", None, " \n"])
def test_a_call_without_arguments_has_none(arguments: str | None) -> None:
    """Servers that write nothing there refuse it in a history; a row with it would be no JSON."""
    for reply in (
        read_whole({"content": None, "tool_calls": [call(arguments)]}),
        read_stream({"tool_calls": [{"index": 0, **call(arguments)}]})[0],
    ):
        (sent,) = to_api(reply.message)["tool_calls"]
        assert sent["function"]["arguments"] == "{}"


def sent_arguments(
    arguments: str, *, is_error: bool, base_url: str = "http://127.0.0.1:8000/v1"
) -> str:
    """The arguments of a call as a request's history has them."""
    settings = ModelSettings(name="m", api="openai_chat", base_url=base_url, key_env=None)
    made = read_whole({"content": None, "tool_calls": [call(arguments)]}, "tool_calls").message
    result = Message(role="tool", tool_call_id="c1", name="f", content="E", is_error=is_error)
    history = [Message(role="user", content="Go."), made, result]
    body = openai_chat.request_body(settings, Request(history, []))
    assert made["tool_calls"][0]["function"]["arguments"] == arguments, "records keep what came"
    said = body["messages"][1]["tool_calls"][0]["function"]["arguments"]
    assert isinstance(said, str)
    return said


@pytest.mark.parametrize("arguments", ['{"path": "a', "{'path': 'a'}", '["a"]', "3", '{"a": NaN}'])
def test_arguments_that_are_no_object_go_back_inside_one(arguments: str) -> None:
    """vLLM and SGLang parse those of a history: the conversation's next call was refused."""
    given = sent_arguments(arguments, is_error=True)
    assert json.loads(given) == {"raw_arguments": arguments}
    assert (
        sent_arguments(arguments, is_error=True, base_url="https://api.openai.com/v1") == arguments
    )


@pytest.mark.parametrize("is_error", [False, True])
def test_arguments_that_are_an_object_go_back_as_they_came(is_error: bool) -> None:
    assert sent_arguments('{ "a":1}', is_error=is_error) == '{ "a":1}'
