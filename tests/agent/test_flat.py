"""The flat format: sessions as small messages of no provider, and their way to APIs and back."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import pairwise, takewhile
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.flat import (
    FlatMessage,
    FlatSession,
    agent_loop,
    extend_session,
    fork_session,
    init_session,
    parse_response,
    response,
    send,
    to_api_messages,
)
from agent.models.errors import ModelError

SYSTEM = {"role": "system", "content": "Be kind."}
USER = {"role": "user", "content": "Go."}
REDACTED = {"type": "redacted_thinking", "data": "sealed"}
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def text(content: str = "Done.") -> FlatMessage:
    return {"role": "assistant", "content": content}


def thinking(content: str = "Hm.", **signature: str) -> FlatMessage:
    return {"type": "thinking", "content": content, **signature}


def call(id: str = "c1", *, name: str = "look", input: Any = None) -> FlatMessage:
    return {"type": "tool_call", "name": name, "id": id, "input": {} if input is None else input}


def result(output: Any = "Seen.", *, id: str = "c1", **is_error: bool) -> FlatMessage:
    return {"type": "tool_result", "id": id, "output": output, **is_error}


def opaque(block: dict[str, Any], **api: str) -> FlatMessage:
    return {"type": "opaque", "block": block, **api}


def drop_times(flat: list[FlatMessage]) -> list[FlatMessage]:
    return [{k: v for k, v in message.items() if k != "ts"} for message in flat]


def reply(*blocks: dict[str, Any], stop_reason: str = "end_turn") -> dict[str, Any]:
    return {"id": "m1", "role": "assistant", "content": list(blocks), "stop_reason": stop_reason}


TEXTS = st.text(max_size=8)
STAMPS = st.sampled_from([{}, {"ts": "2026-01-02T03:04:05Z"}])
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | TEXTS
JSON = st.recursive(
    SCALARS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
INPUTS = st.dictionaries(TEXTS, JSON, max_size=2) | JSON | st.sampled_from(["", "{", "7", '"a"'])
SAID = st.one_of(
    st.builds(text, TEXTS),
    st.builds(thinking, TEXTS),
    st.builds(lambda content, signed: thinking(content, signature=signed), TEXTS, TEXTS),
    st.builds(lambda name, input: {**call(name=name), "input": input}, TEXTS, INPUTS),
    st.builds(lambda data: opaque({**REDACTED, "data": data}), TEXTS),
)


@st.composite
def conversations(draw: Callable[..., Any]) -> list[FlatMessage]:
    """Any legal list of flat messages; the last calls may still wait for results."""
    flat: list[FlatMessage] = draw(st.sampled_from([[], [SYSTEM]]))[:]
    number = 0
    for _ in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            flat.append({**USER, "content": draw(TEXTS)})
            continue
        ids = []
        for item in draw(st.lists(SAID, min_size=1, max_size=5)):
            if item.get("type") == "tool_call":
                number += 1
                ids.append(f"c{number}")
                flat.append({**item, "id": ids[-1]})
            else:
                flat.append(item)
        outputs = st.builds(result, JSON)
        failures = st.builds(lambda output: result(output, is_error=True), JSON)
        flat += [{**draw(outputs | failures), "id": id} for id in draw(st.permutations(ids))]
    last_results = list(takewhile(lambda m: m.get("type") == "tool_result", reversed(flat)))
    flat = flat[: len(flat) - draw(st.integers(0, len(last_results)))]
    return [{**message, **draw(STAMPS)} for message in flat]


# Sessions


@pytest.mark.parametrize(
    "message",
    [
        SYSTEM,
        USER,
        text(),
        text(""),
        thinking(),
        thinking(signature="s"),
        call(input={"place": ["here", None, 1.5]}),
        call(input=["not", "an", "object"]),
        result(),
        result({"rows": [1, True]}, is_error=True),
        opaque(REDACTED),
        opaque({"type": "image", "source": {}}),
    ],
    ids=lambda message: "-".join(message),
)
def test_extend_takes_each_shape_as_it_is(message: FlatMessage) -> None:
    """A record is an ordered list of neutral messages; each known shape is taken whole."""
    session = FlatSession(messages=[])
    assert extend_session(session, USER) is session
    assert extend_session(session, message) is session
    assert drop_times(session["messages"]) == [USER, message]


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        ("Go.", "none of the forms of a flat message: 'Go.'"),
        ({"content": "Go."}, "none of the forms of a flat message: {'content': 'Go.'}"),
        ({**USER, "role": "tool"}, "none of the forms of a flat message: {'role': 'tool'"),
        ({**USER, "role": ["user"]}, "none of the forms"),
        ({**thinking(), "type": "thought"}, "none of the forms"),
        ({"role": "user"}, "none of the forms"),
        ({**USER, "content": [{"type": "text", "text": "Go."}]}, "none of the forms"),
        ({**USER, "content": None}, "none of the forms"),
        ({**USER, "ts": 5}, "its field 'ts' is unknown, or has the wrong type"),
        ({**USER, "type": "thinking"}, "its field 'type' is unknown"),
        ({**USER, "signature": "s"}, "its field 'signature' is unknown"),
        (dict([*USER.items(), (5, "five")]), "its field 5 is unknown"),
        ({**thinking(), "signature": None}, "its field 'signature' is unknown, or has the wrong"),
        ({"type": "tool_call", "name": "look", "id": "c1"}, "none of the forms"),
        ({**call(), "id": 7}, "none of the forms"),
        ({**result(), "is_error": "no"}, "its field 'is_error' is unknown, or has the wrong"),
        (opaque([REDACTED]), "none of the forms"),  # type: ignore[arg-type]
        (opaque({"data": "sealed"}), "none of the forms"),
        (opaque({"type": "text", "text": "Hi."}), "a block of type 'text' is not opaque"),
    ],
)
def test_extend_names_what_is_wrong(message: Any, wrong: str) -> None:
    """A message of no known shape is refused with the reason, and the session stays as it was."""
    session = init_session(None, "Go.")
    before = copy.deepcopy(session)
    with pytest.raises(ValueError, match=re.escape(wrong)):
        extend_session(session, message)
    assert session == before


@pytest.mark.parametrize(
    "output",
    [object(), {1, 2}, (1, 2), float("nan"), {1: 2}, 10**5000, "\ud800", [[b"bytes"]]],
    ids=lambda output: type(output).__name__,
)
def test_extend_refuses_what_json_cannot_hold(output: Any) -> None:
    """An output that JSON cannot hold is a ValueError that names the field, no TypeError."""
    with pytest.raises(ValueError, match="its 'output' holds what JSON cannot hold"):
        extend_session(init_session(None, "Go."), result(output))


def test_extend_refuses_what_is_nested_too_deep_to_be_written_again() -> None:
    """A value that the writers of records would refuse does not get into a session."""
    output: list[Any] = []
    for _ in range(99):
        output = [output]
    extend_session(init_session(None, "Go."), result(output))
    with pytest.raises(ValueError, match="its 'output' holds"):
        extend_session(init_session(None, "Go."), result([output]))


def test_init_gives_system_and_user() -> None:
    """A new session is exactly the system and the user message."""
    assert drop_times(init_session("Be kind.", "Go.")["messages"]) == [SYSTEM, USER]


def test_init_without_a_system_prompt() -> None:
    """None gives no system message; an empty prompt is one, though an empty one."""
    assert drop_times(init_session(None, "Go.")["messages"]) == [USER]
    assert drop_times(init_session("", "Go.")["messages"]) == [{**SYSTEM, "content": ""}, USER]


def test_send_says_something_for_the_user() -> None:
    """`send` appends a user message and gives the same session."""
    session = init_session(None, "Go.")
    assert send(session, "On.") is session
    assert drop_times(session["messages"]) == [USER, {"role": "user", "content": "On."}]


def test_extend_keeps_a_copy() -> None:
    """What the caller does with its message afterwards does not reach the session."""
    session, message = init_session(None, "Go."), call(input={"place": ["here"]})
    extend_session(session, message)
    message["input"]["place"].append("there")
    assert "ts" not in message
    assert session["messages"][1]["input"] == {"place": ["here"]}


def test_every_message_made_here_has_a_time() -> None:
    """All messages carry `ts` in UTC to the second; one that is there already stays."""
    session = init_session("Be kind.", "Go.")
    for message in (thinking(), text(), call(), result()):
        extend_session(session, message)
    extend_session(session, {**USER, "ts": "2001-01-01T00:00:00Z"})
    messages = session["messages"]
    messages += parse_response(reply({"type": "text", "text": "Hi."}))
    assert len(messages) == 8
    assert all(STAMP.fullmatch(message["ts"]) for message in messages)
    assert messages[6]["ts"] == "2001-01-01T00:00:00Z"


def test_response_is_the_last_text() -> None:
    """Thoughts, calls, results and users do not count; without a text there is none."""
    session = init_session("Be kind.", "Go.")
    assert response(session) is None
    for message in (text("First."), text("Last."), thinking(), call(), result(), USER):
        extend_session(session, message)
    found = response(session)
    assert found is session["messages"][3]
    assert found["content"] == "Last."


@given(conversations())
def test_a_fork_shares_nothing(flat: list[FlatMessage]) -> None:
    """A fork starts equal, and changing every part of it leaves the original as it was."""
    session = FlatSession(messages=flat)
    before = copy.deepcopy(session)
    fork = fork_session(session)
    assert fork == before
    for message in fork["messages"]:
        for part in ("input", "output", "block"):
            if isinstance(message.get(part), dict):
                message[part]["changed"] = True
        message["content"] = "changed"
    send(fork, "On.")
    assert session == before


@given(conversations())
def test_a_session_survives_json(flat: list[FlatMessage]) -> None:
    """All that can be put into a session is the same when written as JSON and read again."""
    session = FlatSession(messages=[])
    for message in flat:
        extend_session(session, message)
    assert drop_times(session["messages"]) == drop_times(flat)
    assert json.loads(json.dumps(session)) == session
    assert orjson.loads(orjson.dumps(session)) == session


# To the API and back


@given(conversations())
def test_the_round_trip_keeps_everything(flat: list[FlatMessage]) -> None:
    """What goes to the API is read back as the same items, and nothing given is altered."""
    before = copy.deepcopy(flat)
    replies = [message for message in to_api_messages(flat) if message["role"] == "assistant"]
    back = [item for reply in replies for item in drop_times(parse_response(reply))]
    said = [item for item in drop_times(flat) if "output" not in item and not is_said_to_it(item)]
    kept = [item for item in said if item.get("role") != "assistant" or item["content"].strip()]
    for item, read in zip(kept, back, strict=True):
        if item.get("type") == "tool_call" and not isinstance(item["input"], dict):
            # The API takes no other input than an object.
            assert isinstance(read["input"], dict)
            read["input"] = item["input"]
        assert read == item
    assert flat == before


def is_said_to_it(item: FlatMessage) -> bool:
    return item.get("role") in ("system", "user")


@given(conversations())
def test_messages_share_nothing_with_the_session(flat: list[FlatMessage]) -> None:
    """A caller may mark blocks of what it sends, as for a cache, without changing the record."""
    before = copy.deepcopy(flat)
    for message in to_api_messages(flat):
        for block in message["content"] if isinstance(message["content"], list) else ():
            block["cache_control"] = {"type": "ephemeral"}
            if isinstance(block.get("input"), dict):
                block["input"]["changed"] = True
    assert flat == before


def test_a_failed_result_stays_failed() -> None:
    """The error flag goes with the result; one that is false is as good as none."""
    failed, seen = result("Error: no", is_error=True), {**result(id="c2"), "is_error": False}
    sent = to_api_messages([USER, call(), failed, call("c2"), seen])
    assert [m["content"][0]["is_error"] for m in sent[2::2]] == [True, False]


@pytest.mark.parametrize(
    ("flat", "wrong"),
    [
        ([USER, SYSTEM], "message 1 of the session: the only system message must be"),
        ([SYSTEM, SYSTEM, USER], "message 1 of the session: the only system message"),
        ([USER, result()], "message 1 of the session: a tool result without an open call"),
        ([USER, call(), result(), result()], "message 3 of the session: a tool result without"),
        ([USER, call(), result(id="c2")], "message 2 of the session: a tool result without"),
        ([USER, call(), USER], "message 2 of the session: the calls ['c1'] before it have no"),
        ([call(), call("c2"), result(), USER], "message 3 of the session: the calls ['c2'] before"),
        ([call(), call("c2"), result(), text()], "message 3 of the session: the calls ['c2']"),
        ([call(), call("c2"), result(), call("c3")], "message 3 of the session: the calls ['c2']"),
        ([opaque(REDACTED, api="x")], "message 0 of the session: its field 'api' is unknown"),
        ([call(), call()], "message 1 of the session: an earlier call has the id 'c1', too"),
        ([call(), result(), call()], "message 2 of the session: an earlier call has the id"),
        ([USER, {**USER, "role": "tool"}], "message 1 of the session: it has none of the forms"),
        ([USER, {"type": "image"}], "message 1 of the session: it has none of the forms"),
        ([USER, {**USER, "content": 5}], "message 1 of the session: it has none of the forms"),
        ([USER, "Go."], "message 1 of the session: it has none of the forms"),
    ],
)
def test_a_hole_is_named(flat: list[FlatMessage], wrong: str) -> None:
    """The conversions refuse a session with the number of the first message that is wrong."""
    with pytest.raises(ValueError, match=re.escape(wrong)):
        to_api_messages(flat)
    with pytest.raises(ValueError, match=re.escape(wrong)):
        agent_loop(refuse_to_answer, [], FlatSession(messages=flat))


@pytest.mark.parametrize("flat", [[USER, call()], [call(), call("c2"), result(id="c2")]])
def test_a_session_may_end_before_its_results(flat: list[FlatMessage]) -> None:
    """It can be converted, and its results can be added; the loop does not continue it."""
    session = FlatSession(messages=flat)
    assert to_api_messages(flat)[-1]["role"] == ("assistant" if flat[0] == USER else "user")
    with pytest.raises(ValueError, match=re.escape("calls that have no result: ['c1']")):
        agent_loop(refuse_to_answer, [], session)
    said = {"content": [{"type": "text", "text": "Done."}]}
    agent_loop(lambda tools, asked: said, [], extend_session(session, result()))
    assert response(session) is not None


def refuse_to_answer(tools: Any, session: Any) -> dict[str, Any]:
    raise AssertionError("the model was asked")


@pytest.mark.parametrize(
    ("written", "given"),
    [
        ("", {}),
        ('{"n": 1}', {"n": 1}),
        ([1], [1]),
        ('{"n": ', '{"n": '),
        (None, None),
        ("[" * 101 + "]" * 101, "[" * 101 + "]" * 101),
    ],
)
def test_arguments_are_read_where_they_can_be(written: Any, given: Any) -> None:
    """An input is the JSON that the model wrote, or its text if that is no object."""
    block = {"type": "tool_use", "id": "c1", "name": "look", "input": written}
    flat = drop_times(parse_response(reply(block)))
    assert flat == [{**call(), "input": given}]
    assert extend_session(FlatSession(messages=[]), flat[0])["messages"][0]["input"] == given


def test_items_share_nothing_with_the_response() -> None:
    """Changing a session leaves the response of the API as it was."""
    sealed = {"type": "sealed", "parts": [1]}
    (item,) = parse_response(reply(sealed))
    item["block"]["parts"].append(2)
    assert sealed["parts"] == [1]


# The Anthropic API


def test_system_messages_are_not_api_messages() -> None:
    """The system's words travel apart."""
    flat = init_session("Be kind.", "Go.")["messages"]
    assert to_api_messages(flat) == [{"role": "user", "content": "Go."}]


def test_consecutive_assistant_messages_are_one_api_message() -> None:
    """Thoughts, texts and calls are blocks of one message, in the order of the session."""
    said = [text("a"), call(), thinking("b", signature="s"), call("c2"), text("c"), text("d")]
    (_, message, _) = to_api_messages([USER, *said, result(), result(id="c2")])
    assert message == {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
            {"type": "thinking", "thinking": "b", "signature": "s"},
            {"type": "tool_use", "id": "c2", "name": "look", "input": {}},
            {"type": "text", "text": "c"},
            {"type": "text", "text": "d"},
        ],
    }


def test_results_in_a_row_are_one_api_message() -> None:
    """Results are blocks of one user message; what the user adds comes behind them."""
    flat = [call(), call("c2"), result("b", id="c2"), result("a", is_error=True), USER]
    (_, message) = to_api_messages(flat)
    assert message["role"] == "user"
    assert [block.get("tool_use_id") for block in message["content"]] == ["c2", "c1", None]
    assert [block.get("is_error") for block in message["content"]] == [False, True, None]
    assert message["content"][2] == {"type": "text", "text": "Go."}


@pytest.mark.parametrize("signature", [{"signature": "EqQB=="}, {"signature": ""}, {}])
@pytest.mark.parametrize("thought", ["  Hm.\n", ""])
def test_a_signature_goes_back_unchanged(thought: str, signature: dict[str, str]) -> None:
    """A thought and its signature come back to the API as they came; none gives no key."""
    block = {"type": "thinking", "thinking": thought, **signature}
    flat = parse_response(reply(block, {"type": "text", "text": "Hi."}))
    assert drop_times(flat) == [thinking(thought, **signature), text("Hi.")]
    (message,) = to_api_messages(json.loads(json.dumps(flat)))
    assert message["content"][0] == block


def test_a_signature_that_is_null_is_none() -> None:
    """An endpoint that signs nothing may say so; what goes back has no such key."""
    flat = parse_response(reply({"type": "thinking", "thinking": "Hm.", "signature": None}))
    assert drop_times(flat) == [thinking()]


@pytest.mark.parametrize("output", [{"n": [1, None]}, ["a"], 7, 1.5, True, None])
def test_outputs_that_are_not_text_are_json_for_the_apis(output: Any) -> None:
    """The model sees the JSON, the record keeps the object; a text is sent as it is."""
    flat = [USER, call(), result(output), call("c2"), result('{"n": 1}', id="c2")]
    sent = [m["content"][0]["content"] for m in to_api_messages(flat)[2::2]]
    assert json.loads(sent[0]) == output
    assert sent[1] == '{"n": 1}'
    assert flat[2]["output"] == output


def test_empty_texts_are_not_parsed() -> None:
    """An empty text block is dropped; a response with no blocks says nothing."""
    empty = {"type": "text", "text": ""}
    assert parse_response(reply()) == []
    assert parse_response(reply(empty)) == []
    flat = parse_response(reply(empty, {"type": "text", "text": "Hi."}, empty))
    assert drop_times(flat) == [text("Hi.")]


def test_unknown_blocks_come_back_as_they_came() -> None:
    """Sealed thoughts and the server's own tools are kept in place and sent back."""
    blocks: list[dict[str, Any]] = [
        REDACTED,
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"url": "u"}]},
        {"type": "text", "text": "Found."},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"n": 1}},
    ]
    flat = parse_response(reply(*blocks, stop_reason="tool_use"))
    assert drop_times(flat) == [
        *map(opaque, blocks[:3]),
        text("Found."),
        call(input={"n": 1}),
    ]
    assert to_api_messages(flat) == [{"role": "assistant", "content": blocks}]


def test_texts_around_calls_keep_their_place() -> None:
    """A response without thoughts is parsed block by block too."""
    blocks: list[dict[str, Any]] = [
        {"type": "text", "text": "a"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
        {"type": "text", "text": "b"},
    ]
    flat = parse_response(reply(*blocks, stop_reason="tool_use"))
    assert drop_times(flat) == [text("a"), call(), text("b")]
    assert to_api_messages(flat) == [{"role": "assistant", "content": blocks}]


def test_an_input_that_is_not_an_object_goes_to_the_api_inside_an_object() -> None:
    """The API refuses any other input; the session keeps what the model wrote."""
    flat = [call(input=[1]), call("c2", input="{cut")]
    (message,) = to_api_messages(flat)
    assert [block["input"] for block in message["content"]] == [
        {"raw_arguments": "[1]"},
        {"raw_arguments": "{cut"},
    ]
    assert [item["input"] for item in flat] == [[1], "{cut"]


def test_a_response_must_be_whole() -> None:
    """A cut or failed response is refused; a stand-in may leave out why it stopped."""
    said = {"type": "text", "text": "Hi."}
    assert drop_times(parse_response({"content": [said]})) == [text("Hi.")]
    for broken in (
        {"content": [said], "stop_reason": None},
        {"content": "Hi."},
        {"type": "error", "error": {"type": "overloaded_error", "message": "Busy."}},
    ):
        with pytest.raises(ModelError):
            parse_response(broken)


def test_half_a_character_does_not_cost_the_response() -> None:
    """A lone surrogate, as a token limit leaves it, is replaced: the session must survive JSON."""
    (said,) = parse_response(reply({"type": "text", "text": "Hi \ud83d"}))
    assert said["content"] == "Hi \ufffd"


@given(conversations())
def test_the_api_view_alternates(flat: list[FlatMessage]) -> None:
    """Users and assistants speak in turn, results follow their calls, and nothing is empty."""
    view = to_api_messages(flat)
    roles = [message["role"] for message in view]
    assert set(roles) <= {"user", "assistant"}
    assert all(role != later for role, later in pairwise(roles))
    assert all(message["content"] or message["role"] == "user" for message in view)
    sent = [ids_in(message, "tool_use", "id") for message in view]
    answered = [ids_in(message, "tool_result", "tool_use_id") for message in view]
    for calls, results in zip(sent[:-1], answered[1:], strict=True):
        assert calls >= results
    assert set().union(*sent) == {m["id"] for m in flat if m.get("type") == "tool_call"}
    assert set().union(*answered) == {m["id"] for m in flat if m.get("type") == "tool_result"}


def ids_in(message: dict[str, Any], type: str, key: str) -> set[str]:
    blocks = message["content"] if isinstance(message["content"], list) else []
    return {block[key] for block in blocks if block["type"] == type}
