"""One row per turn of the model: its context, its loss, and the template that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_trajectories.export.conversation.reading import read_conversation
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import Turn
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.dataset.runs import Source
from batch_trajectories.export.formats.openai import make_row
from batch_trajectories.export.rows.files import cut_by_turn
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.templates.rendering import load_template
from tests.export.test_export_loss import mixed_record
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import call_record, export_to_dataset, make_run, rejects, rows
from tests.helpers.running import lines, run
from tests.helpers.stored import to_record

STRIPS = """
{%- set ns = namespace(asked=0) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.asked = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}<{{ m.role }}>
{%- if m.role == "assistant" and loop.index0 > ns.asked and (loop.last or m.reasoning_content) %}
{{- "(" ~ (m.reasoning_content or "") ~ ")" }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }}]{% endfor %}
{%- endfor %}"""
"""Like Qwen3's: shows reasoning since the last user message, and that of the last turn always."""


def two_questions(**changes: Any) -> dict[str, Any]:
    """Two questions; a call before the first answer."""
    return record_of(
        user("Q1"),
        assistant("Look.", call(), reasoning="R1"),
        result("r1"),
        assistant("A1", reasoning="R2"),
        user("Q2"),
        assistant("Again.", call(id="c2"), reasoning="R3"),
        result("r2", id="c2"),
        assistant("A2", reasoning="R4"),
        **changes,
    )


def source_of(folder: Path, *records: dict[str, Any], samples: int = 1) -> Source:
    return make_run(folder, *records, samples=samples)


def export_dataset(folder: Path) -> Path:
    folder.mkdir()
    return folder


def turns_of(row: dict[str, Any]) -> list[str]:
    """Reasoning, text and a star for loss, of each assistant message."""
    return [
        f"{m.get('reasoning_content', '')}|{m['content']}{'*' * m.get('weight', 1)}"
        for m in row["messages"]
        if m["role"] == "assistant"
    ]


def test_each_turn_has_a_row_that_ends_with_it_and_is_learnt_alone(tmp_path: Path) -> None:
    training_rows = rows(source_of(tmp_path, two_questions()), "openai", per_turn=True)
    assert [(row["id"], turns_of(row)) for row in training_rows] == [
        ("t0#t1", ["R1|Look.*"]),
        ("t0#t2", ["R1|Look.", "R2|A1*"]),
        ("t0#t3", ["|Look.", "|A1", "R3|Again.*"]),
        ("t0#t4", ["|Look.", "|A1", "R3|Again.", "R4|A2*"]),
    ]
    assert [row["messages"][-1]["role"] for row in training_rows] == ["assistant"] * 4
    assert training_rows[2]["messages"][2] == {
        "role": "tool",
        "tool_call_id": "c1",
        "name": "temp",
        "content": "r1",
    }


def test_the_columns_of_a_row_are_those_of_its_turn(tmp_path: Path) -> None:
    record = two_questions()
    del record["messages"][5]["reasoning"]
    record["turns"][2]["finish_reason"] = "tool_calls"
    training_rows = rows(source_of(tmp_path, record), "openai", per_turn=True)
    columns = [(r["num_turns"], r["num_tool_calls"], r["has_reasoning"]) for r in training_rows]
    assert columns == [(1, 1, True), (1, 0, True), (1, 1, False), (1, 0, True)]
    metadata = [json.loads(row["metadata"]) for row in training_rows]
    assert [told["turn"] for told in metadata] == [1, 2, 3, 4]
    assert [told["finish_reason"] for told in metadata] == ["stop", "stop", "tool_calls", "stop"]
    assert metadata[2]["reasoning"] == {"assistant_turns": 1, "with_reasoning": 0}


@pytest.mark.parametrize(
    ("reasoning", "last"),
    [
        (None, ["|Look.", "|A1", "R3|Again.", "R4|A2*"]),
        ("field", ["R1|Look.", "R2|A1", "R3|Again.", "R4|A2*"]),
        ("last", ["|Look.", "|A1", "|Again.", "R4|A2*"]),
        ("none", ["|Look.", "|A1", "|Again.", "|A2*"]),
        (
            "inline",
            ["|Look.", "|A1", "|<think>\nR3\n</think>\n\nAgain.", "|<think>\nR4\n</think>\n\nA2*"],
        ),
    ],
)
def test_the_style_decides_which_reasoning_the_context_keeps(
    tmp_path: Path, reasoning: Any, last: list[str]
) -> None:
    training_rows = rows(
        source_of(tmp_path, two_questions()), "openai", per_turn=True, reasoning=reasoning
    )
    assert turns_of(training_rows[-1]) == last


def test_the_context_of_a_turn_is_what_the_model_saw(tmp_path: Path) -> None:
    """With token ids, replies were sent back without the newlines around their text."""
    said = (
        user("Q"),
        assistant("\n\nLook.\n", call()),
        result("\nr\n"),
        assistant("\n\nA\n\nB"),
        user("Q2"),
        assistant("\nC"),
    )
    record = record_of(*said, view_trimmed=True)
    training_rows = rows(source_of(export_dataset(tmp_path / "t"), record), "openai", per_turn=True)
    assert [turns_of(row) for row in training_rows] == [
        ["|\n\nLook.\n*"],
        ["|Look.", "|\n\nA\n\nB*"],
        ["|Look.", "|A\n\nB", "|\nC*"],
    ]
    assert all(row["messages"][2]["content"] == "\nr\n" for row in training_rows[1:])
    assert json.loads(training_rows[0]["metadata"])["trimmed_replies"] == 2
    plain = rows(
        source_of(export_dataset(tmp_path / "p"), record_of(*said)), "openai", per_turn=True
    )
    assert turns_of(plain[1])[0].startswith("|\n\nLook.")
    assert "trimmed_replies" not in json.loads(plain[0]["metadata"])


def test_turns_of_others_are_context_and_have_no_row(tmp_path: Path) -> None:
    training_rows = rows(source_of(tmp_path, mixed_record()), "openai", per_turn=True)
    assert [(row["id"], turns_of(row)) for row in training_rows] == [
        ("t0#t4", ["|Hello.", "|", "|One?", "|*"]),
        ("t0#t5", ["|Hello.", "|", "|One?", "|", "|Two.*"]),
    ]


def test_parallel_calls_that_are_split_have_a_row_each(tmp_path: Path) -> None:
    calls = [call(id="a"), call(id="b")]
    record = record_of(
        user(),
        assistant("Both.", *calls, reasoning="R"),
        result("1", id="a"),
        result("2", id="b"),
        assistant("Done."),
    )
    training_rows = rows(
        source_of(tmp_path, record), "openai", per_turn=True, parallel_calls="split"
    )
    assert [(row["id"], turns_of(row)) for row in training_rows] == [
        ("t0#t1", ["R|Both.*"]),
        ("t0#t1.2", ["R|Both.", "|*"]),
        ("t0#t2", ["R|Both.", "|", "|Done.*"]),
    ]


def test_rows_of_llamafactory_may_end_with_a_call(tmp_path: Path) -> None:
    early = {**two_questions(), "status": "max_turns", "status_reason": "4"}
    early["messages"] = early["messages"][:7]  # ends with a result
    early["turns"] = early["turns"][:3]
    filters = {"status": "any", "exact_duplicates": False}
    training_rows = rows(source_of(tmp_path, early), "llamafactory", per_turn=True, filters=filters)
    ends = [
        (row["conversations"][-1]["from"], row["conversations"][-1]["value"])
        for row in training_rows
    ]
    text = '<tool_call>[{"name": "temp", "arguments": {}}]</tool_call>'
    assert ends == [
        ("function_call", f"<think>\nR1\n</think>\n\nLook.\n{text}"),
        ("gpt", "<think>\nR2\n</think>\n\nA1"),
        ("function_call", f"<think>\nR3\n</think>\n\nAgain.\n{text}"),
    ]
    assert all(len(row["conversations"]) % 2 == 0 for row in training_rows)


@pytest.mark.parametrize("name", ["hermes", "atif", "raw", "dpo", "kto"])
def test_a_format_that_cannot_mark_a_turn_is_refused(tmp_path: Path, name: str) -> None:
    source = source_of(tmp_path, call_record())
    done = run(tmp_path, "export", source.run_dir, "--per_turn", format=name)
    assert done.returncode == 2
    assert f"per_turn: {name} has no rows for single turns" in done.stderr


def test_turns_that_samples_share_are_in_one_row(tmp_path: Path) -> None:
    same, other = two_questions(), two_questions()
    other["messages"][7] = assistant("Another.", reasoning="R4")
    other["messages"][1] = assistant("Look.", call(id="x9"), reasoning="R1")  # only the id differs
    other["messages"][2] = result("r1", id="x9")
    source = source_of(tmp_path, same, other, samples=2)
    directory, manifest = export_to_dataset(source, formats="openai", per_turn=True, filters={})
    (part,) = manifest["formats"]
    assert (part["rows"], part["used"], part["duplicate_turns"]) == (5, 2, 3)
    found = [row["id"] for row in lines(directory / "openai" / "train.jsonl")]
    assert found == ["t0#t1", "t0#t2", "t0#t3", "t0#t4", "t0#s1#t4"]
    _, manifest = export_to_dataset(
        source, formats="openai", per_turn=True, filters={"exact_duplicates": False}
    )
    assert manifest["formats"][0]["rows"] == 8


def test_a_sample_with_nothing_new_is_rejected(tmp_path: Path) -> None:
    short = two_questions()
    short["messages"], short["turns"] = short["messages"][:4], short["turns"][:2]
    source = source_of(tmp_path, two_questions(), short, samples=2)
    reasons = rejects(source, formats="openai", per_turn=True, filters={"status": "any"})
    assert reasons == {"t0#s1": "exact_duplicates"}


def test_a_flaw_in_any_turn_rejects_all_rows_of_the_conversation(tmp_path: Path) -> None:
    bad = two_questions()
    bad["messages"][6] = result("</tool_response>", id="c2")
    good = two_questions()
    source = source_of(tmp_path, bad, good, samples=2)
    directory, manifest = export_to_dataset(source, formats="openai", per_turn=True, filters={})
    (part,) = manifest["formats"]
    assert part["rejected_by_reason"] == {"marker_in_result": 1}
    # What the rejected sample would have shared is not lost.
    assert [row["id"] for row in lines(directory / "openai" / "train.jsonl")] == [
        f"t0#s1#t{n}" for n in (1, 2, 3, 4)
    ]
    assert part["duplicate_turns"] == 0


def test_such_a_dataset_is_checked_and_says_how_to_learn_it(tmp_path: Path) -> None:
    source = source_of(tmp_path, two_questions(), call_record())
    directory, manifest = export_to_dataset(source, formats="openai,llamafactory", per_turn=True)
    assert [part["rows"] for part in manifest["formats"]] == [6, 6]
    assert list(find_problems(source, directory)) == []
    assert "only the last turn of a row is to be learnt" in (directory / "README.md").read_text()


def test_the_template_shows_each_turn_as_the_model_will_see_it(tmp_path: Path) -> None:
    """A row of the whole conversation would drop R1 and R2, which the model did write."""
    pytest.importorskip("jinja2")
    (tmp_path / "t.jinja").write_text(STRIPS)
    render = load_template(tmp_path / "t.jinja")
    source = source_of(tmp_path, two_questions())
    (whole,) = rows(source, "openai")
    assert "R1" not in render(whole).text
    for style in (None, "field"):
        found = [render(row).text for row in rows(source, "openai", per_turn=True, reasoning=style)]
        assert found == [
            "<user>Q1<assistant>(R1)Look.[temp]",
            "<user>Q1<assistant>(R1)Look.[temp]<tool>r1<assistant>(R2)A1",
            "<user>Q1<assistant>Look.[temp]<tool>r1<assistant>A1"
            "<user>Q2<assistant>(R3)Again.[temp]",
            "<user>Q1<assistant>Look.[temp]<tool>r1<assistant>A1"
            "<user>Q2<assistant>(R3)Again.[temp]<tool>r2<assistant>(R4)A2",
        ]


def test_rendered_rows_name_the_messages_without_loss(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "t.jinja").write_text(STRIPS)
    source = source_of(tmp_path, two_questions())
    done = run(
        tmp_path,
        "export",
        source.run_dir,
        "--per_turn",
        format="openai",
        render="t.jinja",
        render_rows=4,
    )
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("no loss")]
    start = "no loss where a trainer reads `weight`: messages"
    assert said == [f"{start} 2", f"{start} 2, 4", f"{start} 2, 4, 6"]


def test_the_recipe_takes_it_too(tmp_path: Path) -> None:
    source = source_of(tmp_path, call_record())
    (tmp_path / "recipe.yaml").write_text("formats: [openai]\nper_turn: true\n")
    done = run(tmp_path, "export", source.run_dir, recipe="recipe.yaml")
    assert done.returncode == 0, done.stderr
    assert "2 rows of openai" in done.stdout
    with pytest.raises(ValueError, match="per_turn: raw has no rows"):
        Recipe.model_validate({"formats": "openai,raw", "per_turn": True})


CONTENTS = st.lists(
    st.tuples(st.sampled_from(["user", "call", "text"]), st.booleans()), min_size=1, max_size=8
)


@settings(max_examples=80, deadline=None)
@given(CONTENTS)
def test_rows_together_hold_every_own_turn_once_and_whole(steps: list[tuple[str, bool]]) -> None:
    """Each turn is learnt in one row, with its reasoning, after the context that preceded it."""
    messages = [user("Q")]
    for number, (kind, thinks) in enumerate(steps):
        reasoning = f"R{number}" if thinks else ""
        if kind == "call":
            messages.append(assistant("", call(id=f"c{number}"), reasoning=reasoning))
            messages.append(result(f"r{number}", id=f"c{number}"))
        else:
            messages += [assistant(f"A{number}", reasoning=reasoning), user(f"Q{number}")]
    messages.append(assistant("End.", reasoning="R"))
    conversation = read_conversation(to_record(record_of(*messages)))
    whole = make_row(conversation, Style())["messages"]
    own = [entry for entry in conversation.entries if isinstance(entry, Turn)]
    cuts = list(cut_by_turn(conversation, Style()))
    assert [cut.entries[-1] for cut in cuts] == [
        msgspec.structs.replace(turn, results=()) for turn in own
    ]
    for cut in cuts:
        row = make_row(cut, Style())["messages"]
        before = whole[: len(row)]
        assert [(m["role"], m["content"]) for m in row] == [
            (m["role"], m["content"]) for m in before
        ]
        last_user = max(n for n, message in enumerate(row) if message["role"] == "user")
        for place, (message, full) in enumerate(zip(row, before, strict=True)):
            kept = full.get("reasoning_content") if place > last_user else None
            assert message.get("reasoning_content") == kept
            is_learnt = message["role"] == "assistant" and place == len(row) - 1
            assert ("weight" in message) is (message["role"] == "assistant" and not is_learnt)


@pytest.mark.parametrize("choice", [{"per_turn": True}, {"segments": True}])
def test_the_card_says_how_llamafactory_learns_the_last_turn_alone(
    tmp_path: Path, choice: dict[str, Any]
) -> None:
    """With `mask_history` its templates drop reasoning of earlier turns, which the model saw."""
    source = source_of(tmp_path, two_questions())
    directory, _ = export_to_dataset(source, formats="llamafactory", **choice)
    card = " ".join((directory / "README.md").read_text().split())
    assert "LLaMA-Factory: `mask_history: true`" in card
    assert "`preserve_thinking: true`, or a template such as `qwen3_nothink`, keeps" in card
    whole, _ = export_to_dataset(source, formats="llamafactory")
    assert "mask_history" not in (whole / "README.md").read_text()
