"""One record becomes one row of the Hermes dialect, or is rejected with a reason."""

from __future__ import annotations

import json
import pickle
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_trajectories.export.conversation.row_json import content_json, dumps_row
from batch_trajectories.export.conversation.validity import Reason, Rejected, check_finished
from batch_trajectories.export.formats.hermes import to_conversations
from batch_trajectories.records.record_types import stored_messages
from tests.helpers.builders import (
    OFFERED,
    TEMP,
    assistant,
    call,
    ended_by,
    final,
    record_of,
    result,
    user,
)
from tests.helpers.stored import to_record, to_row

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MARKERS = [
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

PREAMBLE = (
    "You are a function calling AI model. You are provided with function signatures within"
    " <tools> </tools> XML tags. You may call one or more functions to assist with the user"
    " query. If available tools are not relevant in assisting with user query, just respond in"
    " natural conversational language. Don't make assumptions about what values to plug into"
    " functions. After calling & executing the functions, you will be provided with function"
    " results within <tool_response> </tool_response> XML tags. Here are the available tools:\n"
    "<tools>\n"
)
CALL_SCHEMA = (
    "\n</tools>\n"
    "For each function call return a JSON object, with the following pydantic model json schema"
    " for each:\n"
    "{'title': 'FunctionCall', 'type': 'object', 'properties': {'name': {'title': 'Name',"
    " 'type': 'string'}, 'arguments': {'title': 'Arguments', 'type': 'object'}}, 'required':"
    " ['name', 'arguments']}\n"
    "Each function call should be enclosed within <tool_call> </tool_call> XML tags.\n"
    "Example:\n<tool_call>\n{'name': <function-name>,'arguments': <args-dict>}\n</tool_call>"
)


def values(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> list[str]:
    """The values after the system entry."""
    entries = to_conversations(stored_messages(messages), [TEMP] if tools is None else tools)
    return [entry["value"] for entry in entries[1:]]


def tool_entry(content: str, arguments: str = "{}") -> str:
    """The tool entry of a conversation with one call that got `content`."""
    return values(user(), assistant("", call(arguments)), result(content), assistant("Done."))[2]


def content_of(tool_value: str) -> Any:
    (block,) = re.findall(r"<tool_response>\n(.*)\n</tool_response>", tool_value, re.DOTALL)
    return json.loads(block)["content"]


def arguments_of(gpt_value: str) -> Any:
    (block,) = re.findall(r"<tool_call>\n(.*)\n</tool_call>", gpt_value, re.DOTALL)
    return json.loads(block)["arguments"]


def read_entries(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The entries of a row after the system entry."""
    return [(entry["from"], entry["value"]) for entry in row["conversations"][1:]]


def rejected_row(record: dict[str, Any]) -> Rejected:
    with pytest.raises(Rejected) as caught:
        to_row(to_record(record))
    return caught.value


def rejection(*messages: dict[str, Any], tools: list[dict[str, Any]] | None = None) -> Rejected:
    with pytest.raises(Rejected) as caught:
        to_conversations(stored_messages(messages), [TEMP] if tools is None else tools)
    return caught.value


EXAMPLE = [
    {"role": "system", "content": "Secret instructions of the operator."},
    user("How much warmer is Lima than Oslo?"),
    assistant(
        "Checking both.",
        call('{"city":"Lima"}', id="c1"),
        call('{"city":"Oslo"}', id="c2"),
        reasoning="Two lookups, independent.",
    ),
    result('{"c": 24}', id="c1"),
    result("Error executing temp: station offline", id="c2", is_error=True),
    assistant("", call('{"city": "Oslo", "source": "\\u00e6ther"}', id="c3")),
    result('{"c":9.5}', id="c3"),
    assistant("<REASONING_SCRATCHPAD>24 - 9.5 = 14.5</REASONING_SCRATCHPAD>14.5 degrees."),
]
EXAMPLE_TOOLS = (
    r"[{\"name\": \"temp\", \"description\": \"Air temperature now\", \"parameters\":"
    r" {\"type\": \"object\", \"properties\": {\"city\": {\"type\": \"string\"}, \"source\":"
    r" {\"type\": \"string\"}}, \"required\": [\"city\"]}, \"required\": null}]"
)
EXAMPLE_ENTRIES = [
    r'{"from":"human","value":"How much warmer is Lima than Oslo?"}',
    r'{"from":"gpt","value":"<think>\nTwo lookups, independent.\n</think>\nChecking both.\n'
    r"<tool_call>\n{\"name\": \"temp\", \"arguments\": {\"city\": \"Lima\"}}\n</tool_call>\n"
    r'<tool_call>\n{\"name\": \"temp\", \"arguments\": {\"city\": \"Oslo\"}}\n</tool_call>"}',
    r'{"from":"tool","value":"<tool_response>\n{\"tool_call_id\": \"c1\", \"name\": \"temp\",'
    r" \"content\": {\"c\": 24}}\n</tool_response>\n<tool_response>\n{\"tool_call_id\": \"c2\","
    r" \"name\": \"temp\", \"content\": \"Error executing temp: station offline\"}\n"
    r'</tool_response>"}',
    r'{"from":"gpt","value":"<think>\n</think>\n<tool_call>\n{\"name\": \"temp\",'
    r" \"arguments\": {\"city\": \"Oslo\", \"source\": \"æther\"}}\n</tool_call>" + '"}',
    r'{"from":"tool","value":"<tool_response>\n{\"tool_call_id\": \"c3\", \"name\": \"temp\",'
    r' \"content\": {\"c\": 9.5}}\n</tool_response>"}',
    r'{"from":"gpt","value":"<think>\n24 - 9.5 = 14.5\n</think>\n14.5 degrees."}',
]


def line_of(conversations: list[dict[str, str]]) -> list[str]:
    return [dumps_row(entry).decode().rstrip("\n") for entry in conversations]


class TestWorkedExample:
    def test_passes_to_the_byte(self) -> None:
        system, *entries = line_of(to_conversations(stored_messages(EXAMPLE), [TEMP]))
        assert entries == EXAMPLE_ENTRIES
        assert rf"<tools>\n{EXAMPLE_TOOLS}\n</tools>\n" in system

    def test_the_line_has_its_keys_in_order_and_only_the_run_in_its_metadata(self) -> None:
        line = dumps_row(to_row(to_record(record_of(*EXAMPLE))))
        conversations = ",".join(line_of(to_conversations(stored_messages(EXAMPLE), [TEMP])))
        tools = json.dumps(json.dumps([TEMP]))
        metadata = json.dumps(
            '{"model":"m","model_returned":"m-2026","api":"openai_chat",'
            '"status":"completed","completion":"text","finish_reason":"stop",'
            '"prompt_id":"row-1","sample":0,"toolsets":["weather"],'
            '"tool_stats":[{"tool":"temp","count":3,'
            '"success":2,"failure":1}],"reasoning":{"assistant_turns":3,'
            '"with_reasoning":2},"usage":{"input_tokens":10,"output_tokens":null},'
            '"interrupted_calls":0,"columns":{"source":"mine"},'
            '"sandbox":null,"seed":7,"config_digest":"d1"}'
        )
        assert line.decode() == (
            f'{{"id":"row-1-0","conversations":[{conversations}],"tools":{tools},'
            '"completed":true,"partial":false,"api_calls":3,"num_turns":3,'
            f'"num_tool_calls":3,"has_reasoning":true,"metadata":{metadata}}}\n'
        )

    def test_stopped_after_one_turn_it_is_a_partial_row_of_the_same_first_entries(self) -> None:
        row = to_row(to_record(record_of(*EXAMPLE[:5], status="max_turns")))
        assert line_of(row["conversations"])[1:] == EXAMPLE_ENTRIES[:3]
        assert (row["completed"], row["partial"], row["api_calls"]) == (False, True, 1)
        assert json.loads(row["metadata"])["status"] == "max_turns"

    def test_failed_before_any_reply_it_is_not_a_row(self) -> None:
        with pytest.raises(Rejected) as caught:
            to_row(to_record(record_of(*EXAMPLE[:2], status="failed")))
        assert caught.value.reason == "no_reply"

    def test_the_record_is_not_changed(self) -> None:
        record = record_of(*EXAMPLE)
        before = json.dumps(record)
        to_row(to_record(record))
        assert json.dumps(record) == before


class TestSystemEntry:
    def test_is_the_published_preamble_around_the_tool_signatures(self) -> None:
        entry = to_conversations(stored_messages([user(), assistant("Hi.")]), [TEMP])[0]
        signature = TEMP["function"] | {"required": None}
        assert entry == {
            "from": "system",
            "value": PREAMBLE + json.dumps([signature]) + CALL_SCHEMA,
        }

    def test_without_tools_holds_an_empty_list(self) -> None:
        entry = to_conversations(stored_messages([user(), assistant("Hi.")]), [])[0]
        assert entry["value"] == f"{PREAMBLE}[]{CALL_SCHEMA}"
        assert to_row(to_record(record_of(user(), assistant("Hi."), tools=[])))["tools"] == "[]"

    def test_a_tool_without_description_or_parameters_gets_empty_ones(self) -> None:
        tools = [{"type": "function", "function": {"name": "now"}}]
        entry = to_conversations(stored_messages([user(), assistant("Hi.")]), tools)[0]
        signature = '[{"name": "now", "description": "", "parameters": {}, "required": null}]'
        assert entry["value"] == PREAMBLE + signature + CALL_SCHEMA

    @pytest.mark.parametrize("marker", [*MARKERS, "<tools>", "</tools>", "{tools}"])
    def test_a_tag_in_a_tool_description_is_not_structure(self, marker: str) -> None:
        described = {"name": "now", "description": f"é {marker}", "parameters": {}}
        tools = [{"type": "function", "function": described}]
        value = to_conversations(stored_messages([user(), assistant("Hi.")]), tools)[0]["value"]
        signatures = value.removeprefix(PREAMBLE).removesuffix(CALL_SCHEMA)
        assert "<" not in signatures
        assert json.loads(signatures)[0]["description"] == f"é {marker}"

    def test_never_shows_the_system_messages_of_the_record(self) -> None:
        assert b"Secret instructions" not in dumps_row(to_row(to_record(record_of(*EXAMPLE))))


class TestReasoning:
    def test_a_turn_without_reasoning_opens_with_an_empty_block(self) -> None:
        assert values(user(), assistant("Hi.")) == ["Go.", "<think>\n</think>\nHi."]
        assert values(user(), assistant("Hi.", reasoning=" \n"))[1] == "<think>\n</think>\nHi."

    def test_a_think_tag_in_an_argument_does_not_suppress_the_empty_block(self) -> None:
        value = values(user(), assistant("", call('{"q": "<think>"}')))[1]
        assert value.startswith("<think>\n</think>\n<tool_call>\n")

    @pytest.mark.parametrize("tag", ["think", "thinking", "reasoning", "REASONING_SCRATCHPAD"])
    @pytest.mark.parametrize("form", ["<{0}>Hm.</{0}>Hi.", "\n<{0}>\nHm.\n</{0}>\n\nHi."])
    def test_an_inline_block_is_written_in_newline_form(self, tag: str, form: str) -> None:
        assert values(user(), assistant(form.format(tag)))[1] == "<think>\nHm.\n</think>\nHi."

    def test_an_inline_block_before_calls_is_moved_too(self) -> None:
        value = values(user(), assistant("<think>Hm.</think>", call()))[1]
        assert value.startswith("<think>\nHm.\n</think>\n<tool_call>\n")

    def test_an_empty_inline_block_counts_as_no_reasoning(self) -> None:
        row = to_row(to_record(record_of(user(), assistant("<think>\n\n</think>\n\nHi."))))
        assert row["conversations"][2]["value"] == "<think>\n</think>\nHi."
        assert row["has_reasoning"] is False

    def test_reasoning_equal_to_the_inline_block_is_not_doubled(self) -> None:
        value = values(user(), assistant("<think>\nHm.\n</think>\nHi.", reasoning="Hm."))[1]
        assert value == "<think>\nHm.\n</think>\nHi."

    def test_reasoning_beside_another_inline_block_keeps_both(self) -> None:
        value = values(user(), assistant("<think>B</think>Hi.", reasoning="A"))[1]
        assert value == "<think>\nA\n\nB\n</think>\nHi."

    @pytest.mark.parametrize("tag", ["think", "thinking", "reasoning", "REASONING_SCRATCHPAD"])
    @pytest.mark.parametrize("before", ["", " \n", "<think>a</think>"])
    def test_an_unclosed_tag_is_rejected(self, tag: str, before: str) -> None:
        rejected = rejection(user(), assistant(f"{before}<{tag}>Hm. Hi."))
        assert rejected.reason == Reason.UNCLOSED_THINK

    def test_a_turn_of_reasoning_alone_is_rejected(self) -> None:
        assert rejection(user(), assistant(" ", reasoning="Hm.")).reason == "reasoning_only"
        assert rejection(user(), assistant("<think>Hm.</think>\n")).reason == "reasoning_only"

    @pytest.mark.parametrize("marker", [*MARKERS, "<REASONING_SCRATCHPAD>"])
    def test_a_tag_in_the_words_of_the_model_is_rejected(self, marker: str) -> None:
        for turn in (
            assistant(f"See {marker} here."),
            assistant(f"See {marker} here.", call()),
            assistant("Hi.", reasoning=f"See {marker} here."),
            assistant(f"<think>a</think>See {marker}"),
        ):
            assert rejection(user(), turn).reason == "marker_in_text"

    def test_a_tag_in_a_human_turn_is_kept_as_text(self) -> None:
        text = " What do <think> and </tool_call> mean? "
        assert values(user(text), assistant("Tags."))[0] == text


class TestWhiteSpace:
    def test_a_turn_with_calls_keeps_that_of_its_text(self) -> None:
        value = values(user(), assistant("  One.\n", call(), reasoning=" a \n"))[1]
        assert value == (
            "<think>\n a \n\n</think>\n  One.\n\n"
            '<tool_call>\n{"name": "temp", "arguments": {}}\n</tool_call>'
        )

    def test_a_turn_without_calls_keeps_that_at_its_end(self) -> None:
        assert values(user(), assistant("One. \n\n"))[1] == "<think>\n</think>\nOne. \n\n"

    def test_blank_text_before_calls_is_left_out(self) -> None:
        value = values(user(), assistant(" \n ", call()))[1]
        assert value.startswith("<think>\n</think>\n<tool_call>")


class TestArguments:
    @pytest.mark.parametrize("text", ["", " \n", "{}"])
    def test_blank_ones_are_an_empty_object(self, text: str) -> None:
        assert '"arguments": {}}' in values(user(), assistant("", call(text)))[1]

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ('{"city": "Li', "arguments_not_json"),
            ("city=Lima", "arguments_not_json"),
            ('{"x": NaN}', "arguments_not_json"),
            ('{"x": -Infinity}', "arguments_not_json"),
            ('{"x": 1e999}', "arguments_not_json"),
            ('{"x": 1, "x": 2}', "arguments_not_json"),
            ('{"x":' * 101 + "0" + "}" * 101, "arguments_not_json"),
            ('{"x":' * 100_000, "arguments_not_json"),
            ("[1]", "arguments_not_object"),
            ('"{}"', "arguments_not_object"),
            ("null", "arguments_not_object"),
            (json.dumps("[" * 200), "arguments_not_object"),
        ],
    )
    def test_all_else_but_an_object_is_rejected(self, text: str, reason: str) -> None:
        rejected = rejection(user(), assistant("a", call()), result("b"), assistant("", call(text)))
        assert rejected.reason == reason
        assert rejected.detail.startswith("turn 2, call 1 (temp): ")

    def test_keep_their_order_their_digits_and_non_ascii(self) -> None:
        text = '{"z":1.50,"a":[123456789012345678901234567890,1E5,0.1234567890123456789],"é":"ß"}'
        value = values(user(), assistant("", call(text)))[1]
        assert (
            '"arguments": {"z": 1.50, "a": [123456789012345678901234567890, 1E5,'
            ' 0.1234567890123456789], "é": "ß"}}' in value
        )

    @pytest.mark.parametrize("marker", MARKERS)
    def test_tags_inside_them_are_escaped(self, marker: str) -> None:
        text = json.dumps({marker: f"a\\{marker}", "x": 1.50})
        value = values(user(), assistant("", call(text)))[1]
        assert value.count("<") == 4
        assert marker.replace("<", "\\u003c") in value
        assert arguments_of(value) == json.loads(text)


SPELLINGS = {
    **{number: number for number in ("1", "0", "-0", "1e2", "100.0", "1.0", "1" * 23)},
    **{plain: plain for plain in ("null", "true", '"x"', '""', '"A"', r'"\n"', "{}", "[1e2]")},
    r'"\u0041"': '"A"',
    r'"\/"': '"/"',
    '["x",1]': '["x", 1]',
    '{"a":1}': '{"a": 1}',
}
"""JSON as it can be spelled, and as it is written."""


class TestResults:
    @pytest.mark.parametrize(
        ("text", "written"),
        [
            ('{"a":1}', '{"a": 1}'),
            (' \n{"a": [1,\n 2.5, null, true]}\n', '{"a": [1, 2.5, null, true]}'),
            ("[]", "[]"),
            (r'["\u00e9\/", "\\u0041\\", "\\\"\u003A"]', r'["é/", "\\u0041\\", "\\\":"]'),
            (r'["\u001F\n\u000a",{"\u0022":"\\"}]', r'["\u001f\n\n", {"\"": "\\"}]'),
            (
                '{"n":12345678901234567890123,"p":-1.50}',
                '{"n": 12345678901234567890123, "p": -1.50}',
            ),
            ('{"tiny":1.5e-12,"big":1E+2}', '{"tiny": 1.5e-12, "big": 1E+2}'),
            (r'["a , b : \" c:1,2"]', r'["a , b : \" c:1,2"]'),
        ],
    )
    def test_an_object_or_list_becomes_that_value(self, text: str, written: str) -> None:
        assert f'"content": {written}}}\n</tool_response>' in tool_entry(text)

    @pytest.mark.parametrize(
        "text",
        [
            "42",
            '"x"',
            "null",
            "true",
            "",
            "plain",
            "{not json}",
            "[1, 2",
            '{"a": 1} trailing',
            "[NaN]",
            '{"a": Infinity}',
            "[1e999]",
            '{"a": 1, "a": 2}',
            "[" * 101 + "]" * 101,
            "[" * 100_000,
            "[" + "9" * 5000 + "]",
            "\ufeff{}",
            "\u00a0{}",
            "a\u2028b\u0085c\x00d",
        ],
    )
    def test_any_other_text_stays_that_string(self, text: str) -> None:
        assert content_of(tool_entry(text)) == text

    @settings(max_examples=10 * settings().max_examples)
    @given(
        st.lists(
            st.tuples(
                st.sampled_from([("a", "a"), ("b", "b"), (r"\u0061", "a")]),
                st.sampled_from([":", ": ", " : "]),
                st.sampled_from(list(SPELLINGS.items())),
            ),
            min_size=1,
            max_size=3,
        ),
        st.sampled_from([",", ", "]),
    )
    def test_no_spelling_of_an_object_is_taken_for_another(
        self, members: list[tuple[tuple[str, str], str, tuple[str, str]]], comma: str
    ) -> None:
        """There is a short way for texts that are written back to the letter."""
        spelled = comma.join(f'"{key}"{colon}{value}' for (key, _), colon, (value, _) in members)
        written = ", ".join(f'"{key}": {value}' for (_, key), _, (_, value) in members)
        text = f"{{{spelled}}}"
        is_strict = len({key for (_, key), _, _ in members}) == len(members)
        assert content_json(text) == (f"{{{written}}}" if is_strict else json.dumps(text))

    def test_nesting_of_a_hundred_levels_is_still_a_value(self) -> None:
        text = '{"a": [' * 50 + "]}" * 50
        assert content_of(tool_entry(text)) == json.loads(text)
        wide = json.dumps([[]] * 500)
        assert content_of(tool_entry(wide)) == json.loads(wide)

    @pytest.mark.parametrize("marker", MARKERS)
    @pytest.mark.parametrize("form", ["{}", '{{"<": "{}"}}'])
    def test_tags_inside_them_are_escaped(self, marker: str, form: str) -> None:
        text = form.format(marker)
        value = tool_entry(text)
        assert marker.replace("<", "\\u003c") in value
        assert value.count(marker) == (marker.strip("</>") == "tool_response")
        assert content_of(value) == (json.loads(text) if text.startswith("{") else text)

    def test_stand_in_the_order_of_the_calls_under_the_names_of_the_calls(self) -> None:
        tools = [{"type": "function", "function": {"name": name}} for name in "xy"]
        tool_value = values(
            user(),
            assistant("", call(id="1", name="y"), call(id="2", name="x")),
            result("two", id="2"),
            result("one", id="1"),
            assistant("Done."),
            tools=tools,
        )[2]
        assert tool_value == (
            '<tool_response>\n{"tool_call_id": "1", "name": "y", "content": "one"}\n'
            "</tool_response>\n<tool_response>\n"
            '{"tool_call_id": "2", "name": "x", "content": "two"}\n</tool_response>'
        )

    def test_a_turn_that_broke_off_before_its_results_has_no_tool_entry(self) -> None:
        messages = user(), assistant("", call())
        assert len(values(*messages)) == 2
        row = to_row(to_record(record_of(*messages, status="length")))
        assert row["conversations"][-1]["from"] == "gpt"
        assert row["num_tool_calls"] == 1
        (stats,) = json.loads(row["metadata"])["tool_stats"]
        assert stats == {"tool": "temp", "count": 1, "success": 0, "failure": 0}

    @given(st.text() | st.text('<>/{}[]":, \n1.e-thinkotl_resp', max_size=60))
    def test_no_text_of_a_tool_creates_structure(self, text: str) -> None:
        value = tool_entry(text)
        for marker in MARKERS:
            expected = marker in ("<tool_response>", "</tool_response>")
            assert value.count(marker) == expected
        content = content_of(value)
        assert content == text or content == json.loads(text)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | FINITE | st.text(),
            lambda children: st.lists(children) | st.dictionaries(st.text(), children),
        ),
        st.sampled_from([None, 1]),
    )
    def test_any_json_value_of_a_tool_survives(self, value: Any, indent: int | None) -> None:
        for ensure_ascii in (True, False):
            text = json.dumps([value], ensure_ascii=ensure_ascii, indent=indent)
            assert repr(content_of(tool_entry(text))) == repr([value])
            written = json.dumps([value], ensure_ascii=False)
            for marker in (*MARKERS, "<tools>", "</tools>"):
                written = written.replace(marker, f"\\u003c{marker[1:]}")
            assert f'"content": {written}}}' in tool_entry(text)

    @given(st.permutations(range(5)))
    def test_do_not_depend_on_the_order_in_which_they_were_stored(self, order: list[int]) -> None:
        turn = assistant("", *(call(id=str(n)) for n in range(5)))
        stored = [result(f"r{n}", id=str(n)) for n in order]
        tool_value = values(user(), turn, *stored, assistant("Done."))[2]
        assert re.findall(r'"r\d"', tool_value) == [f'"r{n}"' for n in range(5)]


class TestConversationRules:
    @pytest.mark.parametrize(
        "messages",
        [
            [user(), user(), assistant("Hi.")],
            [assistant("Hi.")],
            [assistant("Hi."), assistant("Hi."), user()],
            [user(), {"role": "system", "content": "s"}, assistant("Hi.")],
            [user(), assistant("", call()), result("r"), user(), assistant("Hi.")],
        ],
    )
    def test_roles_out_of_order_are_rejected(self, messages: list[dict[str, Any]]) -> None:
        assert rejection(*messages).reason == "roles_out_of_order"

    def test_several_human_turns_make_one_row(self) -> None:
        entries = to_conversations(
            stored_messages(
                [user("A"), assistant("B"), user("C"), assistant("", call()), result("r")]
            ),
            [TEMP],
        )
        assert [entry["from"] for entry in entries] == [
            "system",
            "human",
            "gpt",
            "human",
            "gpt",
            "tool",
        ]

    def test_an_invented_tool_is_rejected(self) -> None:
        rejected = rejection(user(), assistant("", call(), call(name="tmep", id="c2")))
        assert rejected.reason == "unknown_tool"
        assert rejected.detail == "turn 1, call 2: tool 'tmep' was not on offer"

    def test_a_call_without_result_is_rejected_where_the_conversation_continues(self) -> None:
        two = assistant("", call(id="c1"), call(id="c2"))
        assert rejection(user(), two, result("r"), assistant("Hi.")).reason == "unanswered_call"
        assert rejection(user(), two, user()).reason == "unanswered_call"

    def test_a_result_that_answers_no_open_call_is_rejected(self) -> None:
        turn = assistant("", call())
        assert rejection(user(), turn, result("r", id="c9")).reason == "stray_result"
        assert rejection(user(), turn, result("r"), result("r")).reason == "stray_result"
        assert rejection(user(), assistant("Hi."), result("r")).reason == "stray_result"

    def test_equal_ids_are_rejected_within_a_turn_and_distinct_across_turns(self) -> None:
        assert rejection(user(), assistant("", call(), call())).reason == "repeated_call_id"
        turn = assistant("", call())
        entries = values(user(), turn, result("a"), turn, result("b"), assistant("Done."))
        assert (content_of(entries[2]), content_of(entries[4])) == ("a", "b")

    @pytest.mark.parametrize("messages", [[user(" \n"), assistant("Hi.")], [user(), assistant()]])
    def test_an_empty_message_is_rejected(self, messages: Any) -> None:
        assert rejection(*messages).reason == "empty_value"

    def test_a_conversation_without_assistant_is_rejected(self) -> None:
        assert rejection(user()).reason == "no_reply"
        assert rejection().reason == "no_reply"

    def test_a_rejection_survives_a_process_border(self) -> None:
        copied = pickle.loads(pickle.dumps(rejection(user())))
        assert isinstance(copied, Rejected)
        assert str(copied) == "no_reply: the conversation holds no assistant turn"


class TestFinalAnswer:
    def test_the_only_call_of_the_last_turn_becomes_its_text(self) -> None:
        """The turn is think block, its own text, a blank line and the answer, without a result."""
        record = ended_by(assistant("Both known.\n", final(" 14.5 \n"), reasoning="Hm."))
        row = to_row(to_record(record))
        assert read_entries(row)[-2:] == [
            (
                "tool",
                '<tool_response>\n{"tool_call_id": "c1", "name": "temp", "content": "r"}\n'
                "</tool_response>",
            ),
            ("gpt", "<think>\nHm.\n</think>\nBoth known.\n\n14.5"),
        ]
        assert (row["completed"], row["partial"]) == (True, False)
        assert (row["num_turns"], row["num_tool_calls"], row["has_reasoning"]) == (2, 1, True)
        metadata = json.loads(row["metadata"])
        assert metadata["completion"] == "final_answer"
        assert metadata["reasoning"] == {"assistant_turns": 2, "with_reasoning": 1}
        assert [stats["tool"] for stats in metadata["tool_stats"]] == ["temp"]

    def test_without_text_or_reasoning_the_answer_follows_an_empty_block(self) -> None:
        row = to_row(to_record(ended_by(assistant("", final("14.5")))))
        assert read_entries(row)[-1] == ("gpt", "<think>\n</think>\n14.5")
        assert row["has_reasoning"] is False

    @pytest.mark.parametrize("order", [1, -1])
    def test_other_calls_of_the_turn_keep_their_results_and_the_answer_follows(
        self, order: int
    ) -> None:
        """They were answered before the run ended, wherever in the turn they stood."""
        calls = [call(id="c2"), final("Done: é")][::order]
        results = [result("two", id="c2"), result("ok", id="f")][::order]
        row = to_row(
            to_record(
                record_of(
                    user(), assistant("Last.", *calls, reasoning="A"), *results, tools=OFFERED
                )
            )
        )
        assert read_entries(row) == [
            ("human", "Go."),
            (
                "gpt",
                '<think>\nA\n</think>\nLast.\n<tool_call>\n{"name": "temp", "arguments": {}}'
                "\n</tool_call>",
            ),
            (
                "tool",
                '<tool_response>\n{"tool_call_id": "c2", "name": "temp", "content": "two"}\n'
                "</tool_response>",
            ),
            ("gpt", "<think>\n</think>\nDone: é"),
        ]
        assert (row["num_turns"], row["num_tool_calls"]) == (1, 1)
        assert json.loads(row["metadata"])["reasoning"] == {
            "assistant_turns": 2,
            "with_reasoning": 1,
        }

    def test_the_reserved_tools_are_not_on_offer_in_a_row_that_calls_neither(self) -> None:
        """Neither in the preamble nor in the column, so all rows offer the same tools."""
        by_call = to_row(to_record(ended_by(assistant("", final("14.5")))))
        by_text = to_row(to_record(ended_by(assistant("14.5"))))
        plain = to_row(to_record(ended_by(assistant("14.5"), tools=[TEMP])))
        for row in (by_call, by_text):
            assert row["conversations"] == plain["conversations"]
            assert json.loads(row["tools"]) == [TEMP]
        assert json.loads(by_text["metadata"])["completion"] == "text"

    def test_an_earlier_call_stays_and_keeps_both_tools_on_offer(self) -> None:
        """An answer that was sent back is part of what happened."""
        told = {**result("ok\n\nThat is wrong.", id="f"), "notes": ["expected"]}
        refused = [assistant("", final("13")), told]
        row = to_row(
            to_record(
                record_of(
                    user(),
                    *refused,
                    assistant("", final("14")),
                    result("ok", id="f"),
                    tools=OFFERED,
                )
            )
        )
        assert [kind for kind, _ in read_entries(row)] == ["human", "gpt", "tool", "gpt"]
        assert '{"name": "final_answer", "arguments": {"answer": "13"}}' in read_entries(row)[1][1]
        assert read_entries(row)[-1] == ("gpt", "<think>\n</think>\n14")
        assert json.loads(row["tools"]) == OFFERED
        assert row["conversations"][0]["value"].count('"name": "cannot_complete"') == 1

    @pytest.mark.parametrize(("answer", "is_error"), [(" ", False), ("13", True)])
    def test_of_several_the_first_that_was_accepted_is_the_answer(
        self, answer: str, is_error: bool
    ) -> None:
        """The runtime took that one, so the other is a call like any other."""
        turn = assistant("", final(answer, id="f1"), final("14", id="f2"), final("15", id="f3"))
        results = [result("r", id="f1", is_error=is_error), result("ok", id="f2")]
        results.append(result("ok", id="f3"))
        row = to_row(to_record(record_of(user(), turn, *results, tools=OFFERED)))
        assert [kind for kind, _ in read_entries(row)] == ["human", "gpt", "tool", "gpt"]
        assert read_entries(row)[-1][1].endswith("\n14")
        assert json.loads(row["tools"]) == OFFERED

    def test_giving_up_is_a_partial_row_with_its_call(self) -> None:
        gives_up = call('{"reason": "no network"}', id="f", name="cannot_complete")
        record = ended_by(assistant("", gives_up), status="cannot_complete")
        row = to_row(to_record(record))
        assert (row["completed"], row["partial"]) == (False, True)
        assert [kind for kind, _ in read_entries(row)] == ["human", "gpt", "tool", "gpt", "tool"]
        assert '"arguments": {"reason": "no network"}' in read_entries(row)[-2][1]
        assert json.loads(row["tools"]) == OFFERED
        assert "completion" not in json.loads(row["metadata"])

    def test_a_conversation_that_is_not_completed_keeps_the_call(self) -> None:
        """The answer did not end it."""
        row = to_row(to_record(ended_by(assistant("", final("14")), status="budget")))
        assert read_entries(row)[-1][0] == "tool"
        assert row["num_tool_calls"] == 2

    @pytest.mark.parametrize(
        ("arguments", "reason"),
        [
            ('{"answer": "14', "arguments_not_json"),
            ('{"answer": "1", "answer": "2"}', "arguments_not_json"),
            ('["14"]', "arguments_not_object"),
            ("", "empty_value"),
            ('{"text": "14"}', "empty_value"),
            ('{"answer": " \\n"}', "empty_value"),
            ('{"answer": 14}', "not_text"),
            ('{"answer": null}', "not_text"),
            ('{"answer": "a </tool_call> b"}', "marker_in_text"),
        ],
    )
    @pytest.mark.parametrize("is_error", [False, True])
    def test_arguments_without_an_answer_are_rejected(
        self, arguments: str, reason: str, is_error: bool
    ) -> None:
        """Never an empty or a made-up answer."""
        turn = assistant("Text.", call(arguments, id="f", name="final_answer"))
        record = record_of(user(), turn, result("r", id="f", is_error=is_error), tools=OFFERED)
        if reason == "marker_in_text" and is_error:
            reason = "unfinished"
        assert rejected_row(record).reason == reason

    def test_an_answer_that_was_refused_or_never_answered_does_not_end_it(self) -> None:
        """The runtime's own flag says whether the answer was taken."""
        turn = assistant("", final("14"), call(id="c2"))
        refused = record_of(
            user(), turn, result("no", id="f", is_error=True), result("r", id="c2"), tools=OFFERED
        )
        assert rejected_row(refused).reason == "unfinished"
        unanswered = record_of(user(), turn, result("ok", id="f"), tools=OFFERED)
        assert rejected_row(unanswered).reason == "unfinished"
        with pytest.raises(Rejected, match="the last message is a tool's"):
            check_finished(stored_messages(unanswered["messages"]))
        check_finished(stored_messages([*unanswered["messages"], result("r", id="c2")]))

    def test_a_final_answer_that_was_not_offered_is_an_invented_tool(self) -> None:
        assert rejected_row(ended_by(assistant("", final("1")), tools=[TEMP])).reason == (
            "unknown_tool"
        )

    def test_lone_surrogates_of_an_answer_are_replaced(self) -> None:
        turn = assistant("", call('{"answer": "a\\udead"}', id="f", name="final_answer"))
        line = json.loads(dumps_row(to_row(to_record(ended_by(turn)))))
        assert read_entries(line)[-1] == ("gpt", "<think>\n</think>\na\ufffd")

    def test_the_answer_has_its_references_replaced(self) -> None:
        """References in it stand for what they name."""
        taken = result("ok", id="f") | {"details": {"text": "All 14.5 of it."}}
        turn = assistant("", final("[[c1]] of it."))
        row = to_row(to_record(record_of(user(), turn, taken, tools=OFFERED)))
        assert read_entries(row)[-1] == ("gpt", "<think>\n</think>\nAll 14.5 of it.")


class TestPausedTurn:
    def test_is_one_gpt_entry_with_its_continuation(self) -> None:
        """Reasoning and text of both, a blank line between, and the calls of the second."""
        messages = [
            user(),
            assistant("One.\n", reasoning="A"),
            assistant("<think>B</think>Two.", call()),
            result("r"),
            assistant("Done."),
        ]
        row = to_row(to_record(record_of(*messages)))
        assert [kind for kind, _ in read_entries(row)] == ["human", "gpt", "tool", "gpt"]
        assert read_entries(row)[1][1] == (
            "<think>\nA\n\nB\n</think>\nOne.\n\nTwo.\n"
            '<tool_call>\n{"name": "temp", "arguments": {}}\n</tool_call>'
        )
        assert (row["num_turns"], row["api_calls"]) == (3, 3)
        metadata = json.loads(row["metadata"])
        assert metadata["reasoning"] == {"assistant_turns": 2, "with_reasoning": 1}

    @pytest.mark.parametrize(
        ("parts", "value"),
        [
            ([assistant(), assistant("B")], "<think>\n</think>\nB"),
            ([assistant("A"), assistant(" \n")], "<think>\n</think>\nA"),
            ([assistant("", reasoning="R"), assistant("B")], "<think>\nR\n</think>\nB"),
            ([assistant("A"), assistant("B"), assistant("C")], "<think>\n</think>\nA\n\nB\n\nC"),
        ],
    )
    def test_leaves_out_what_is_blank(self, parts: list[dict[str, Any]], value: str) -> None:
        assert values(user(), *parts)[1:] == [value]

    def test_of_blank_parts_alone_is_rejected(self) -> None:
        assert rejection(user(), assistant(), assistant()).reason == "empty_value"
        assert rejection(user(), assistant(reasoning="A"), assistant()).reason == "reasoning_only"

    def test_may_end_in_a_final_answer(self) -> None:
        row = to_row(
            to_record(
                record_of(
                    user(),
                    assistant("One."),
                    assistant("Two.", final("14")),
                    result("ok", id="f"),
                    tools=OFFERED,
                )
            )
        )
        assert read_entries(row)[1:] == [("gpt", "<think>\n</think>\nOne.\n\nTwo.\n\n14")]

    def test_a_turn_with_calls_is_not_gone_on_with_before_their_results(self) -> None:
        two = [assistant("", call()), assistant("Hi.")]
        assert rejection(user(), *two).reason == "unanswered_call"

    def test_counts_as_one_turn_in_what_a_rejection_says(self) -> None:
        bad = call("{")
        rejected = rejection(user(), assistant("a"), assistant("b", bad), result("r"))
        assert rejected.detail.startswith("turn 1, call 1 (temp): ")
        unknown = rejection(user(), assistant("a"), assistant("b", call(name="x")))
        assert unknown.detail.startswith("turn 1, call 1: ")

    def test_that_the_prompt_began_counts_once(self) -> None:
        record = record_of(user(), assistant("A"), user(), assistant("B"), assistant("C"))
        record["turns"] = record["turns"][2:]
        metadata = json.loads(to_row(to_record(record))["metadata"])
        assert metadata["reasoning"] == {"assistant_turns": 1, "with_reasoning": 0}


class TestNotes:
    def test_stand_where_the_model_saw_them_and_are_counted_by_rule(self) -> None:
        """The runtime's words are part of the content already."""
        noted = {**result("r\n\nNote: again."), "notes": ["repeat", "plan"]}
        told = {**user("That is wrong."), "notes": ["repeat"]}
        row = to_row(
            to_record(
                record_of(
                    user(), assistant("", call()), noted, assistant("A"), told, assistant("B")
                )
            )
        )
        assert content_of(read_entries(row)[2][1]) == "r\n\nNote: again."
        assert read_entries(row)[4] == ("human", "That is wrong.")
        assert json.loads(row["metadata"])["notes"] == {"plan": 1, "repeat": 2}

    def test_those_of_a_parent_are_not_counted_again(self) -> None:
        noted = {**result("r"), "notes": ["repeat"]}
        record = record_of(user(), assistant("", call()), noted, assistant("A"))
        record["turns"][0]["inherited"] = True
        row = to_row(to_record(record))
        assert row["num_turns"] == 1
        assert "notes" not in json.loads(row["metadata"])

    def test_repairs_are_counted_over_all_messages(self) -> None:
        """The row says that names were repaired."""
        repairs = [{"call": "c1", "name": "tmep"}, {"call": "c2", "name": "tepm"}]
        turn = {**assistant("", call(), call(id="c2")), "repairs": repairs}
        results = [result("r"), result("r", id="c2")]
        last = {**assistant("", final("14")), "repairs": [{"call": "f", "name": "finalanswer"}]}
        row = to_row(
            to_record(record_of(user(), turn, *results, last, result("ok", id="f"), tools=OFFERED))
        )
        assert json.loads(row["metadata"])["repairs"] == 3

    def test_a_row_without_any_does_not_speak_of_them(self) -> None:
        metadata = json.loads(
            to_row(to_record(record_of(*EXAMPLE, status_reason=None)))["metadata"]
        )
        assert metadata.keys().isdisjoint({"notes", "repairs", "status_reason"})


class TestRow:
    def test_unknown_keys_of_a_record_are_not_read(self) -> None:
        """A record may hold more than a row shows."""
        record = record_of(*EXAMPLE)
        more = record | {"subagents": [{"messages": None}], "openings": 3, "more": None}
        assert dumps_row(to_row(to_record(more))) == dumps_row(to_row(to_record(record)))

    def test_the_reason_of_an_ending_is_in_the_metadata(self) -> None:
        record = record_of(*EXAMPLE[:5], status="errors", status_reason="5 errors")
        assert json.loads(to_row(to_record(record))["metadata"])["status_reason"] == "5 errors"

    @pytest.mark.parametrize(
        "messages",
        [
            [user(), assistant("", call())],
            [user(), assistant("", call()), result("r")],
            [user(), assistant("Hi."), user()],
        ],
    )
    def test_a_completed_record_must_end_with_an_answer(self, messages: Any) -> None:
        with pytest.raises(Rejected) as caught:
            to_row(to_record(record_of(*messages)))
        assert caught.value.reason == "unfinished"
        assert to_row(to_record(record_of(*messages, status="budget")))["partial"] is True

    def test_a_record_without_replies_is_rejected_with_any_opening(self) -> None:
        record = record_of(user(), assistant("Hi."), user(), status="failed", turns=[])
        with pytest.raises(Rejected) as caught:
            to_row(to_record(record))
        assert caught.value.reason == "no_reply"

    def test_counts_cover_the_replies_and_not_the_opening(self) -> None:
        record = record_of(
            user(),
            assistant("", call(), reasoning="Hm."),
            result("r"),
            assistant("A."),
            user(),
            assistant("", call(id="a"), call(id="b", name="zoo"), call(id="c", name="bar")),
            result("r", id="a"),
            result("r", id="b", is_error=True),
            result("r", id="c"),
            assistant("B."),
            tools=[TEMP, *({"function": {"name": name}} for name in ("zoo", "bar"))],
        )
        record["turns"] = record["turns"][2:]
        record["api_calls"] = 2
        row = to_row(to_record(record))
        assert (row["api_calls"], row["num_turns"], row["num_tool_calls"]) == (2, 2, 3)
        assert row["has_reasoning"] is False
        metadata = json.loads(row["metadata"])
        assert metadata["reasoning"] == {"assistant_turns": 2, "with_reasoning": 0}
        assert metadata["tool_stats"] == [
            {"tool": "bar", "count": 1, "success": 1, "failure": 0},
            {"tool": "temp", "count": 1, "success": 1, "failure": 0},
            {"tool": "zoo", "count": 1, "success": 0, "failure": 1},
        ]

    def test_unknown_usage_stays_null(self) -> None:
        row = to_row(to_record(record_of(user(), assistant("Hi."), usage=None)))
        assert json.loads(row["metadata"])["usage"] is None

    def test_times_of_the_record_leave_no_trace(self) -> None:
        early = record_of(*EXAMPLE)
        late = record_of(*EXAMPLE, started_at=9.0, attempt=3)
        late["turns"] = [{**turn, "started_at": 99.0, "duration_s": 9.0} for turn in late["turns"]]
        assert dumps_row(to_row(to_record(early))) == dumps_row(to_row(to_record(late)))

    def test_setup_and_check_are_not_exported_as_columns(self) -> None:
        """What a check looks for is not to be learnt; without one they are columns like others."""
        row = {"prompt": "x", "setup": "make", "check": "grep 42 a.txt", "source": "mine"}
        judged = record_of(user(), assistant("Hi."), row=row, check={"passed": True})
        assert json.loads(to_row(to_record(judged))["metadata"])["columns"] == {"source": "mine"}
        plain = record_of(user(), assistant("Hi."), row=row)
        assert "check" in json.loads(to_row(to_record(plain))["metadata"])["columns"]


class TestLine:
    def test_lone_surrogates_become_replacement_characters(self) -> None:
        """A record cannot hold them; a conversation that was never stored can."""
        row = json.loads(dumps_row({"a": "a\ud800b\udc00", "b": "é😀\u2028\x7f"}))
        assert row == {"a": "a\ufffdb\ufffd", "b": "é😀\u2028\x7f"}

    def test_escaped_surrogates_of_a_tool_are_replaced_inside_its_value(self) -> None:
        turn = assistant("", call('{"city": "\\udead"}'))
        messages = user(), turn, result('["\\ud800", "\\ud83d\\ude00"]'), assistant("Done.")
        row = json.loads(dumps_row(to_row(to_record(record_of(*messages)))))
        assert arguments_of(row["conversations"][2]["value"]) == {"city": "\ufffd"}
        assert content_of(row["conversations"][3]["value"]) == ["\ufffd", "😀"]

    def test_integers_beyond_64_bits_keep_their_digits(self) -> None:
        assert dumps_row({"x": [10**30, "é"]}) == '{"x":[%d,"é"]}\n'.encode() % 10**30

    @given(
        st.text(min_size=1),
        st.text(st.characters(exclude_characters="<"), min_size=1),
        st.text(),
    )
    def test_is_one_line_that_reads_back(self, human: str, said: str, returned: str) -> None:
        record = record_of(
            user(f"h{human}"),
            assistant(f"a{said}", call(json.dumps({"city": human})), reasoning=said),
            result(returned),
            assistant(f"a{said}"),
        )
        row = to_row(to_record(record))
        line = dumps_row(row)
        assert line.endswith(b"\n")
        assert line.count(b"\n") == 1
        read = json.loads(line)
        assert list(read) == list(row)
        assert read["conversations"][1]["value"] == f"h{human}"
        assert json.loads(read["tools"]) == [TEMP]
        assert dumps_row(to_row(to_record(json.loads(json.dumps(record))))) == line
