"""Any record is read into a conversation, or refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from batch_trajectories.basics import exact_json
from batch_trajectories.export.conversation import reading
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import read_conversation, read_usual_entries
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.records.files import DamagedLine, add_checksum
from batch_trajectories.records.record_types import decode_record
from batch_trajectories.records.records import RecordFile, UnreadableRecord
from tests.helpers.builders import TEMP, assistant, call, record_of, result, user
from tests.helpers.exporting import make_run, rejects, rows
from tests.helpers.stored import complete

Record = dict[str, Any]

TEXTS = (
    "Hi.",
    "a < b",
    "[1]",
    "<b>bold</b>",
    " padded ",
    "é😀",
    "",
    " ",
    "<think>x</think>y",
    "<think>never closed",
    "</tool_call>",
    "<|im_end|>",
    "[INST]",
    "<s>",
    "think>",
)
ARGUMENTS = (
    "{}",
    "",
    '{"a":1}',
    '{"a": "x", "b": null}',
    '{"a":1e3}',
    '{"n":12345678901234567890}',
    "[1]",
    "{",
    '{"a":1,"a":2}',
    '{"a":{"b":[1,2]}}',
)
SIGNED: tuple[Record, ...] = (
    {},
    {"extra_content": {"google": {"thought_signature": "s"}}},
    {"extra_content": None},
)
HIDDEN: tuple[Record, ...] = (
    {},
    {"provider_blocks": None},
    {"provider_blocks": {"blocks": [{"type": "redacted_thinking", "data": "d"}]}},
    {"provider_blocks": {"blocks": [{"type": "reasoning", "encrypted_content": "e"}]}},
)


MAKES_NO_DIFFERENCE = {
    "a fork",
    "a note on a result",
    "a note of the user",
    "reasoning of the user",
    "no model",
    "results that were shortened",
    "views that were shortened",
}
"""Changes that do not change how entries are read."""


def conversation(turns: int = 2, **changes: Any) -> Record:
    messages: list[Record] = [{"role": "system", "content": "Be brief."}, user("Go.")]
    for turn in range(turns):
        calls = [call('{"a":1}', id=f"c{turn}"), call('{"b":2}', id=f"d{turn}")]
        messages += [
            assistant("Look.", *calls, reasoning="Hm."),
            result("15", id=f"c{turn}"),
            result("no", id=f"d{turn}", is_error=True),
        ]
    return record_of(*messages, assistant("Done.", reasoning="Sure."), **changes)


def drop(place: int) -> Callable[[Record], object]:
    return lambda record: record["messages"].pop(place)


def put(place: int, message: Record) -> Callable[[Record], object]:
    return lambda record: record["messages"].insert(place, message)


def change(place: int, **keys: Any) -> Callable[[Record], object]:
    return lambda record: record["messages"][place].update(keys)


def swap(record: Record) -> None:
    messages = record["messages"]
    messages[3], messages[4] = messages[4], messages[3]


UNUSUAL: dict[str, Callable[[Record], object]] = {
    "no user": drop(1),
    "no result": drop(4),
    "no answer": drop(-1),
    "results in another order": swap,
    "result of another call": change(3, tool_call_id="d0"),
    "two system messages": put(0, {"role": "system", "content": "More."}),
    "two questions": put(5, user("And?")),
    "a message at the end": put(99, user("Thanks.")),
    "a paused turn": put(8, assistant("So", reasoning="Hm.")),
    "a turn of the prompt": lambda record: record["turns"].pop(),
    "an inherited turn": lambda record: record["turns"][0].update(inherited=True),
    "a fork": lambda record: record.update(fork={"run": "r", "turn": 1}),
    "another ending": lambda record: record.update(status="max_turns"),
    "no turns": lambda record: record.update(turns=[]),
    "no messages": lambda record: record.update(messages=[]),
    "other tools": lambda record: record.update(tools=[]),
    "a reserved tool": lambda record: record.update(
        tools=[TEMP, {"type": "function", "function": {"name": "final_answer"}}]
    ),
    "a note on a result": change(3, notes=["expected"]),
    "a note of the user": change(1, notes=["expected"]),
    "repairs": change(2, repairs=["temp"]),
    "repairs of the system message": change(0, repairs=["temp"]),
    "reasoning of the user": change(1, reasoning="Hm."),
    "content of the user": change(1, content=[{"type": "text", "text": "Go."}]),
    "content of the system": change(0, content=[]),
    "content of a turn": change(2, content=[]),
    "content of a result": change(3, content=None),
    "results that were shortened": lambda record: record.update(options={"observation_chars": 9}),
    "views that were shortened": lambda record: record.update(view_compacted=True),
    "a number as a text": lambda record: record.update(model=1),
    "a fraction as a count": lambda record: record.update(sample=1.5),
    "a text as a time": lambda record: record["turns"][0].update(started_at="1.5"),
    "a number as arguments": change(2, tool_calls=[call(id="c0") | {"function": {"name": 1}}]),
    "no model": lambda record: record.pop("model"),
    "no tools": lambda record: record.pop("tools"),
    "calls at the end": change(-1, tool_calls=[call()]),
    "the same id twice": change(2, tool_calls=[call(id="c0"), call(id="c0")]),
    "a result as a question": change(1, role="tool", tool_call_id="c9"),
    "a question as a turn": change(2, role="user"),
}


def line_of(record: Record) -> bytes:
    return add_checksum(exact_json.dumps(complete(record)))


def ending(record: Record) -> str:
    """How reading ends; `Damaged` for another type than a field has."""
    try:
        stored = decode_record(line_of(record))
        own = AuthoredWork(stored)
        assert own.counts.replies <= len(own.turns)
        assert read_conversation(stored).num_turns == len(own.turns)
    except DamagedLine as damage:
        return "damaged" if "`" in str(damage) else str(damage)
    except Rejected as rejected:
        return "rejected" if rejected.detail else rejected.reason
    return "read"


def check_usual(record: Record) -> bool:
    """Whether a record has the usual shape; then both ways of reading give the same."""
    stored = decode_record(line_of(record))
    own, same = AuthoredWork(stored), AuthoredWork(stored)
    happened = reading.find_run_flaws(stored)
    usual = read_usual_entries(stored, own)
    if usual is None or happened or stored.status != "completed":
        return False
    general = reading._read_any(stored, same, happened)
    assert usual == list(general.entries)
    assert (stored.messages, stored.tools) == (general.messages, general.tools)
    assert (list(general.flaws), general.completion) == ([], "text")
    assert own.counts == same.counts
    return True


def test_the_usual_shape_is_read_alike() -> None:
    assert check_usual(conversation())
    assert check_usual(conversation(turns=0))


@pytest.mark.parametrize("what", UNUSUAL)
def test_any_other_shape_is_left_to_the_general_reader(what: str) -> None:
    record = conversation()
    UNUSUAL[what](record)
    try:
        is_usual = check_usual(record)
    except (DamagedLine, Rejected):
        return
    assert is_usual is (what in MAKES_NO_DIFFERENCE)


@pytest.mark.parametrize("seed", range(40))
def test_any_record_is_read_or_refused_by_name(seed: int) -> None:
    draw = random.Random(seed)
    ends = set()
    for _ in range(50):
        record = conversation(turns=draw.randrange(3))
        for message in draw.sample(record["messages"], 2):
            message[draw.choice(("content", "reasoning"))] = draw.choice(TEXTS)
            for tool_call in message.get("tool_calls", ()):
                tool_call["function"]["arguments"] = draw.choice(ARGUMENTS)
                tool_call |= draw.choice(SIGNED)
            if message["role"] == "assistant":
                message |= draw.choice(HIDDEN)
            elif message["role"] == "tool":
                message["details"] = draw.choice(({}, {"failure": "timeout"}, {"failure": 1}))
        for turn in record["turns"]:
            turn["usage"] = draw.choice((None, {}, {"reasoning_tokens": draw.choice((None, 0, 5))}))
            turn["started_at"] = draw.random()
        if draw.random() < 0.5 and len(record["messages"]) > 9:
            UNUSUAL[draw.choice(list(UNUSUAL))](record)
        ends.add(ending(record))
        if ending(record) == "read":
            check_usual(record)
    assert "read" in ends
    assert ends <= {"read", "rejected", "damaged"}


def test_what_a_field_is_not_is_named() -> None:
    record = conversation()
    record["messages"][3]["content"] = None
    with pytest.raises(DamagedLine, match=r"^`messages\[3\]\.content`: expected `str`"):
        decode_record(line_of(record))


def test_rows_keep_integers_of_any_size(tmp_path: Path) -> None:
    long = 10**20 + 1
    columns = [{"n": long, "share": 0.5}, {"n": 1, "share": 0.5}]
    offered = [{**TEMP, "function": {**TEMP["function"], "parameters": {"maximum": long}}}]
    records = conversation(), conversation(seed=long), conversation(tools=offered)
    source = add_checksums(make_run(tmp_path, *records, prompts=columns))
    exported = rows(source, "hermes")
    metadata = [json.loads(row["metadata"]) for row in exported]
    assert [of_row["columns"].get("n") for of_row in metadata] == [long, 1, None]
    assert metadata[1]["seed"] == long
    assert json.loads(exported[2]["tools"]) == offered


def test_damage_in_a_part_that_no_row_shows_is_found_without_a_checksum(tmp_path: Path) -> None:
    source = make_run(tmp_path, conversation(endpoint="http://127.0.0.1/v1"), conversation())
    RecordFile(source.run_dir, tmp_path / "quarantine").close()
    records = source.run_dir / "records.jsonl"
    records.write_bytes(records.read_bytes().replace(b"127.0.0.1", b"127.0.0.\xff"))
    with pytest.raises(UnreadableRecord, match="not JSON"):
        rows(source, "hermes")


def test_equal_conversations_are_found(tmp_path: Path) -> None:
    """Their parts are read again in full to compare them."""
    source = add_checksums(make_run(tmp_path, conversation(), conversation(1), conversation()))
    assert rejects(source, formats="hermes", filters={}) == {"t2": "exact_duplicates"}


def add_checksums(source: Source) -> Source:
    """The same run; its records have checksums, as real ones do."""
    path = source.run_dir / "records.jsonl"
    path.write_bytes(b"".join(map(add_checksum, path.read_bytes().splitlines())))
    RecordFile(source.run_dir, source.run_dir / "quarantine").close()
    return source
