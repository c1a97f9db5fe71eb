"""Integers of any size keep their digits, from the model to the tool, the record and the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent import flat
from agent.flat import extend_session, init_session
from agent.loop.tools import resolve_references
from agent.models.dialects.anthropic_messages import MessagesAssembly, read_reply
from agent.state.tally import Tally
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from batch_trajectories.export.conversation.row_json import read_arguments
from batch_trajectories.records.record_types import StoredCall
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, make_run, rows
from tests.helpers.running import lines, run, write_rows
from toolsets.catalog.custom import make_toolsets

LONG = 123456789012345678901234
SMALL = -9223372036854775809
ARGUMENTS = f'{{"n": {LONG}, "below": [{SMALL}, 1.5]}}'

TOOL = '''
def double(n: int, below: list[float | int] = []) -> dict:
    """Double a number.

    Args:
        n: The number.
        below: More numbers.
    """
    return {"n": n, "double": 2 * n, "below": below}
'''

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.integers(min_value=10**18, max_value=10**30)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=8,
)


@given(json_values)
def test_written_json_reads_back_equal(value: Any) -> None:
    assert exact_json.loads(exact_json.dumps(value)) == value
    assert exact_json.loads(json.dumps(value)) == value


@given(
    st.text('0123456789 a:."_', max_size=90) | st.from_regex(r"[a-z]{0,30}[0-9]{15,25}[a-z]{0,30}")
)
def test_long_digits_are_found_wherever_they_stand(text: str) -> None:
    longest = re.search('(?<![0-9A-Za-z_."])[0-9]{19}', text)
    assert exact_json.has_long_digits(text) == bool(longest)


def test_digits_of_a_fraction_or_a_name_are_not_an_integer() -> None:
    """Times of quick tools and prices have such fractions, and reading slowly takes ten times."""
    text = '{"s": 0.0001239776611328125, "id": "call_1234567890123456789", "n": %s}'
    assert not exact_json.has_long_digits(text % 1 * 20)
    assert exact_json.has_long_digits(text % 1 * 20 + text % -LONG)


def test_many_short_numbers_do_not_hide_a_long_one() -> None:
    text = "1234567890123456 " * 50
    assert not exact_json.has_long_digits(text)
    assert exact_json.has_long_digits(text + str(LONG))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"n": 1' + "0" * 5000 + "}",
        f'{{"n": 1e400, "m": {LONG}}}',
        f'["\\ud83d", {LONG}]',
        f"[NaN, {LONG}]",
        "[" * 5000 + str(LONG) + "]" * 5000,
    ],
)
def test_non_strict_json_is_refused(text: str) -> None:
    with pytest.raises(orjson.JSONDecodeError):
        exact_json.loads(text)


def test_integers_longer_than_a_double_are_read() -> None:
    assert exact_json.loads("1" + "0" * 400) == 10**400


def test_values_that_json_cannot_hold_raise_a_type_error() -> None:
    for value in (10**5000, {"n": LONG, "x": object()}, {"n": LONG, "x": "\ud83d"}):
        with pytest.raises(TypeError):
            exact_json.dumps(value)


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "numbers_of.py").write_text(f"{TOOL}\nALL = [double]\n")
    return tmp_path


def replies(path: str, turn: int) -> JSON:
    """A call of `double`, then an answer, in the dialect of a path."""
    if path.endswith("/chat/completions"):
        function = {"name": "double", "arguments": ARGUMENTS}
        message: JSON = {"role": "assistant", "content": "done"}
        if not turn:
            message |= {"tool_calls": [{"id": "c1", "type": "function", "function": function}]}
        end = "stop" if turn else "tool_calls"
        return {"id": "r", "model": "m", "choices": [{"message": message, "finish_reason": end}]}
    if path.endswith("/responses"):
        part = {"type": "output_text", "text": "done"}
        item: JSON = {"type": "message", "role": "assistant", "content": [part]}
        if not turn:
            item = {"type": "function_call", "call_id": "c1", "name": "double"}
            item["arguments"] = ARGUMENTS
        return {"id": "r", "model": "m", "status": "completed", "output": [item]}
    block: JSON = {"type": "text", "text": "done"}
    if not turn:
        block = {"type": "tool_use", "id": "c1", "name": "double", "input": json.loads(ARGUMENTS)}
    content = [{"type": "thinking", "thinking": "hm", "signature": "s"}, block]
    end = "end_turn" if turn else "tool_use"
    return {"id": "r", "model": "m", "content": content, "stop_reason": end}


@pytest.mark.parametrize(
    "api",
    [
        "openai_chat",
        pytest.param("openai_responses", marks=pytest.mark.slow),
        pytest.param("anthropic_messages", marks=pytest.mark.slow),
    ],
)
def test_a_run_keeps_every_digit(module: Path, api: str) -> None:
    """The tool gets the integer, and record, request and row hold the digits of the model."""
    columns = {"id": "a", "prompt": "x", "expected": LONG}
    write_rows(module / "p.jsonl", columns)
    requests: list[JSON] = []

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        requests.append(body)
        return 200, replies(path, len(requests) - 1)

    with answering(answer) as (root, _):
        done = run(
            module,
            run_name="r",
            dataset_file="p.jsonl",
            model="m",
            api=api,
            base_url=root if api == "anthropic_messages" else f"{root}/v1",
            key_env="none",
            enabled_toolsets="numbers_of",
            tools="numbers_of:ALL",
            num_workers=1,
        )
    assert done.returncode == 0, done.stderr
    told = {"n": LONG, "double": 2 * LONG, "below": [SMALL, 1.5]}
    record = lines(module / "trajectories" / "r" / "records.jsonl")[0]
    of_call, of_tool = record["messages"][1:3]
    assert json.loads(of_call["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    assert json.loads(of_tool["content"]) == told
    assert record["row"] == columns
    assert str(LONG) in json.dumps(requests[1]), "the model is shown what it wrote"
    assert '"n": 1.2345' not in json.dumps(requests[1])
    row = lines(module / "trajectories" / "r.jsonl")[0]
    said = [turn["value"] for turn in row["conversations"]]
    assert f'"n": {LONG}, "below": [{SMALL}, 1.5]' in said[2]
    assert f'"n": {LONG}, "double": {2 * LONG}' in said[3]
    assert json.loads(row["metadata"])["columns"]["expected"] == LONG
    again = run(module, "verify", "trajectories/r")
    assert again.returncode == 0, again.stdout + again.stderr


def test_an_anthropic_stream_keeps_every_digit() -> None:
    assembly = MessagesAssembly(lambda _: None)
    parts: tuple[JSON, ...] = (
        {"type": "message_start", "message": {"id": "m", "usage": {}}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "tool_use", "id": "c", "name": "f", "input": {}},
        },
        *(
            {
                "type": "content_block_delta",
                "index": 0,
                "delta": {"type": "input_json_delta", "partial_json": piece},
            }
            for piece in (ARGUMENTS[:9], ARGUMENTS[9:])
        ),
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
    )
    for part in parts:
        assembly.add(part)
    message = read_reply(assembly.finish()).message
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)


@pytest.mark.parametrize(
    ("written", "kept"),
    [("1e400", "1e400"), ("-Infinity", "-Infinity"), ("1" + "0" * 5000, "1" + "0" * 5000)],
)
def test_a_number_that_nothing_holds_is_kept_as_text(written: str, kept: str) -> None:
    """What was paid for is neither asked for again nor made null."""
    block = '{"type": "tool_use", "id": "c", "name": "f", "input": {"n": %s}}' % written  # noqa: UP031
    body = '{"content": [%s], "stop_reason": "tool_use"}' % block  # noqa: UP031
    message = read_reply(body.encode()).message
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"n": kept}


def test_calls_that_differ_in_one_digit_are_different() -> None:
    """As floats the two are equal, and the conversation would end for repeating itself."""
    tally = Tally()
    answer: Any = result("the same")
    for n in (LONG, LONG + 1):
        tally.count_turn([call(f'{{"n": {n}}}')], [answer])  # type: ignore[list-item]
    assert tally.repeated_turns == 1


def test_references_leave_numbers_as_they_are() -> None:
    text = f'{{"n":{LONG},"s":"$$"}}'
    assert resolve_references(text, Trajectory(())) == text


def test_a_flat_session_holds_long_integers() -> None:
    session = init_session(None, "Go.")
    extend_session(session, {"type": "tool_call", "name": "f", "id": "c", "input": {"n": LONG}})
    extend_session(session, {"type": "tool_result", "id": "c", "output": [LONG]})
    assert [session["messages"][1]["input"], session["messages"][2]["output"]] == [
        {"n": LONG},
        [LONG],
    ]
    _, called, seen = flat.to_api_messages(session["messages"])
    assert called["content"] == [{"type": "tool_use", "id": "c", "name": "f", "input": {"n": LONG}}]
    assert seen["content"][0]["content"] == f"[{LONG}]"
    (item,) = flat.parse_response(called)
    assert item["input"] == {"n": LONG}


def test_a_schema_may_hold_integers_of_any_size() -> None:
    def f(n: int) -> str:
        """Do nothing."""
        return str(n)

    made = make_toolsets([("own", f)])[0].tools[0]
    made.parameters["properties"]["n"]["maximum"] = LONG
    from toolsets.catalog.custom import schemas_digest

    assert len(schemas_digest([made])) == 64


def integers_of(value: Any) -> Iterator[int]:
    """All bare integers of a parsed row."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for member in value:
            yield from integers_of(member)
    elif type(value) is int:
        yield value


@pytest.mark.parametrize("format", ["hermes", "llamafactory", "openai", "dpo", "kto", "atif"])
def test_no_row_holds_an_integer_that_loaders_refuse(tmp_path: Path, format: str) -> None:
    """Beyond signed 64 bits loaders refuse the whole file or round; text keeps its digits."""
    record = call_record(check={"passed": True, "reward": 1.0})
    record["messages"][2]["tool_calls"][0]["function"]["arguments"] = ARGUMENTS
    other = call_record("Nothing.", check={"passed": False, "reward": 0.0})
    prompts = [{"prompt": "Question", "n": LONG}]
    source = make_run(tmp_path, record, other, samples=2, prompts=prompts)
    made = rows(source, format)
    assert made
    assert [n for n in integers_of(made) if not -(2**63) <= n < 2**63] == []
    assert str(LONG) in json.dumps(made)


def test_every_file_of_rows_is_read_by_arrow(tmp_path: Path) -> None:
    """`datasets` reads JSON lines with Arrow's reader, and has a slower one for mixed types that
    refuses long integers."""
    reader = pytest.importorskip("pyarrow.json")
    records = [
        record_of(
            user(),
            assistant("Looking.", call(arguments), reasoning="Which?"),
            result("9"),
            assistant("Done."),
        )
        for arguments in ('{"n": 1}', f'{{"n": {2**63}}}', f'{{"n": {LONG}}}', f'{{"n": {SMALL}}}')
    ]
    source = make_run(tmp_path, *records)
    for name in ("hermes", "llamafactory", "openai"):
        made = rows(source, name)
        assert len(made) == len(records)
    path = tmp_path / "out" / "openai" / "train.jsonl"
    numbers = [
        message["tool_calls"][0]["function"]["arguments"]["n"]
        for row in lines(path)
        for message in row["messages"]
        if "tool_calls" in message
    ]
    assert numbers == [1, str(2**63), str(LONG), str(SMALL)]
    # Rows of one type are read as they are; of two types each is read by itself here.
    for line in path.read_bytes().splitlines(keepends=True):
        one = tmp_path / "one.jsonl"
        one.write_bytes(line)
        (row,) = reader.read_json(one).to_pylist()
        assert row["messages"] == [
            {**dict.fromkeys(row["messages"][0]), **message}
            for message in json.loads(line)["messages"]
        ]


def test_the_value_of_arguments_is_narrowed_and_its_text_is_not() -> None:
    text, value = read_arguments(msgspec.convert(call(ARGUMENTS), StoredCall), where="here")
    assert f'"n": {LONG},' in text
    assert value == {"n": str(LONG), "below": [str(SMALL), 1.5]}
