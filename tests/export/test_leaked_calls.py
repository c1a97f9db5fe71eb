"""Conversations with a tool call that a server left in a text are in no export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.messages.leaked_calls import FORMATS
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.reading import read_conversation, read_usual_entries
from batch_trajectories.export.training_files import route_record
from tests.agent.test_leaked_calls import SAMPLES
from tests.export.test_export_formats import refusal
from tests.export.test_export_rl import FIRST, SECOND, play_record
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import make_run, rejects, rows
from tests.helpers.running import run
from tests.helpers.stored import ROW_FORMATS, to_record, written_row

LEAKS = {models: sample.replace("echo", "temp") for models, sample in SAMPLES.items()}
"""With the name of the tool that these records offer."""


def record_with_ending(text: str, **more: Any) -> dict[str, Any]:
    return record_of(user(), assistant("", call()), result("9"), assistant(text, **more))


@pytest.mark.parametrize("models", LEAKS)
def test_every_form_is_rejected_by_its_own_reason(models: str) -> None:
    """Also of records that were made before such conversations ended as `leaked_call`."""
    for record in (
        record_with_ending(f"I look.\n{LEAKS[models]}"),
        record_with_ending("Ok.", reasoning=LEAKS[models]),
    ):
        routed = route_record(to_record(record))
        assert (routed.file, routed.reason) == ("rejects", "leaked_call")
        assert models in routed.row["detail"]
        assert routed.row["detail"].endswith("--accept_rows=leaked_call keeps such rows")
        assert read_conversation(to_record(record)).flaws[0].reason == "leaked_call"
    at_once = record_of(user(), assistant(LEAKS[models]), status="leaked_call")
    assert route_record(to_record(at_once)).reason == "leaked_call"
    within = record_of(user(), assistant(LEAKS[models], call()), result("9"), assistant("Ok."))
    assert route_record(to_record(within)).reason == "leaked_call"


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_no_format_takes_it(name: str) -> None:
    for models in ("Qwen3-Coder", "Mistral", "Claude", "Phi-4 mini"):
        assert refusal(record_with_ending(LEAKS[models]), name) == "leaked_call"
    blank = record_of(user(), assistant(" ", reasoning=LEAKS["GLM"]), status="leaked_call")
    assert refusal(blank, name) == "leaked_call"


def test_token_ids_of_it_are_no_rows_either(tmp_path: Path) -> None:
    """Unless they are accepted: ids hold all that was sampled."""
    record = play_record(FIRST, SECOND)
    record["messages"][-1]["content"] = LEAKS["Mistral"]
    source = make_run(tmp_path, record)
    assert [*rejects(source, formats="rl").values()] == ["leaked_call"]
    assert rows(source, "rl", accept_rows="leaked_call")


@pytest.mark.parametrize("form", [form.models for form in FORMATS if "<" not in form.sign])
def test_the_quick_reader_finds_what_the_other_finds(form: str) -> None:
    """Texts without angles are read by the quick one."""
    for record in (
        record_with_ending(LEAKS[form]),
        record_with_ending("Ok.", reasoning=LEAKS[form]),
    ):
        assert read_usual_entries(to_record(record), AuthoredWork(to_record(record))) is None
    told = to_record(record_with_ending('Its `functions.other:0` is [1, f(2)] of {"name": "x"}.'))
    assert read_usual_entries(told, AuthoredWork(told)) is not None, (
        "signs alone cost no second reading"
    )


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_an_answer_that_explains_a_format_is_a_row(name: str) -> None:
    answer = f"So:\n```\n{LEAKS['Mistral']}\n```\nor `{LEAKS['Phi-4 mini']}`."
    assert written_row(record_with_ending(answer), name)
    toolless = record_of(user(), assistant(LEAKS["Mistral"]), tools=[])
    assert written_row(toolless, name)


@pytest.mark.parametrize("text", ["[THINK]So.[/THINK]Hello.", "So.</thinking>\nHello."])
def test_a_thought_in_a_text_is_rejected_whatever_ends_it(text: str) -> None:
    assert route_record(to_record(record_with_ending(text))).reason == "marker_in_text"


def test_statistics_and_funnel_name_the_ending(tmp_path: Path) -> None:
    leaked = record_of(user(), assistant(LEAKS["GLM"]), status="leaked_call")
    directory = str(make_run(tmp_path, leaked, record_with_ending("Ok.")).run_dir)
    for command in ("stats", "export"):
        told = run(tmp_path, command, directory)
        assert told.returncode == 0, told.stderr
        assert "leaked_call" in told.stdout
