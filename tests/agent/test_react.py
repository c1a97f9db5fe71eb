"""The text protocol: what a model without tool calling is shown, and how its text is read."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.messages.message import FinishReason, Message
from agent.models.model import Completion, Request, StreamEvent
from agent.models.scripted import ScriptedModel, parse_script
from agent.views.react import ReActModel, parse_step, read_completion, to_view
from tests.helpers.builders import completion


def schema(name: str, required: list[str], **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": f"Does\n  {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
NUMBER = {"type": "integer"}
TOOLS = [
    schema("look", ["place"], place=TEXT, count=NUMBER),
    schema("find", ["query"], query=TEXT, site=TEXT),
    schema("list", [], folder={"anyOf": [TEXT, {"type": "null"}]}),
    schema("write", ["path", "content"], path=TEXT, content=TEXT),
    schema("wait", ["seconds"], seconds=NUMBER),
]
USER = Message(role="user", content="Go.")
SYSTEM = Message(role="system", content="Be kind.")


def native(name: str, arguments: str = "{}", *, id: str = "c1", content: str = "") -> Message:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return Message(role="assistant", content=content, tool_calls=[call])  # type: ignore[list-item]


def result(content: str, *, id: str = "c1") -> Message:
    return Message(role="tool", tool_call_id=id, name="look", content=content, is_error=False)


def read(
    text: str,
    finish_reason: FinishReason = "stop",
    *,
    reasoning: str = "",
    **request: Any,
) -> Completion:
    message = Message(role="assistant", content=text)
    if reasoning:
        message["reasoning"] = reasoning
    said = Completion(
        message=message,
        finish_reason=finish_reason,
        usage=None,
        model="m",
        response_id="r1",
        cost_usd=0.5,
    )
    return read_completion(said, Request([USER], TOOLS, **request))


def call_of(message: Message) -> tuple[str, str]:
    (call,) = message["tool_calls"]
    assert call["id"] == "", "the loop gives the ids"
    return call["function"]["name"], call["function"]["arguments"]


def verbatim(message: Message) -> str:
    assert message["provider_blocks"]["api"] == "react"
    return str(message["provider_blocks"]["blocks"][0]["text"])


class Inner(ScriptedModel):
    """A scripted model that keeps what it was asked."""

    def __init__(self, *turns: dict[str, Any]) -> None:
        super().__init__(parse_script(list(turns)))
        self.requests: list[Request] = []

    async def complete(self, request: Request) -> Completion:
        self.requests.append(request)
        return await super().complete(request)


def ask(inner: Inner, request: Request) -> Completion:
    return asyncio.run(ReActModel(inner).complete(request))


# What the model is shown


def test_the_tools_are_in_the_system_message_and_not_in_the_request() -> None:
    """Each on a line of its own, with any description."""
    inner = Inner({"content": "Final Answer: 1"})
    ask(inner, Request([SYSTEM, USER], TOOLS))
    (request,) = inner.requests
    assert list(request.tools) == []
    system, user = request.messages
    assert system["content"].startswith("Be kind.\n\n")
    for tool in TOOLS:
        (line,) = [
            n for n in system["content"].splitlines() if n.startswith(f"- {tool_name(tool)}")
        ]
        assert line.startswith(f"- {tool_name(tool)}: Does {tool_name(tool)}. {{")
        assert json.loads(line[line.index("{") :]) == tool["function"]["parameters"]
    for phrase in (
        "step by step",
        "same input",
        "another approach",
        "Final Answer:",
        "Observation",
    ):
        assert phrase in system["content"]
    assert user == USER


def tool_name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def test_a_system_message_is_made_where_there_is_none() -> None:
    view = to_view(Request([USER], TOOLS))
    assert [message["role"] for message in view] == ["system", "user"]
    assert [message["role"] for message in to_view(Request([], TOOLS))] == ["system"]


def test_max_turns_is_stated_where_it_is_set() -> None:
    assert "at most 7 replies" in to_view(Request([USER], TOOLS), max_turns=7)[0]["content"]
    assert "at most" not in to_view(Request([USER], TOOLS))[0]["content"]


def test_the_record_is_not_altered_by_its_view() -> None:
    messages = [SYSTEM, USER, native("look"), result("a"), result("b", id="c2"), USER]
    before = copy.deepcopy(messages)
    to_view(Request(messages, TOOLS, "none"))
    assert messages == before


def test_results_become_observations_of_one_user_message() -> None:
    """What the user says after them is part of it: roles alternate."""
    view = to_view(Request([USER, native("look"), result("a"), result("b", id="c2"), USER], TOOLS))
    assert [message["role"] for message in view] == ["system", "user", "assistant", "user"]
    assert view[3] == {"role": "user", "content": "Observation: a\n\nObservation: b\n\nGo."}


def test_messages_from_elsewhere_are_put_into_the_protocol() -> None:
    thoughtful = native("look", '{"place": "x"}', content="I look.")
    thoughtful["reasoning"] = "Why not."
    answer = Message(role="assistant", content="42", reasoning="Sure.")
    assert [m["content"] for m in to_view(Request([thoughtful, native("list", ""), answer]))] == [
        'Thought: Why not.\nThought: I look.\nAction: look\nAction Input: {"place": "x"}',
        "Action: list\nAction Input: {}",
        "Thought: Sure.\nFinal Answer: 42",
    ]


@pytest.mark.parametrize("content", ["", "Thought: a\nFinal Answer: b", "**Action:** look"])
def test_blank_text_and_text_in_the_protocol_are_shown_unchanged(content: str) -> None:
    """Such as examples that a user wrote for the model."""
    (shown,) = to_view(Request([Message(role="assistant", content=content)]))
    assert shown["content"] == content


def test_blocks_of_another_api_are_not_read() -> None:
    foreign = Message(role="assistant", content="42")
    foreign["provider_blocks"] = {"api": "openai_chat", "blocks": [{"text": "no"}]}
    assert to_view(Request([foreign]))[0]["content"] == "Final Answer: 42"


def test_where_tools_must_not_be_called_an_answer_is_asked_for() -> None:
    """In the last message, which is the user's; the tools are still listed."""
    view = to_view(Request([USER, native("look"), result("a")], TOOLS, "none"))
    assert "- look: " in view[0]["content"]
    assert view[-1]["role"] == "user"
    assert view[-1]["content"].startswith("Observation: a\n\n")
    assert "Final Answer:" in view[-1]["content"]
    after_answer = to_view(Request([USER, Message(role="assistant", content="x")], TOOLS, "none"))
    assert after_answer[-1]["role"] == "user"


def test_a_request_without_tools_needs_no_protocol() -> None:
    """Neither in what is shown nor in how the reply is read."""
    inner = Inner({"content": "Action: none is needed."})
    completion = ask(inner, Request([USER]))
    assert inner.requests[0].messages == [USER]
    assert completion.message == {"role": "assistant", "content": "Action: none is needed."}


# A conversation


def test_two_turns_to_an_answer() -> None:
    """The model sees its own words verbatim, and the result as an observation."""
    first = 'Thought: I look.\n\nAction:  look\nAction Input: {"place": "x"}\n'
    inner = Inner({"content": first}, {"content": "Thought: Done.\nFinal Answer: It is 4.\nYes."})
    messages = [USER]
    reply = ask(inner, Request(messages, TOOLS))
    assert reply.finish_reason == "tool_calls"
    assert call_of(reply.message) == ("look", '{"place": "x"}')
    assert (reply.message["content"], reply.message["reasoning"]) == ("", "I look.")
    messages += [reply.message, result("4")]
    answer = ask(inner, Request(messages, TOOLS))
    assert [m["content"] for m in inner.requests[1].messages[2:]] == [first, "Observation: 4"]
    assert answer.finish_reason == "stop"
    assert answer.message["content"] == "It is 4.\nYes."
    assert answer.message["reasoning"] == "Done."
    assert not answer.message.keys() & {"tool_calls", "repairs", "notes"}
    assert (answer.model, answer.cost_usd) == ("scripted", 0.0)


def test_only_text_is_streamed_as_it_arrives() -> None:
    events: list[StreamEvent] = []
    turn = {"content": "Action: look", "reasoning": "Hm.", "tool_calls": [{"name": "look"}]}
    ask(Inner(turn), Request([USER], TOOLS, on_delta=events.append))
    assert [event["type"] for event in events] == ["thinking_delta", "text_delta"]
    silent = Inner({"content": "Final Answer: 1"})
    ask(silent, Request([USER], TOOLS))
    assert silent.requests[0].on_delta is None


def test_calls_that_came_natively_are_taken_as_they_are() -> None:
    completion = ask(Inner({"tool_calls": [{"name": "look"}]}), Request([USER], TOOLS))
    assert completion.message["tool_calls"][0]["id"] == "call_1_0"
    assert "provider_blocks" not in completion.message


# How a reply is read

LOOK = ("look", '{"place": "x"}')
STEP = 'Action: look\nAction Input: {"place": "x"}'

CALLS: dict[str, tuple[str, tuple[str, str], str, str]] = {
    "plain": (f"Thought: t\n{STEP}", LOOK, "t", ""),
    "no thought": (STEP, LOOK, "", ""),
    "thought without label": (f"I look.\n{STEP}", LOOK, "I look.", ""),
    "thought of many lines": (f"Thought: a\n\nb\n{STEP}", LOOK, "a\n\nb", ""),
    "two thoughts": (f"Thought: a\nThought: b\nThought: a\n{STEP}", LOOK, "a\n\nb", ""),
    "any case": ('THOUGHT: t\naction: look\nACTION INPUT: {"place": "x"}', LOOK, "t", ""),
    "bold labels": (
        '**Thought:** t\n**Action:** look\n**Action Input:** {"place": "x"}',
        LOOK,
        "t",
        "",
    ),
    "bold before the colon": (
        '**Thought**: t\n**Action** : look\n**Action Input**: {"place": "x"}',
        LOOK,
        "t",
        "",
    ),
    "bold lines": (
        '**Thought: t**\n**Action: look**\n**Action Input: {"place": "x"}**',
        LOOK,
        "t",
        "",
    ),
    "bold and marked name": ('Action: **`look`**\nAction Input: {"place": "x"}', LOOK, "", ""),
    "CRLF": (f"Thought: t\r\n{STEP}\r\n".replace("\nA", "\r\nA"), LOOK, "t", ""),
    "indented": ('  Thought: t\n\tAction: look\n   Action Input: {"place": "x"}', LOOK, "t", ""),
    "wide colons": ('Thought:t\nAction:look\nAction Input:{"place": "x"}', LOOK, "t", ""),
    "blank lines": (
        '\n\nThought: t\n\nAction:\nlook\n\nAction Input:\n{"place": "x"}\n\n',
        LOOK,
        "t",
        "",
    ),
    "a fence around all": (f"```\nThought: t\n{STEP}\n```", LOOK, "t", ""),
    "a named fence around all": (f"```text\n\nThought: t\n{STEP}\n```\n", LOOK, "t", ""),
    "a fence around all, no label first": (f"```\nI look.\n{STEP}\n```", LOOK, "I look.", ""),
    "a fence around the action": (
        f"Thought: t\n```\n{STEP}\n```\nWaiting.",
        LOOK,
        "t\n\nWaiting.",
        "",
    ),
    "a fence around all and one inside": (
        '```\nThought: t\nAction: look\nAction Input:\n```json\n{"place": "x"}\n```\n```',
        LOOK,
        "t",
        "",
    ),
    "a fence around the action, then an observation": (
        f"```\n{STEP}\n```\nObservation: made up\n```\nx\n```",
        LOOK,
        "",
        "Observation: made up\n```\nx\n```",
    ),
    "a fenced input": (
        'Action: look\nAction Input:\n```json\n{"place": "x"}\n```\nObservation: y',
        LOOK,
        "",
        "Observation: y",
    ),
    "a fence beside the label": (
        'Action: look\nAction Input: ```json\n{"place": "x"}\n```\nObservation:\n```\ny\n```',
        LOOK,
        "",
        "Observation:\n```\ny\n```",
    ),
    "a fence on one line": ('Action: look\nAction Input: ```{"place": "x"}```', LOOK, "", ""),
    "an input without label": ('Action: look\n{"place": "x"}', LOOK, "", ""),
    "no input": ("Action: look", ("look", "{}"), "", ""),
    "a blank input": ("Action: look\nAction Input:  \n", ("look", "{}"), "", ""),
    "an empty fence": ("Action: look\nAction Input:\n```\n```", ("look", "{}"), "", ""),
    "an observation made up": (
        f"{STEP}\nObservation: y\nFinal Answer: z",
        LOOK,
        "",
        "Observation: y\nFinal Answer: z",
    ),
    "an observation made up in a fence": (
        f"{STEP}\n```\nObservation: y\n```\n",
        LOOK,
        "",
        "```\nObservation: y\n```\n",
    ),
    "an observation without input": (
        "Action: list\nObservation: y",
        ("list", "{}"),
        "",
        "Observation: y",
    ),
    "an observation before the action": (
        f"Thought: t\nObservation: y\n{STEP}",
        LOOK,
        "t\nObservation: y",
        "",
    ),
    "several actions": (
        f"Thought: t\n{STEP}\n\nThought: u\nAction: list\nAction Input: {{}}",
        LOOK,
        "t",
        "Thought: u\nAction: list\nAction Input: {}",
    ),
    "several actions, the first without input": (
        f"Action: list\n{STEP}",
        ("list", "{}"),
        "",
        STEP,
    ),
    "several inputs": (f"{STEP}\nAction Input: {{}}", LOOK, "", "Action Input: {}"),
    "a thought before the input": (
        'Action: look\nThought: t\nAction Input: {"place": "x"}',
        LOOK,
        "t",
        "",
    ),
    "an answer after the action": (f"{STEP}\nFinal Answer: z", LOOK, "", "Final Answer: z"),
    "an answer before the action": (f"Final Answer: z\n{STEP}", LOOK, "", ""),
    "an action that names nothing": (f"Action:\nAction: ``\n{STEP}", LOOK, "", ""),
    "an unknown action": ("Action: fly\nAction Input: north", ("fly", "north"), "", ""),
    "labels in a fenced input": (
        "Action: look\nAction Input:\n```yaml\nAction: list\nObservation: y\n```",
        ("look", '{"place":"Action: list\\nObservation: y"}'),
        "",
        "",
    ),
    "labels in a fenced sample": (
        f"Thought: t\n```py\nx\nAction: list\n```\n{STEP}",
        LOOK,
        "t\n```py\nx\nAction: list\n```",
        "",
    ),
    "a fence that is never closed": (f"Thought: t\n```py\nx\n{STEP}", LOOK, "t\n```py\nx", ""),
    "reasoning between tags": (f"<think>Action: list</think>\n{STEP}", LOOK, "Action: list", ""),
}


@pytest.mark.parametrize(("text", "call", "reasoning", "cut"), CALLS.values(), ids=CALLS)
def test_a_reply_with_an_action_is_a_call(
    text: str, call: tuple[str, str], reasoning: str, cut: str
) -> None:
    completion = read(text)
    message = completion.message
    assert completion.finish_reason == "tool_calls"
    assert call_of(message) == call
    assert message.get("reasoning", "") == reasoning
    assert message["content"] == ""
    assert message.get("repairs", []) == ([{"call": "", "cut": cut}] if cut else [])
    assert verbatim(message) + cut == text
    assert "unusable" not in message


ANSWERS: dict[str, tuple[str, str, str]] = {
    "plain": ("Thought: t\nFinal Answer: a", "a", "t"),
    "no thought": ("Final Answer: a", "a", ""),
    "any case": ("final answer : a", "a", ""),
    "bold label": ("**Final Answer:** **a** b", "**a** b", ""),
    "bold line": ("**Final Answer: a**\nBecause of **b**.", "a\nBecause of **b**.", ""),
    "bold words": ("Final Answer: **a**", "**a**", ""),
    "many lines": ("Final Answer:\na\n\n- b\n", "a\n\n- b", ""),
    "CRLF": ("Thought: t\r\n\r\nFinal Answer: a\r\n", "a", "t"),
    "a fence around all": ("```\nThought: t\nFinal Answer: a\n```", "a", "t"),
    "a fence around all and one inside": (
        "```\nFinal Answer: see\n```\ncode\n```\nSo.\n```",
        "see\n```\ncode\n```\nSo.",
        "",
    ),
    "labels in fences": (
        f"Final Answer: write\n```\n{STEP}\n```\nso.",
        f"write\n```\n{STEP}\n```\nso.",
        "",
    ),
    "labels within lines": (
        "Final Answer: the Action: x\nas in Action: y",
        "the Action: x\nas in Action: y",
        "",
    ),
    "words like labels": ("Final Answer: a\nActions: b\nAction c", "a\nActions: b\nAction c", ""),
    "an observation in it": ("Final Answer: a\nObservation: b", "a\nObservation: b", ""),
    "said twice": ("Final Answer: a\nFinal Answer: a\nFinal Answer: b", "a\n\nb", ""),
    "a thought after it": ("Final Answer: a\nThought: t", "a", "t"),
    "an action that names nothing": ("Action:\nFinal Answer: a", "a", ""),
    "an input without action": ("Action Input: {}\nFinal Answer: a", "a", "{}"),
    "blank": ("Thought: t\nFinal Answer: ", "", "t"),
}


@pytest.mark.parametrize(("text", "content", "reasoning"), ANSWERS.values(), ids=ANSWERS)
def test_a_reply_with_an_answer_and_no_action_is_the_answer(
    text: str, content: str, reasoning: str
) -> None:
    completion = read(text)
    assert completion.finish_reason == "stop"
    assert completion.message["content"] == content
    assert completion.message.get("reasoning", "") == reasoning
    assert verbatim(completion.message) == text
    assert not completion.message.keys() & {"tool_calls", "notes", "repairs"}


OUTSIDE = {
    "prose": "It is 42.",
    "only a thought": "Thought: It is 42.",
    "only an input": "Action Input: {}",
    "only an observation": "Observation: y",
    "label within a line": "I choose Action: look",
    "no colon": "Action look\nAction Input {}",
    "JSON": '{"action": "look"}',
    "a block of code": "```\nx\n```",
    "unclosed reasoning": f"<think>\n{STEP}",
}


@pytest.mark.parametrize("text", OUTSIDE.values(), ids=OUTSIDE)
def test_a_reply_outside_the_protocol_is_kept_and_marked(text: str) -> None:
    for finish_reason in ("stop", "tool_calls"):
        completion = read(text, finish_reason)
        assert completion.finish_reason == "stop"
        assert completion.message["content"] == verbatim(completion.message) == text
        assert completion.message["unusable"] == "no_action"
        assert not completion.message.keys() & {"tool_calls", "reasoning", "repairs"}


def test_plain_text_is_not_a_mistake_where_only_an_answer_was_allowed() -> None:
    assert "unusable" not in read("It is 42.", tool_choice="none").message


@pytest.mark.parametrize("text", ["", " \n", "<think>Hm.</think>\n"])
def test_a_blank_reply_stays_blank(text: str) -> None:
    completion = read(text)
    assert completion.finish_reason == "stop"
    assert not completion.message["content"].strip()
    assert not completion.message.keys() & {"tool_calls", "notes"}


@pytest.mark.parametrize("finish_reason", ["length", "refusal", "context_exceeded", "pause"])
@pytest.mark.parametrize("text", [STEP, "Final Answer: a", "I cannot"])
def test_why_a_reply_ended_early_is_kept(text: str, finish_reason: FinishReason) -> None:
    """A text that was cut is not the model's mistake."""
    completion = read(text, finish_reason)
    assert completion.finish_reason == finish_reason
    assert "unusable" not in completion.message
    assert ("tool_calls" in completion.message) == (text == STEP)


def test_separate_reasoning_comes_first_and_is_not_repeated() -> None:
    reasoned = read(f"<think>b</think>Thought: a\nThought: c\n{STEP}", reasoning="a")
    assert reasoned.message["reasoning"] == "a\n\nb\n\nc"
    assert read("It is 42.", reasoning="a").message["reasoning"] == "a"


def test_the_rest_of_the_completion_is_that_of_the_inner_model() -> None:
    completion = read(STEP)
    assert (completion.model, completion.response_id, completion.cost_usd) == ("m", "r1", 0.5)


INPUTS = [
    ("look", "Oslo", {"place": "Oslo"}),
    ("look", '"Oslo"', {"place": "Oslo"}),
    ("look", "42", {"place": "42"}),
    ("look", "[1]", {"place": "[1]"}),
    ("look", 'a "b"\nc', {"place": 'a "b"\nc'}),
    ("look", "```\nprint(1)\n```", {"place": "print(1)"}),
    ("find", "Oslo", {"query": "Oslo"}),
    ("list", "a/b", {"folder": "a/b"}),
    ("look", '{"count": 2}', {"count": 2}),
    # These go unchanged to the check of arguments, which tells the model what is wrong.
    ("look", '{"place": "x",}', '{"place": "x",}'),
    ("look", '{"place": "x"} is it.', '{"place": "x"} is it.'),
    ("write", "a.txt", "a.txt"),
    ("wait", "5", "5"),
    ("fly", "5", "5"),
]


@pytest.mark.parametrize(("name", "text", "arguments"), INPUTS)
def test_a_plain_input_is_the_one_string_that_it_can_be(
    name: str, text: str, arguments: dict[str, Any] | str
) -> None:
    written = call_of(read(f"Action: {name}\nAction Input: {text}").message)[1]
    assert (written if isinstance(arguments, str) else json.loads(written)) == arguments


def test_a_tool_without_schema_takes_the_input_as_it_is() -> None:
    said = completion("Action: bare\nAction Input: x")
    request = Request([USER], [{"type": "function", "function": {"name": "bare"}}])
    assert call_of(read_completion(said, request).message) == ("bare", "x")
    assert "- bare:  {}" in to_view(request)[0]["content"]


LABELS = ["Thought:", "Action:", "**Action:**", "Action Input:", "Observation:", "Final Answer:"]
MARKS = ["```", "```json", "````", "~~~", "**", "<think>", "</think>", "\n", "\r\n", " "]
PIECES = st.sampled_from([*LABELS, *MARKS, "look", '{"place": "x"}', "[", "a"])
REPLIES = st.one_of(
    st.text(), st.lists(st.one_of(PIECES, PIECES, st.text(max_size=3))).map("".join)
)


@settings(max_examples=5 * settings().max_examples, deadline=None)
@given(text=REPLIES)
def test_no_word_of_a_reply_is_lost(text: str) -> None:
    """All that was written is in the verbatim text and the cut; only calls have a cut."""
    step = parse_step(text)
    assert text.endswith(step.cut)
    assert not (step.action and step.content)
    message = read(text).message
    assert not (message.get("tool_calls") and message["content"])
    if text.strip():
        cut = "".join(repair["cut"] for repair in message.get("repairs", ()))
        assert verbatim(message) + cut == text
        assert not cut or message["tool_calls"]
        if not message.get("tool_calls") and "notes" in message:
            assert text.endswith(message["content"])
    else:
        assert message["content"] == text


@pytest.mark.parametrize("text", [text for text, *_ in CALLS.values()], ids=CALLS)
def test_a_reply_that_is_sent_back_reads_as_the_same_step(text: str) -> None:
    """Cutting a reply does not change what the rest of it says."""
    first = read(text).message
    again = read(verbatim(first)).message
    first.pop("repairs", None)
    assert again == first


@pytest.mark.parametrize(
    "piece",
    [
        "Action:\n",
        "Action Input:\n",
        "Observation:\n",
        "Thought:\n",
        "Action: ```a\n",
        "```\n",
        "```a\n",
        "```\na\n```\n",
        "```\nAction: a\n",
        "~~~\n```\n",
        " \n```a\n",
        " ",
        "*",
        "**",
        "`",
        "\n",
    ],
)
def test_a_reply_that_repeats_itself_is_read_in_time(piece: str) -> None:
    """A model that is caught in a loop must not catch its reader."""
    for text in (piece * (60_000 // len(piece)), f"{STEP}\n" + piece * (60_000 // len(piece))):
        started = time.process_time()
        read(text)
        assert time.process_time() - started < 20, "of CPU time; what grows faster takes hours"
