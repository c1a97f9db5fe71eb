"""`import` of rows: the forms that published files have are read, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from batch_trajectories.importing.conversation import SourceConversation, Unreadable
from tests.helpers.importing import read_chat_row

LOOK = {"name": "look", "description": "Look it up.", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": LOOK}
CALL = {"name": "look", "arguments": {"q": "a", "n": [1, None]}}


def turns(*pairs: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"from": who, "value": what} for who, what in pairs]


def chat(*pairs: tuple[str, Any], **of_last: Any) -> list[dict[str, Any]]:
    made = [{"role": who, "content": what} for who, what in pairs]
    made[-1] |= of_last
    return made


def read_messages(found: SourceConversation) -> list[tuple[str, str]]:
    """Roles and texts; of replies with calls also these, of results their calls."""
    shown: list[tuple[str, str]] = []
    for message in found.conversation.messages:
        text = message["content"]
        for call in message.get("tool_calls", ()):
            given = json.loads(call["function"]["arguments"])
            text += f"|{call['id']} {call['function']['name']} {json.dumps(given)}"
        if message["role"] == "tool":
            text = f"{message['tool_call_id']} {message['name']}: {text}"
        shown.append((message["role"], text))
    return shown


def names(found: SourceConversation) -> list[str] | None:
    return None if found.tools is None else [tool["function"]["name"] for tool in found.tools]


def refusal(**row: Any) -> str:
    with pytest.raises(Unreadable) as caught:
        read_chat_row(**row)
    return str(caught.value)


ARGUMENTS = json.dumps(CALL["arguments"])
ASKED = ("user", f"|call_1_0 look {ARGUMENTS}")


@pytest.mark.parametrize(
    "tools",
    [
        [LOOK],
        [WRAPPED],
        [{"function": LOOK}],
        json.dumps([WRAPPED]),
        str([LOOK]),  # a literal of Python
        f"{json.dumps(LOOK)}\n{json.dumps(WRAPPED)}",
        [json.dumps(WRAPPED)],
        LOOK,
        [{"name": "look", "description": "Look it up.", "input_schema": {"type": "object"}}],
        [{"name": "look", "inputSchema": {"type": "object"}}],
        [{**LOOK, "parameters": json.dumps(LOOK["parameters"])}],
        [{"type": "custom", "name": "look", "input_schema": {"type": "object"}}],
        [{**LOOK, "required": None, "strict": True}],
    ],
)
def test_tools_have_many_forms(tools: Any) -> None:
    for column in ("tools", "functions"):
        found = read_chat_row(
            **{"messages": chat(("user", "x"), ("assistant", "y")), column: tools}
        )
        assert {*(names(found) or ())} == {"look"}
        assert found.tools is not None
        assert found.tools[0]["function"]["parameters"]["type"] == "object"


@pytest.mark.parametrize(
    ("tools", "place"),
    [
        ([{"type": "web_search", "name": "web"}], "tools[0].type: 'web_search'"),
        ([{"description": "nameless"}], "tools[0].name"),
        ([{**WRAPPED, "more": 1}], "tools[0].more"),
        ([7], "tools[0]"),
        ("{", "tools: not JSON"),
        ([{**LOOK, "parameters": [1]}], "tools[0].parameters"),
        ([{**LOOK, "input_schema": {"type": "object"}}], "tools[0].input_schema"),
        ({"function_declarations": [LOOK]}, "tools[0]"),
    ],
)
def test_tools_of_unknown_form_are_refused(tools: Any, place: str) -> None:
    assert refusal(messages=chat(("user", "x"), ("assistant", "y")), tools=tools).startswith(place)


@pytest.mark.parametrize(
    "reply",
    [
        {"tool_calls": [{"type": "function", "function": CALL}]},
        {"tool_calls": [{"function": {**CALL, "arguments": ARGUMENTS}, "index": 0}]},
        {"tool_calls": [CALL]},
        {"tool_calls": json.dumps([CALL])},
        {"tool_calls": CALL},
        {"tool_calls": [{"name": "look", "parameters": CALL["arguments"]}]},
        {"tool_calls": [{"type": "function", "function": "look", "arguments": CALL["arguments"]}]},
        {"function_call": CALL},
        {"function_call": {**CALL, "arguments": ARGUMENTS}},
        {"content": [{"type": "tool_use", "name": "look", "input": CALL["arguments"]}]},
        {
            "content": [
                {"type": "tool_use", "name": "look", "input": CALL["arguments"]},
                {"type": "text", "text": ""},
            ]
        },
    ],
)
@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("r", "r"),
        ({"temp": 21}, '{"temp": 21}'),
        (7, "7"),
        (False, "false"),
        ([1, "é"], '[1, "é"]'),
        ([{"type": "text", "text": "a"}, {"type": "text", "value": "b"}], "a\nb"),
        ([{"type": "hit", "text": "a"}], '[{"type": "hit", "text": "a"}]'),
        (None, ""),
    ],
)
def test_calls_and_results_have_many_forms(reply: dict[str, Any], result: Any, text: str) -> None:
    for role in ("tool", "function", "tool_response"):
        reads = [{"role": role, "name": "look", "content": result}]
        messages = [
            *chat(("user", "x")),
            {"role": "assistant", **reply},
            *reads,
            *chat(("assistant", "y")),
        ]
        for row in ({"messages": messages}, {"conversations": messages}):
            assert read_messages(read_chat_row(**row)) == [
                ("user", "x"),
                ("assistant", ASKED[1]),
                ("tool", f"call_1_0 look: {text}"),
                ("assistant", "y"),
            ]


def test_results_are_matched_by_ids_names_and_order() -> None:
    calls = [
        {"id": id, "function": {"name": id[0], "arguments": "{}"}} for id in ("a1", "b1", "b2")
    ]
    messages = [
        *chat(("user", "x"), ("assistant", None), tool_calls=calls),
        {"role": "tool", "tool_call_id": "b2", "content": "3"},
        {"role": "tool", "name": "b", "content": "2"},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a1", "content": "1"}]},
        {"role": "user", "content": "And?"},
    ]
    assert read_messages(read_chat_row(messages=messages))[2:] == [
        ("tool", "b2 b: 3"),
        ("tool", "b1 b: 2"),
        ("tool", "a1 a: 1"),
        ("user", "And?"),
    ]
    assert refusal(messages=[*messages, {"role": "tool", "content": "4"}]) == (
        "messages[6].content: a result, but the reply before it has no such call"
    )
    lost = [*messages, {"role": "tool", "tool_call_id": "z", "content": "4"}]
    assert "messages[6].content: a result of 'z'" in refusal(messages=lost)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"thought": "Hm."}, "messages[1].thought"),
        ({"name": "Bob"}, "messages[1].name"),
        ({"train_detail": [{"begin_offset": 0, "train": False}]}, "messages[1].train_detail"),
        ({"weight": 0.5}, "messages[1].weight"),
        ({"loss": "no"}, "messages[1].loss"),
        ({"from": "gpt"}, "messages[1].from"),
        ({"value": "more"}, "messages[1].value"),
        ({"role": "critic"}, "messages[1].role"),
        ({"content": {"text": "y"}}, "messages[1].content"),
        ({"content": [{"type": "plot", "text": "y"}]}, "messages[1].content[0].type"),
        ({"content": [{"type": {}, "text": "y"}]}, "messages[1].content[0].type"),
        ({"content": [{"type": "text", "text": 7}]}, "messages[1].content[0].text"),
        ({"content": [{"type": "text", "text": "y", "b": 1}]}, "messages[1].content[0].b"),
        ({"content": [{"type": "input_audio", "data": ""}]}, "messages[1].content[0].type"),
        (
            {"tool_calls": [{"name": "look", "args": {}, "why": "x"}]},
            "messages[1].tool_calls[0].why",
        ),
        ({"tool_calls": [{"id": "c"}]}, "messages[1].tool_calls[0].name"),
        ({"tool_calls": [{**CALL, "input": {"q": 1}}]}, "messages[1].tool_calls[0].input"),
        ({"function_call": "none"}, "messages[1].function_call"),
        ({"reasoning": 7}, "messages[1].reasoning"),
        ({"thinking": "a", "reasoning_content": "b"}, "messages[1].thinking"),
    ],
)
def test_what_is_not_known_in_a_message_is_refused(message: Mapping[str, Any], place: str) -> None:
    reply = {"role": "assistant", "content": "y", **message}
    assert refusal(messages=[*chat(("user", "x")), reply]).startswith(f"{place}:")


def test_what_says_nothing_or_is_a_note_is_left_out() -> None:
    empty: dict[str, Any] = {
        "name": None,
        "tool_calls": [],
        "thought": "",
        "audio": None,
        "prefix": {},
    }
    notes = {"id": "m1", "timestamp": 7, "extra": {"cost": 1}, "model": "m", "type": "message"}
    agents = {"agent": "main", "message_type": "action", "thought": "y", "action": "ls"}
    reply = {"role": "assistant", "content": "y", **empty, **notes, **agents}
    assert read_messages(read_chat_row(messages=[*chat(("user", "x")), reply])) == [
        ("user", "x"),
        ("assistant", "y"),
    ]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_reasoning_has_several_keys(key: str, column: str) -> None:
    found = read_chat_row(**{column: chat(("user", "Sum?"), ("assistant", "4"), **{key: "Add."})})
    assert found.conversation.messages[1]["reasoning"] == "Add."
    part = {"type": "thinking", "thinking": "Add.", "signature": "s", "redacted": False}
    found = read_chat_row(**{column: chat(("user", "Sum?"), ("assistant", [part, {"text": "4"}]))})
    reply = found.conversation.messages[1]
    assert (reply["reasoning"], reply["content"]) == ("Add.", "4")


@pytest.mark.parametrize(
    ("mark", "off", "on"),
    [
        ("weight", 0, 1.0),
        ("loss", False, True),
        ("loss_weight", 0.0, 1),
        ("train", False, True),
        ("training", 0, None),
    ],
)
def test_marks_say_which_replies_are_learnt(mark: str, off: Any, on: Any) -> None:
    marked = [("gpt", off), ("gpt", on), ("human", off)]
    entries = [{"from": "human", "value": "x"}]
    entries += [{"from": who, "value": "y", mark: given} for who, given in marked]
    assert read_chat_row(conversations=entries).conversation.no_loss == [1]


def test_the_system_prompt_in_a_column_is_the_first_message() -> None:
    plain = turns(("human", "x"), ("gpt", "y"))
    for column in ("system", "system_prompt"):
        assert read_messages(read_chat_row(conversations=plain, **{column: "Be brief."}))[0] == (
            "system",
            "Be brief.",
        )
        assert (
            read_messages(read_chat_row(messages=chat(("user", "x")), **{column: "Be brief."}))[0][
                0
            ]
            == "system"
        )
    both = turns(("system", "Be brief."), *plain_pairs(plain))
    assert len(read_messages(read_chat_row(conversations=both, system="Be brief."))) == 3
    assert refusal(conversations=both, system="Be long.").startswith("system: ")
    assert refusal(conversations=plain, system=7) == "system: it must be text or a list of parts"


def plain_pairs(entries: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(one["from"], one["value"]) for one in entries]


JSON_CALL = json.dumps(CALL)
TWO = json.dumps([CALL, {"name": "look", "arguments": {}}])
AND_SECOND = "|call_1_1 look {}"


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (
            [("function_call", JSON_CALL), ("observation", "r"), ("gpt", "y")],
            [ASKED[1], "call_1_0 look: r", "y"],
        ),
        ([("function_call", str(CALL)), ("observation", "r")], [ASKED[1], "call_1_0 look: r"]),
        (
            [
                (
                    "function_call",
                    f"<think>\nHm.\n</think>\n\nSo:\n<tool_call>[{JSON_CALL}]</tool_call>",
                )
            ],
            ["So:" + ASKED[1]],
        ),
        (
            [("function_call", TWO), ("observation", "1\n</tool_response>\n<tool_response>\n2")],
            [ASKED[1] + AND_SECOND, "call_1_0 look: 1", "call_1_1 look: 2"],
        ),
        (
            [("function_call", TWO), ("observation", '[{"r": 1}, "two"]')],
            [ASKED[1] + AND_SECOND, 'call_1_0 look: {"r": 1}', "call_1_1 look: two"],
        ),
        (
            [("function_call", TWO), ("observation", "1"), ("observation", "2")],
            [ASKED[1] + AND_SECOND, "call_1_0 look: 1", "call_1_1 look: 2"],
        ),
        (
            [
                ("gpt", "Both."),
                ("tool_call", JSON_CALL),
                ("tool_call", '{"name": "look", "arguments": {}}'),
                ("tool_response", "1"),
                ("tool_response", {"r": 2}),
            ],
            ["Both." + ASKED[1] + AND_SECOND, "call_1_0 look: 1", 'call_1_1 look: {"r": 2}'],
        ),
        (
            [
                (
                    "function_call",
                    "Run it.\n\n<function=bash>\n<parameter=cmd>\nls -la\n</parameter>\n"
                    "<parameter=n>2</parameter>\n</function>",
                ),
                ("observation", "a b"),
            ],
            ['Run it.\n|call_1_0 bash {"cmd": "ls -la", "n": "2"}', "call_1_0 bash: a b"],
        ),
    ],
)
def test_calls_of_llamafactory_swift_and_adp(entries: Any, expected: list[str]) -> None:
    found = read_chat_row(conversations=turns(("human", "x"), *entries))
    assert [text for _, text in read_messages(found)[1:]] == expected


@pytest.mark.parametrize(
    ("entries", "place"),
    [
        ([("function_call", "look(q='a')")], "conversations[1].value: neither JSON"),
        (
            [("function_call", TWO), ("observation", "1"), ("gpt", "y")],
            "conversations[3]: the calls",
        ),
        ([("observation", "1")], "conversations[1].value: a result, but"),
        ([("function_call", "<function=f>x</function>")], "conversations[1].value: text between"),
        ([("gpt", f"<tool_call>{JSON_CALL}</tool_call> Done.")], "conversations[1].value: text"),
        (
            [("gpt", f"<tool_call>{JSON_CALL}")],
            "conversations[1].value: a <tool_call> block is not",
        ),
        ([("gpt", "<tool_call>{no}</tool_call>")], "conversations[1].value: <tool_call>: not JSON"),
        ([("gpt", None)], "conversations[1].value: "),
        ([("bot", "y")], "conversations[1].from: 'bot'"),
    ],
)
def test_calls_of_unknown_form_are_refused(entries: Any, place: str) -> None:
    assert refusal(conversations=turns(("human", "x"), *entries)).startswith(place)


HERMES = (
    "You are a function calling AI model. You are provided with function signatures within <tools> "
    "</tools> XML tags.\n<tools>\n{}\n</tools>\nFor each function call return a JSON object within "
    "<tool_call> </tool_call> XML tags.\n<tool_call>\n{{'name': <name>}}\n</tool_call>{}"
)
QWEN = (
    "You are Qwen.\n\n# Tools\n\nYou may call one or more functions to help.\n\n<tools>\n"
    "{}\n</tools>\n\nFor each call, return JSON within <tool_call></tool_call> tags:\n<tool_call>\n"
    '{{"name": <name>}}\n</tool_call>{}'
)


@pytest.mark.parametrize(
    "tools",
    [json.dumps([LOOK]), json.dumps([WRAPPED]), str([WRAPPED]), f"{json.dumps(WRAPPED)}\n{LOOK}"],
)
@pytest.mark.parametrize(
    ("prompt", "own"),
    [
        (HERMES, [""]),
        (HERMES.replace("{}\n</tools>", "{}\n</tools>", 1) + "\n\nBe brief.", ["Be brief."]),
        (QWEN, ["You are Qwen."]),
        ("Be a clerk.\n<tools>\n{}\n</tools>{}", ["Be a clerk."]),
    ],
)
def test_tools_in_a_system_prompt_are_offered(tools: str, prompt: str, own: list[str]) -> None:
    if "\n" in tools:
        tools = f"{json.dumps(WRAPPED)}\n{json.dumps({**LOOK, 'name': 'other'})}"
    call = f"<tool_call>\n{JSON_CALL}\n</tool_call>"
    entries = turns(("system", prompt.format(tools, "")), ("human", "x"), ("gpt", call))
    for row in (
        {"conversations": entries},
        {"conversations": entries[1:], "system": entries[0]["value"]},
        {"messages": chat(*plain_pairs(entries))},
    ):
        found = read_chat_row(**row)
        assert (names(found) or [])[0] == "look"
        assert [text for role, text in read_messages(found) if role == "system"] == [
            *filter(None, own)
        ]
        assert read_messages(found)[-1][1] == ASKED[1]


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ('{"temp": 21, "unit": "C"}', '{"temp": 21, "unit": "C"}'),
        ("{'temp': 21}", "{'temp': 21}"),
        ("plain text", "plain text"),
        ('["a", 1]', '["a", 1]'),
        ("7", "7"),
        ('{"name": "look", "content": {"r": 1}}', '{"r": 1}'),
        ('{"name": "look", "content": "r"}', "r"),
        ("{'name': 'look', 'content': 'r'}", "r"),
        ('{"content": "r"}', '{"content": "r"}'),
        ('{"name": "look", "result": "r"}', '{"name": "look", "result": "r"}'),
        ('{"name": "look", "content": "</tool_response>"}', "</tool_response>"),
    ],
)
@pytest.mark.parametrize("who", ["tool", "human"])
def test_results_in_tags_are_of_any_kind(body: str, text: str, who: str) -> None:
    call = f"I look.\n<tool_call>\n{JSON_CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>\n"
    block = f"<tool_response>\n{body}\n</tool_response>"
    for results in ([(who, f"{block}\n{block}")], [(who, block), (who, f"{block}\n")]):
        entries = turns(("human", "x"), ("gpt", call), *results, ("gpt", "y"))
        for row in ({"conversations": entries}, {"messages": chat(*plain_pairs(entries))}):
            assert read_messages(read_chat_row(**row))[1:] == [
                ("assistant", f"I look.{ASKED[1]}|call_1_1 look {ARGUMENTS}"),
                ("tool", f"call_1_0 look: {text}"),
                ("tool", f"call_1_1 look: {text}"),
                ("assistant", "y"),
            ]


def test_a_reply_that_speaks_of_tags_is_text() -> None:
    words = 'Write <tool_call>{"name": "f"}</tool_call> to call.'
    assert (
        read_messages(read_chat_row(messages=chat(("user", "How?"), ("assistant", words))))[1][1]
        == words
    )
    words = "Write <tool_call> first."
    assert (
        read_messages(read_chat_row(conversations=turns(("human", "How?"), ("gpt", words))))[1][1]
        == words
    )


@pytest.mark.parametrize("column", ["chosen", "rejected", "rejected_response"])
def test_a_pair_says_that_it_is_not_read(column: str) -> None:
    answer = {"from": "gpt", "value": "y"}
    said = refusal(conversations=turns(("human", "x")), **{column: answer})
    assert said.startswith(f"{column}: the row is a pair for preferences, which are not read")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("image", "a.jpg"),
        ("image", {"path": "a.jpg"}),
        ("images", ["a"]),
        ("audio", {}),
        ("video", "v"),
    ],
)
def test_pictures_in_columns_are_noted(column: str, value: Any) -> None:
    row = {"conversations": turns(("human", "<image>x"), ("gpt", "y")), column: value}
    (part,) = read_chat_row(**row).conversation.messages[0]["provider_blocks"]["blocks"]
    assert part["type"] == column.removesuffix("s")
    assert "provider_blocks" not in read_chat_row(**{**row, column: None}).conversation.messages[0]


@pytest.mark.parametrize("column", ["messages", "conversations"])
def test_a_picture_that_a_model_made_is_noted(column: str) -> None:
    parts = [{"type": "text", "text": "Here."}, {"type": "image_url", "image_url": {"url": "u"}}]
    found = read_chat_row(**{column: chat(("user", "Draw."), ("assistant", parts))})
    assert found.conversation.messages[1]["provider_blocks"]["blocks"][-1] == parts[1]


def test_messages_may_be_text() -> None:
    messages = chat(("user", "x"), ("assistant", "y"))
    for given in (json.dumps(messages), str(messages), [json.dumps(one) for one in messages]):
        assert read_messages(read_chat_row(messages=given)) == [("user", "x"), ("assistant", "y")]
    wrong: list[Any] = ["[", [7], 5, [], "x"]
    for one in wrong:
        assert refusal(messages=one).startswith("messages")


def test_what_mini_swe_agent_adds_to_messages_is_left_out() -> None:
    """As LiteLLM gives its replies; the last message is what was submitted."""
    copies = {"refusal": None, "reasoning_content": "Hm."}
    reply = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm.",
        "images": [],
        "tool_calls": [{"id": "c", "function": CALL}],
        "function_call": None,
        "provider_specific_fields": copies,
        "extra": {"actions": [], "cost": 0.1},
    }
    result = {"role": "tool", "tool_call_id": "c", "content": "r", "extra": {"returncode": 0}}
    end = {"role": "exit", "content": "diff", "extra": {"exit_status": "Submitted"}}
    messages = [*chat(("user", "x")), reply, result, end]
    found = read_chat_row(messages=messages, trajectory_format="mini-swe-agent-1.1")
    assert [role for role, _ in read_messages(found)] == ["user", "assistant", "tool"]
    assert refusal(messages=messages).startswith("messages[3].role: 'exit'")
    copies["citations"] = "https://h"
    said = refusal(messages=messages[:3])
    assert said.startswith("messages[1].provider_specific_fields")


def test_thoughts_that_a_provider_hides_are_no_reasoning() -> None:
    part = {"type": "reasoning", "reasoning": "c2VjcmV0", "redacted": True}
    found = read_chat_row(
        messages=chat(("user", "x"), ("assistant", [part, {"type": "text", "text": "y"}]))
    )
    reply = found.conversation.messages[1]
    assert "reasoning" not in reply
    hidden = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    assert reply["provider_blocks"]["blocks"] == [{"thinking_blocks": [hidden]}]


OTHER = {**LOOK, "name": "other"}


def offering(*tools: dict[str, Any]) -> str:
    return f"Be kind.\n<tools>\n{json.dumps([*tools])}\n</tools>"


def test_tools_of_several_places_count_together() -> None:
    """Two blocks, two system messages, two columns, a column beside a block: each tool once."""
    plain = (("human", "x"), ("gpt", "y"))
    third = {**LOOK, "name": "third"}
    for row in (
        {"conversations": turns(("system", offering(LOOK) + offering(OTHER, LOOK)), *plain)},
        {"conversations": turns(("system", offering(LOOK)), ("system", offering(OTHER)), *plain)},
        {"conversations": turns(("system", offering(LOOK, OTHER)), *plain), "tools": [WRAPPED]},
        {"conversations": turns(*plain), "tools": [LOOK], "available_tools": [WRAPPED, OTHER]},
        {"conversations": turns(*plain), "system": offering(LOOK), "tools": [OTHER]},
    ):
        found = read_chat_row(**row)
        assert sorted(names(found) or ()) == ["look", "other"]
        assert "<tools>" not in "".join(
            text for role, text in read_messages(found) if role == "system"
        )
    blocks = f"A.\n{offering(LOOK)}\nB.\n{offering(OTHER)}\nC.\n{offering(third)} D."
    found = read_chat_row(conversations=turns(("system", blocks), *plain))
    assert read_messages(found)[0][1] == "A.\nBe kind.\nB.\nBe kind.\nC.\nBe kind.\nD."
    assert len(found.tools or ()) == 3


def test_tools_of_one_name_that_differ_are_refused() -> None:
    plain = (("human", "x"), ("gpt", "y"))
    changed = {**LOOK, "description": "Look away."}
    system = ("system", offering(LOOK) + offering(changed))
    said = refusal(conversations=turns(system, *plain))
    assert said.startswith("conversations[0].value: <tools>: it has another tool 'look'")
    said = refusal(conversations=turns(("system", offering(changed)), *plain), tools=[LOOK])
    assert said.startswith("conversations: <tools>: it has another tool 'look'")
    said = refusal(conversations=turns(*plain), tools=[LOOK], functions=[changed])
    assert said.startswith("functions: it has another tool 'look'")
    # What one of them does not say is no difference.
    bare = {"name": "look", "parameters": {"type": "object", "required": None}}
    found = read_chat_row(conversations=turns(("system", offering(bare)), *plain), tools=[LOOK])
    assert [tool["function"]["description"] for tool in found.tools or ()] == ["Look it up."]


def test_tags_that_offer_no_tool_are_words() -> None:
    text = "Write <tools>[]</tools>"
    found = read_chat_row(
        conversations=turns(("system", text), ("human", "x"), ("gpt", "y")), tools=""
    )
    assert (read_messages(found)[0][1], found.tools) == (text, [])


def test_a_system_prompt_may_be_a_list_of_parts() -> None:
    parts = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    plain = chat(("user", "x"), ("assistant", "y"))
    for row in (
        {"messages": plain, "system": parts},
        {"messages": [{"role": "system", "content": parts}, *plain]},
        {"messages": [{"role": "system", "content": parts}, *plain], "system": "Be brief."},
        {"messages": plain, "system_message": "Be brief."},
    ):
        assert read_messages(read_chat_row(**row))[0] == ("system", "Be brief.")
    picture = {"type": "image_url", "image_url": {"url": "u"}}
    for row in (
        {"messages": plain, "system": [*parts, picture]},
        {"messages": [{"role": "system", "content": [*parts, picture]}, *plain]},
    ):
        (system, *_) = read_chat_row(**row).conversation.messages
        assert system["provider_blocks"]["blocks"] == [picture]


@pytest.mark.parametrize(
    ("columns", "quiet"),
    [
        ({"weight": 0}, True),
        ({"weight": 1.0}, False),
        ({"loss": False, "train": True}, True),
        ({"training": 0}, True),
        ({"label": False}, True),
        ({"label": True}, False),
        ({"kto_tag": "false"}, True),
        ({"label": "math"}, False),
    ],
)
def test_marks_of_a_row_are_those_of_its_replies(columns: dict[str, Any], quiet: bool) -> None:
    messages = chat(("user", "x"), ("assistant", "y"), ("user", "x"), ("assistant", "z"))
    found = read_chat_row(messages=messages, **columns)
    assert found.conversation.no_loss == ([1, 2] if quiet else [])
    value = columns.get("label", columns.get("kto_tag"))
    passed = {True: True, False: False, "false": False}.get(value)
    expected = None if passed is None else {"passed": passed, "reward": float(passed)}
    assert found.facts.get("check") == expected


@pytest.mark.parametrize(
    "columns",
    [
        {"weight": 0.5},
        {"loss": 1.37},
        {"train": "no"},
        {"label": 0},
        {"label": [1]},
        {"kto_tag": "bad"},
    ],
)
def test_marks_of_a_row_that_say_something_else_are_refused(columns: dict[str, Any]) -> None:
    (name,) = columns
    said = refusal(messages=chat(("user", "x"), ("assistant", "y")), **columns)
    assert said.startswith(f"{name}: ")
    assert said.endswith(f"if it is no part of the conversation, add --metadata={name}")
    both = refusal(messages=chat(("user", "x"), ("assistant", "y")), label=True, kto_tag=False)
    assert both == "kto_tag: the row has another label"


ASK = "How many moons has Mars, and what are they called by astronomers?"
TOLD = "<think>\nTwo.\n</think>\n\nTwo: Phobos and Deimos."


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": ASK, "prompt_id": "f0e"},  # UltraChat
        {"prompt": [{"role": "user", "content": ASK}]},
        {"instruction": ASK, "response": TOLD, "gen_input_configs": {"temperature": 1}},  # Magpie
        {"input": ASK[:50], "output": "Two: Phobos and Deimos.", "history": [[ASK, TOLD]]},
        {"question": "q" * 999, "target_tools": "a,b", "metadata": "m" * 2000},  # Toucan
        {"instance_id": "a__b-1", "resolved": True, "patch": "+" * 5000, "info": {"cost": 1}},
        {"toolsets_used": ["web"], "tool_stats": {"web": {"count": 1}}, "partial": False},
        {"docker_image": "org/image:tag", "image_name": "x", "num_images": 2, "has_image": True},
        {"tags": ["math"], "thinking": {"type": "enabled"}, "stop": ["x"], "history": []},
        {"answer": "x" * 5000, "ground_truth": ["2"], "score": 0.5, "images": [], "system": ""},
    ],
)
def test_columns_of_public_sets_are_read(columns: dict[str, Any]) -> None:
    for row in (
        {"messages": chat(("user", ASK), ("assistant", TOLD))},
        {"conversations": turns(("human", ASK), ("gpt", TOLD))},
    ):
        found = read_chat_row(**row, **columns)
        assert len(read_messages(found)) == 2
        assert "provider_blocks" not in found.conversation.messages[0]
        short = {name for name, value in columns.items() if isinstance(value, bool | int | float)}
        assert short <= found.columns.keys()


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"documents": ["d"]}, "documents: the column is unknown: ['d']; if it is"),
        ({"history": [["Hi", "Ho"]]}, "history: the column is unknown"),
        ({"instruction": "Be brief."}, "instruction: the column is unknown: 'Be brief.'"),
        ({"mask": "01"}, "mask: the column is unknown: '01'; if it is no part"),
        ({"thinking": "Hm."}, "thinking: the column is unknown: 'Hm.'"),
        ({"available_tools": ["look"]}, "available_tools[0]: not JSON"),
        ({"notes": "n" * 1000}, "notes: the column is unknown"),
        ({"a": [1], "b": {"c": 1}}, "a: the column is unknown: [1]; so are b; if it is no part"),
        ({"system_message": 7}, "system_message: it must be text"),
    ],
)
def test_columns_that_may_hold_content_are_refused(columns: dict[str, Any], said: str) -> None:
    refused = refusal(messages=chat(("user", "x"), ("assistant", "y")), **columns)
    assert refused.startswith(said)
    assert "system_message" in columns or "--metadata=" in refused


def test_a_result_that_names_another_tool_than_its_call_is_refused() -> None:
    call = {"id": "c", "function": {"name": "look", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "c", "name": "other", "content": "r"}
    messages = [*chat(("user", "x"), ("assistant", ""), tool_calls=[call]), result]
    assert refusal(messages=messages).startswith("messages[2].content: name: 'other', but")
    for wrong in ({**call, "type": "mcp"}, {**call, "function": {**CALL, "type": "x"}}):
        messages = chat(("user", "x"), ("assistant", ""), tool_calls=[wrong])
        assert ".type: " in refusal(messages=messages)
