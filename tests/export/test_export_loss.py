"""Who wrote each message, and which turns carry loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.turns import Turn
from batch_trajectories.export.training_files import export_run
from tests.export.test_export_agents import agents_record
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, export_to_dataset, make_run, rows
from tests.helpers.running import lines
from tests.helpers.stored import to_record

NOTE = "Go on, please."


def mixed_record() -> dict[str, Any]:
    """Turns of the prompt, of a branch's parent and of this run's model, and a note."""
    record = record_of(
        user("Hi."),
        assistant("Hello.", reasoning="Greet."),
        user("What is in a?"),
        assistant("", call()),
        result("1"),
        assistant("One?", reasoning="Perhaps."),
        {**user(NOTE), "notes": ["continue"]},
        assistant("", call(id="c2")),
        result("2", id="c2"),
        assistant("Two."),
    )
    del record["turns"][0]
    record["turns"][0]["inherited"] = True
    record["turns"][1]["inherited"] = True
    record["notes"] = [{"turn": 2, "reason": "continue", "text": NOTE, "at": 1.0}]
    return record


def test_every_message_knows_who_wrote_it() -> None:
    conversation = read_conversation(to_record(mixed_record()))
    assert [(type(entry).__name__, entry.author) for entry in conversation.entries] == [
        ("UserMessage", "prompt"),
        ("Turn", "prompt"),
        ("UserMessage", "prompt"),
        ("Turn", "parent"),
        ("Turn", "parent"),
        ("UserMessage", "runtime"),
        ("Turn", "model"),
        ("Turn", "model"),
    ]
    assert conversation.others == {"prompt": 1, "parent": 2}


def test_a_note_that_was_added_to_the_words_of_a_user_leaves_them_the_prompts() -> None:
    record = record_of(
        user(), assistant("A?"), {**user(f"Yes.\n\n{NOTE}"), "notes": ["continue"]}, assistant("B.")
    )
    record["notes"] = [{"turn": 1, "reason": "continue", "text": NOTE, "at": 1.0}]
    assert [entry.author for entry in read_conversation(to_record(record)).entries] == [
        "prompt",
        "model",
        "prompt",
        "model",
    ]


def test_further_messages_of_the_user_are_the_rows_or_the_simulated_users() -> None:
    record = record_of(
        user("Yes, go."),
        assistant("A", call()),
        {**result(f"1\n\n{NOTE}"), "notes": ["continue"]},
        assistant("B"),
        {**user(f"Yes\n\n{NOTE}"), "notes": ["continue"]},
        assistant("C"),
        {**user(NOTE), "notes": ["continue"]},
        assistant("D"),
        user("Thanks."),
        assistant("E"),
    )
    note = {"turn": 1, "reason": "continue", "text": NOTE}
    record["notes"] = [
        note,
        {"turn": 2, "reason": "user_turn", "text": "Yes"},
        note,
        note,
        {"turn": 4, "reason": "user_turn", "text": "Thanks."},
    ]
    record["inner"] = [{"key": "simulated_user#2", "name": "simulated_user"}]
    authors = [
        e.author for e in read_conversation(to_record(record)).entries if not isinstance(e, Turn)
    ]
    assert authors == ["prompt", "prompt", "runtime", "simulated_user"]


def test_a_first_reply_that_continues_a_turn_of_the_prompt_is_the_models() -> None:
    record = record_of(user(), assistant("One, "), assistant("two."))
    del record["turns"][0]
    assert read_conversation(to_record(record)).others == {}


@pytest.mark.parametrize(
    ("models", "authors"),
    [
        (["m-small", "m-2026", "m"], ["other_model", "model", "model"]),
        (["m-2026-01-02", "m@20260102", "org/m:latest"], ["model"] * 3),
        (["small", "large", "small"], ["model"] * 3),  # none is known to be the run's
        ([None, "m", "other"], ["model", "model", "other_model"]),
    ],
)
def test_turns_of_another_model_that_an_agent_called_are_not_the_runs(
    models: list[str | None], authors: list[str]
) -> None:
    record = agents_record(model="openai:m")
    for turn, model in zip(record["turns"], models, strict=True):
        turn["model"] = model
    entries = read_conversation(to_record(record)).entries
    assert [entry.author for entry in entries if isinstance(entry, Turn)] == authors


def test_openai_marks_turns_that_carry_no_loss_and_no_others(tmp_path: Path) -> None:
    (row,) = rows(make_run(tmp_path, mixed_record()), "openai")
    marks = [
        (message["role"], message.get("weight"), message.get("loss")) for message in row["messages"]
    ]
    no_loss = ("assistant", 0, False)
    assert marks == [
        ("user", None, None),
        no_loss,
        ("user", None, None),
        no_loss,
        ("tool", None, None),
        no_loss,
        ("user", None, None),
        ("assistant", None, None),
        ("tool", None, None),
        ("assistant", None, None),
    ]
    assert list(row["messages"][3]) == ["role", "content", "tool_calls", "weight", "loss"]


def test_no_key_marks_a_row_of_this_runs_model_alone(tmp_path: Path) -> None:
    (row,) = rows(make_run(tmp_path, call_record()), "openai")
    keys = {key for message in row["messages"] for key in message}
    assert keys.isdisjoint(("weight", "loss"))


def test_what_a_format_cannot_mark_is_counted_and_stays_as_it_was(tmp_path: Path) -> None:
    source = make_run(tmp_path, mixed_record(), call_record())
    directory, manifest = export_to_dataset(source, formats="hermes,llamafactory,openai,atif")
    found = {
        part["format"]: (part["marks_loss"], part["turns_of_others"])
        for part in manifest["formats"]
    }
    others = {"parent": 2, "prompt": 1}
    assert found == {
        "hermes": (False, others),
        "llamafactory": (False, others),
        "openai": (True, others),
        "atif": (True, others),
    }
    card = (directory / "README.md").read_text()
    assert "2 of the conversation that was branched, 1 of the prompt; hermes cannot mark" in card
    assert card.count("cannot mark them") == 2
    assert card.count("marked, so they carry no loss") == 2
    for line in lines(directory / "hermes" / "train.jsonl"):
        assert all(turn.keys() == {"from", "value"} for turn in line["conversations"])


def test_the_manifest_of_the_training_file_counts_turns_of_others(tmp_path: Path) -> None:
    early = {**mixed_record(), "status": "max_turns", "status_reason": "3"}
    source = make_run(tmp_path, mixed_record(), call_record(), early)
    export_run(source.run_dir, source.scan, num_samples=1)
    manifest = json.loads((source.run_dir / "exports" / "manifest.json").read_text())
    assert manifest["exported"] == 2
    assert manifest["turns_of_others"] == {"parent": 2, "prompt": 1}


def test_a_document_of_atif_names_the_model_of_each_turn_of_another(tmp_path: Path) -> None:
    record = agents_record(model="openai:m")
    for turn, model in zip(record["turns"], ("small", "m", "m"), strict=True):
        turn["model"] = model
    (document,) = rows(make_run(tmp_path, record), "atif")
    steps = [step.get("model_name") for step in document["steps"] if step["source"] == "agent"]
    assert steps == ["small", None, None]


def test_preferences_hold_no_marks(tmp_path: Path) -> None:
    record = mixed_record() | {"check": {"passed": True, "reward": 1.0}}
    (row,) = rows(make_run(tmp_path, record), "kto")
    assert not any("weight" in message for message in row["prompt"])


def test_copies_in_parquet_hold_the_marks(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    directory, _ = export_to_dataset(
        make_run(tmp_path, mixed_record(), call_record()), formats="parquet"
    )
    table = parquet.read_table(directory / "openai_parquet" / "train.parquet").to_pylist()
    marks = [[message["weight"] for message in row["messages"]] for row in table]
    assert marks[0] == [None, 0, None, 0, None, 0, None, None, None, None]
    assert set(marks[1]) == {None}
    assert [message["loss"] for message in table[0]["messages"][:3]] == [None, False, None]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
def test_exactly_the_turns_of_others_are_marked(prompts: int, parents: int, own: int) -> None:
    from batch_trajectories.export.conversation.style import Style
    from batch_trajectories.export.formats.openai import make_row

    said = [
        part
        for number in range(prompts + parents + own)
        for part in (user(f"Q{number}"), assistant(f"A{number}"))
    ]
    record = record_of(*said)
    del record["turns"][:prompts]
    for turn in record["turns"][:parents]:
        turn["inherited"] = True
    messages = make_row(read_conversation(to_record(record)), Style())["messages"]
    marks = [message.get("weight", 1) for message in messages if message["role"] == "assistant"]
    assert marks == [0] * (prompts + parents) + [1] * own
