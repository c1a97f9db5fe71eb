"""Hidden reasoning: no row says that there was none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agent.models.dialects import anthropic_messages, openai_chat, openai_responses
from agent.models.model import Completion
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.statistics.run import as_text, compute_statistics
from batch_trajectories.export.training_files import route_record
from tests.helpers.builders import assistant, call, chat_reply, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rejects, rows
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.helpers.stored import to_record, to_row

TOOL = {"name": "temp", "input": {}, "id": "c1", "type": "tool_use"}


def anthropic(*blocks: Any, tokens: int | None = None) -> Completion:
    usage: dict[str, Any] = {"input_tokens": 5, "output_tokens": 9}
    if tokens is not None:
        usage["output_tokens_details"] = {"thinking_tokens": tokens}
    reply = {"content": list(blocks), "stop_reason": "end_turn", "usage": usage}
    return anthropic_messages.read_reply(json.dumps(reply).encode())


def responses(*items: Any, tokens: int | None = None) -> Completion:
    details = {} if tokens is None else {"output_tokens_details": {"reasoning_tokens": tokens}}
    usage = {"input_tokens": 5, "output_tokens": 9, **details}
    said = {"type": "message", "content": [{"type": "output_text", "text": "Hi."}]}
    reply = {"status": "completed", "output": [*items, said], "usage": usage}
    return openai_responses.read_reply(json.dumps(reply).encode())


def chat(tokens: int | None = None, **fields: Any) -> Completion:
    details = {} if tokens is None else {"completion_tokens_details": {"reasoning_tokens": tokens}}
    usage = {"prompt_tokens": 5, "completion_tokens": 9, **details}
    message = {"role": "assistant", "content": "Hi.", **fields}
    reply = chat_reply(message, usage=usage)
    return openai_chat.read_reply(json.dumps(reply).encode())


SEALED = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "gAAA"}
TEXT = {"type": "text", "text": "Hi."}
ENCRYPTED = {"type": "reasoning.encrypted", "data": "gAAA", "index": 0}
EMPTY = {"type": "reasoning.text", "text": "", "signature": None}

HIDDEN = {
    "redacted": anthropic({"type": "redacted_thinking", "data": "Eo"}, TEXT),
    "signature alone": anthropic({"type": "thinking", "thinking": "", "signature": "E"}, TEXT),
    "counted at anthropic": anthropic(TEXT, tokens=40),
    "encrypted item": responses(SEALED),
    "encrypted item, counted": responses(SEALED, tokens=64),
    "encrypted detail": chat(reasoning_details=[ENCRYPTED]),
    "signed detail": chat(reasoning_details=[{**EMPTY, "signature": "E"}]),
    "redacted by a gateway": chat(0, thinking_blocks=[{"type": "redacted_thinking", "data": "Eo"}]),
    "counted": chat(320),
}
NOT_HIDDEN = {
    "nothing": chat(),
    "counted as none": chat(0),
    "an empty thought": anthropic({"type": "thinking", "thinking": ""}, TEXT),
    "an empty thought that is sealed": responses(SEALED, tokens=0),
    "an empty detail": chat(reasoning_details=[EMPTY]),
}


def record_with(*completions: Completion, **changes: Any) -> dict[str, Any]:
    """A conversation of these replies, which the user asks for one by one."""
    messages = [m for reply in completions for m in (user(), dict(reply.message))]
    record = record_of(*messages, **changes)
    for turn, reply in zip(record["turns"], completions, strict=True):
        turn["usage"] = reply.usage
    return record


def gpt(row: dict[str, Any]) -> list[str]:
    return [turn["value"] for turn in row["conversations"] if turn["from"] == "gpt"]


@pytest.mark.parametrize("reply", HIDDEN.values(), ids=HIDDEN)
def test_a_turn_with_it_has_no_think_block(reply: Completion) -> None:
    row = to_row(to_record(record_with(reply)))
    assert gpt(row) == ["Hi."]
    assert row["has_reasoning"] is False
    parsed = json.loads(row["metadata"])["reasoning"]
    assert parsed == {"assistant_turns": 1, "with_reasoning": 0, "hidden": 1}


@pytest.mark.parametrize("reply", NOT_HIDDEN.values(), ids=NOT_HIDDEN)
def test_a_turn_with_hidden_reasoning_has_an_empty_block(reply: Completion) -> None:
    row = to_row(to_record(record_with(reply)))
    assert gpt(row) == ["<think>\n</think>\nHi."]
    assert json.loads(row["metadata"])["reasoning"] == {"assistant_turns": 1, "with_reasoning": 0}


def test_words_beside_it_are_reasoning() -> None:
    said = {"type": "thinking", "thinking": "Hm.", "signature": "E"}
    reply = anthropic(said, {"type": "redacted_thinking", "data": "Eo"}, TEXT, tokens=90)
    row = to_row(to_record(record_with(reply)))
    assert gpt(row) == ["<think>\nHm.\n</think>\nHi."]
    assert "hidden" not in json.loads(row["metadata"])["reasoning"]


def test_a_signature_of_gemini_on_a_call_counts_as_hidden_reasoning() -> None:
    signed = call() | {"extra_content": {"google": {"thought_signature": "Cg"}}}
    record = record_of(user(), assistant("", signed), result("r"), assistant("Hi."))
    assert [value.startswith("<think>") for value in gpt(to_row(to_record(record)))] == [
        False,
        True,
    ]


def test_each_turn_is_judged_by_its_own_replies() -> None:
    """Replies that the prompt brought along cost nothing, and a paused turn is one of several."""
    given = [user("A"), assistant("B")]
    own = [user(), assistant("One."), assistant("Two."), user(), assistant("Three.")]
    record = record_of(*given, *own)
    del record["turns"][0]
    record["turns"][1]["usage"] = {"reasoning_tokens": 7}
    values = gpt(to_row(to_record(record)))
    assert [value.startswith("<think>\n</think>") for value in values] == [True, False, True]


def test_an_answer_by_a_call_is_part_of_its_reply() -> None:
    offered = [{"type": "function", "function": {"name": n}} for n in ("temp", "final_answer")]
    calls = [call(), call('{"answer": "14"}', id="f", name="final_answer")]
    results = [result("r"), result("ok", id="f")]
    record = record_of(user(), assistant("", *calls), *results, tools=offered)
    record["turns"][0]["usage"] = {"reasoning_tokens": 7}
    assert [value.startswith("<think>") for value in gpt(to_row(to_record(record)))] == [
        False,
        False,
    ]


def test_split_parallel_calls_have_no_empty_block(tmp_path: Path) -> None:
    record = record_of(
        user(),
        assistant("", call(), call(id="c2")),
        result("r"),
        result("r", id="c2"),
        assistant("Hi.", reasoning="So."),
    )
    record["turns"][0]["usage"] = {"reasoning_tokens": 7}
    (row,) = rows(make_run(tmp_path, record), "hermes", parallel_calls="split")
    assert [value.startswith("<think>") for value in gpt(row)] == [False, False, True]


@pytest.mark.parametrize("name", ["openai", "llamafactory", "atif", "kto"])
def test_other_formats_say_nothing_and_count_it(tmp_path: Path, name: str) -> None:
    record = record_with(HIDDEN["redacted"], chat(reasoning="Hm."), check={"reward": 1})
    (row,) = rows(make_run(tmp_path, record), name)
    metadata = row["extra"] if name == "atif" else json.loads(row["metadata"])
    assert metadata["reasoning"] == {"assistant_turns": 2, "with_reasoning": 1, "hidden": 1}
    text = json.dumps(row)
    assert text.count("<think>") == (name == "llamafactory")
    assert text.count('"reasoning_content"') == (name != "llamafactory")
    assert '"reasoning_content": ""' not in text


def test_hidden_reasoning_does_not_satisfy_a_reasoning_filter(tmp_path: Path) -> None:
    record = record_with(HIDDEN["counted"])
    assert (
        route_record(to_record(record), style=Style(require_reasoning=True)).reason
        == "no_reasoning"
    )
    source = make_run(tmp_path, record, record_with(chat()), record_with(chat(reasoning="Hm.")))
    left_out = rejects(source, formats="openai", filters={"min_reasoning": 1})
    assert left_out == dict.fromkeys(("t0", "t1"), "min_reasoning")


def test_a_filter_leaves_conversations_with_it_out(tmp_path: Path) -> None:
    both = record_with(HIDDEN["counted"], chat(reasoning="Hm."))
    source = make_run(tmp_path, both, record_with(chat()), record_with(chat(reasoning="Hm.")))
    left_out = rejects(source, formats="openai", filters={"hidden_reasoning": "reject"})
    assert left_out == {"t0": "hidden_reasoning"}


def test_statistics_and_the_card_count_it(tmp_path: Path) -> None:
    plain, hidden = chat(reasoning="Hm."), HIDDEN["encrypted item"]
    source = make_run(tmp_path, record_with(hidden, plain, chat()))
    directory, manifest = export_to_dataset(source, formats="hermes")
    counts = {"assistant_turns": 3, "with_reasoning": 1, "without_reasoning": 2, "hidden": 1}
    assert manifest["statistics"]["reasoning"] == {**counts, "rows_with_any": 1}
    assert "1 more turn had some that the API hides" in (directory / "README.md").read_text()
    statistics = compute_statistics(source.run_dir, style=Style())
    assert "reasoning in 33.3% of 3 turns, hidden by the API in 33.3%" in list(
        as_text(statistics, {})
    )


def test_rows_without_any_think_tag(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_with(chat(), chat(reasoning="Hm.")))
    (row,) = rows(source, "hermes", empty_think="omit")
    assert gpt(row) == ["Hi.", "<think>\nHm.\n</think>\nHi."]
    (row,) = rows(source, "hermes", empty_think="omit", reasoning="none")
    assert gpt(row) == ["Hi.", "Hi."]


@pytest.mark.slow
def test_a_run_can_leave_the_empty_blocks_out_and_says_so(tmp_path: Path) -> None:
    """The option decides the training file alone, so it may change from start to start."""
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [{"content": "yes"}]})
    training = tmp_path / "trajectories" / "r.jsonl"
    done = run(tmp_path, **SCRIPTED)
    assert "--empty_think=omit leaves these blocks out" in done.stdout
    assert gpt(lines(training)[0]) == ["<think>\n</think>\nyes"]
    done = run(tmp_path, **SCRIPTED, empty_think="omit")
    assert done.returncode == 0, done.stderr
    assert "--empty_think" not in done.stdout
    assert gpt(lines(training)[0]) == ["yes"]


def test_nothing_is_said_where_replies_hold_reasoning(tmp_path: Path) -> None:
    script = [{"content": "yes", "reasoning": "Hm."}]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    assert "--empty_think" not in run(tmp_path, **SCRIPTED).stdout
