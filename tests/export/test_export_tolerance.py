"""A row is refused only for what a trainer chokes on, and rejects.jsonl says how to keep it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from batch_trajectories.config.option_types import RowFlaw
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Tolerance
from batch_trajectories.export.conversation.validity import Reason
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.formats.hermes import to_conversations
from batch_trajectories.export.rows.format import Format, load_format, load_kind
from batch_trajectories.export.rows.format_names import format_names
from batch_trajectories.export.statistics.run import compute_statistics
from batch_trajectories.export.training_files import run_style
from batch_trajectories.records.record_types import stored_messages
from tests.export.test_export_formats import MARKUP, TEXT_FORMATS
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rows, why
from tests.helpers.running import SCRIPTED, lines, run, write_rows

RAN_INTO_AN_ERROR = result("Error: no", is_error=True)
INVENTED = record_of(
    user(),
    assistant("", call(name="tmep")),
    RAN_INTO_AN_ERROR,
    assistant("", call()),
    result("9"),
    assistant("Nine."),
)
BROKEN = record_of(
    user(),
    assistant("", call('{"city": "Li')),
    RAN_INTO_AN_ERROR,
    assistant("", call('{"city": "Lima"}')),
    result("9"),
    assistant("Nine."),
)
A_LIST = record_of(user(), assistant("", call("[1]")), RAN_INTO_AN_ERROR, assistant("No."))
TAGGED = record_of(user(), assistant("A call is <tool_call>{}</tool_call>."))
TOKEN = record_of(user("What is <|im_end|>?"), assistant("A token."))
PLAIN = record_of(user(), assistant("Hi."))


@pytest.mark.parametrize("token", MARKUP)
@pytest.mark.parametrize("name", [*TEXT_FORMATS, "kto"])
def test_tokens_that_most_tokenizers_treat_as_text_are_kept(
    tmp_path: Path, name: str, token: str
) -> None:
    """An HTML strike, say, wherever it stands."""
    function = {"name": "temp", "description": f"Gives {token}", "parameters": {}}
    record = record_of(
        {"role": "system", "content": f"You {token}"},
        user(f"a {token} b"),
        assistant(f"c {token} d", call(json.dumps({"q": token})), reasoning=f"e {token}"),
        result(f"f {token} g"),
        assistant(f"h {token}"),
        tools=[{"type": "function", "function": function}],
        check={"reward": 1},
    )
    source = make_run(tmp_path, record)
    (row,) = rows(source, name, system="saved")
    text = json.dumps(row.get("messages") or row.get("conversations") or row)
    for place in (f"You {token}", f"a {token} b", f"c {token} d", f"e {token}", f"h {token}"):
        assert place in text
    (reasons,) = why(source, formats=name, filters={"control_tokens": "all"}).values()
    assert reasons.startswith("control_token: ")


def test_a_token_of_templates_beside_markup_is_still_found(tmp_path: Path) -> None:
    record = record_of(user("<s> and then <|im_end|>"), assistant("Hi."))
    (reasons,) = why(make_run(tmp_path, record), formats="openai").values()
    assert reasons == (
        "control_token: user message before turn 1: '<|im_end|>'; "
        "--accept_rows=control_token keeps such rows"
    )


@pytest.mark.parametrize("name", [*TEXT_FORMATS, "kto"])
def test_rejects_say_how_to_keep_a_row(tmp_path: Path, name: str) -> None:
    """Following it keeps the row."""
    judged = {"check": {"reward": 1}}
    source = make_run(tmp_path, *(record | judged for record in (INVENTED, TOKEN, PLAIN)))
    reasons = why(source, formats=name)
    assert {id: text.rpartition("; ")[2] for (id, _), text in reasons.items()} == {
        "t0": "--accept_rows=unknown_tool keeps such rows",
        "t1": "--accept_rows=control_token keeps such rows",
    }
    training_rows = rows(source, name, accept_rows="unknown_tool,control_token")
    assert [row["id"] for row in training_rows] == ["t0", "t1", "t2"]


def test_a_call_of_a_tool_that_was_not_offered_is_reported_unchanged(tmp_path: Path) -> None:
    source = make_run(tmp_path, INVENTED)
    (row,) = rows(source, "openai", accept_rows="unknown_tool")
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert row["messages"][1]["tool_calls"][0]["function"]["name"] == "tmep"
    assert row["messages"][2]["content"] == "Error: no"
    (row,) = rows(source, "llamafactory", accept_rows="unknown_tool")
    assert json.loads(row["conversations"][1]["value"]) == {"name": "tmep", "arguments": {}}


@pytest.mark.parametrize(
    ("record", "reason", "written"),
    [(BROKEN, "arguments_not_json", '{"city": "Li'), (A_LIST, "arguments_not_object", "[1]")],
)
def test_arguments_that_are_not_an_object_are_a_string_where_calls_are_text(
    tmp_path: Path, record: dict[str, Any], reason: str, written: str
) -> None:
    source = make_run(tmp_path, record)
    (row,) = rows(source, "hermes", accept_rows=reason)
    said = row["conversations"][2]["value"].partition("<tool_call>\n")[2]
    parsed = json.loads(said.removesuffix("\n</tool_call>"))
    assert parsed == {"name": "temp", "arguments": written}
    assert row["conversations"][3]["value"].count("Error: no") == 1


KEPT = "--accept_rows=arguments_not_json"


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("openai", f"--arguments=text {KEPT} keeps such rows"),
        ("llamafactory", f"llamafactory cannot hold this; export --format=hermes {KEPT} can"),
        ("atif", f"atif cannot hold this; export --format=hermes {KEPT} can"),
    ],
)
def test_where_calls_are_objects_they_refuse_the_row(tmp_path: Path, name: str, how: str) -> None:
    """Templates and loaders want objects there; the reject says how the row can be kept."""
    source = make_run(tmp_path, BROKEN)
    (reasons,) = why(source, formats=name, accept_rows="arguments_not_json").values()
    assert reasons.startswith("arguments_not_json: turn 1, call 1 (temp): ")
    assert reasons.endswith(f"; {how}")


@pytest.mark.parametrize("names", ["openai", "llamafactory", "hermes,openai"])
def test_an_export_says_how_rows_are_kept_whose_arguments_are_no_object(
    tmp_path: Path, names: str
) -> None:
    directory = str(make_run(tmp_path, BROKEN, A_LIST).run_dir)
    told = (
        "rows whose arguments are no JSON object are kept as written by "
        "--accept_rows=arguments_not_json,arguments_not_object: in hermes, and with "
        "--arguments text in openai, dpo and kto"
    )
    assert told in run(tmp_path, "export", directory, "--format", names).stdout
    kept = ("--format=openai,hermes", "--arguments=text", f"{KEPT},arguments_not_object")
    said = run(tmp_path, "export", directory, *kept).stdout
    assert "rows whose arguments" not in said
    assert "2 rows of openai" in said


def test_tags_in_a_text_are_kept_where_they_are_not_structure(tmp_path: Path) -> None:
    source = make_run(tmp_path, TAGGED)
    (row,) = rows(source, "openai", accept_rows="marker_in_text")
    assert row["messages"][-1]["content"] == "A call is <tool_call>{}</tool_call>."
    for name in ("hermes", "llamafactory"):
        (reasons,) = why(source, formats=name, accept_rows="marker_in_text").values()
        assert reasons.endswith("export --format=openai --accept_rows=marker_in_text can")


def test_tags_in_results_and_arguments_are_kept_the_same_way(tmp_path: Path) -> None:
    record = record_of(
        user(),
        assistant("", call('{"q": "</tool_call>"}')),
        result("</tool_response>"),
        assistant("Hi."),
    )
    source = make_run(tmp_path, record)
    (reasons,) = why(source, formats="openai", accept_rows="marker_in_arguments").values()
    assert reasons.startswith("marker_in_result: ")
    both = {"accept_rows": "marker_in_arguments,marker_in_result"}
    assert len(rows(source, "openai", **both)) == 1
    (reasons,) = why(source, formats="llamafactory", **both).values()
    assert reasons.startswith("marker_in_arguments: ")


def test_each_format_refuses_for_itself(tmp_path: Path) -> None:
    """And what no format takes is in none, with any options."""
    source = make_run(tmp_path, BROKEN, TAGGED, PLAIN)
    accept = "arguments_not_json,marker_in_text"
    assert set(why(source, formats="hermes,openai,raw", accept_rows=accept)) == {
        ("t0", "openai"),
        ("t1", "hermes"),
    }
    assert set(why(source, formats="hermes,openai,raw")) == {("t0", None), ("t1", None)}
    assert set(why(source, formats="parquet,raw", accept_rows="marker_in_text")) == {("t0", None)}


def test_a_rejected_sample_does_not_count_among_the_best(tmp_path: Path) -> None:
    worse, best = PLAIN | {"check": {"reward": 0.1}}, INVENTED | {"check": {"reward": 0.9}}
    source = make_run(tmp_path, worse, best, samples=2)
    filters = {"best_n": 1}
    assert [row["id"] for row in rows(source, "openai", filters=filters)] == ["t0"]
    training_rows = rows(source, "openai", filters=filters, accept_rows="unknown_tool")
    assert [row["id"] for row in training_rows] == ["t0#s1"]


def test_documents_hold_all_but_calls_without_an_object(tmp_path: Path) -> None:
    directory, _ = export_to_dataset(
        make_run(tmp_path, INVENTED, TAGGED, TOKEN, BROKEN), formats="atif"
    )
    kept = [row["session_id"] for row in lines(directory / "atif" / "train.jsonl")]
    assert kept == ["t0", "t1", "t2"]


def test_every_reason_of_accept_rows_is_supported_by_some_format() -> None:
    """And the format that a reject names can."""
    formats = [format for name in format_names() if isinstance(format := load_kind(name), Format)]
    assert {reason for format in formats for reason in format.holds} == set(get_args(RowFlaw))
    for format in formats:
        assert format.accepts <= format.holds, format.name
        assert format.how_to_keep("unanswered_call") == format.how_to_keep("min_turns") == ""
        for reason in get_args(RowFlaw):
            how = format.how_to_keep(reason)
            other = re.search(r"--format=(\w+)", how)
            told = Style(
                tolerance=Tolerance(frozenset({Reason(reason)})),
                arguments="text" if "--arguments=text" in how else "objects",
            )
            limited = (load_format(other[1]) if other else format).limit(told)
            assert reason in limited.tolerance.accepts, (format.name, reason)


def test_a_dataset_with_accepted_rows_checks_itself(tmp_path: Path) -> None:
    source = make_run(tmp_path, INVENTED, BROKEN, TOKEN, PLAIN)
    accept = "unknown_tool,arguments_not_json"
    directory, _ = export_to_dataset(source, formats="hermes,openai", accept_rows=accept)
    assert list(find_problems(source, directory)) == []


def test_a_dataset_of_an_older_program_still_checks(tmp_path: Path) -> None:
    """Its recipe knows nothing of what may be accepted."""
    source = make_run(tmp_path, INVENTED, PLAIN)
    directory, manifest = export_to_dataset(source, formats="hermes")
    for key in ("accept_rows", "empty_think"):
        del manifest["recipe"][key]
    for key in ("control_tokens", "hidden_reasoning", "shortened_views", "max_interrupted_calls"):
        del manifest["recipe"]["filters"][key]
    (directory / "manifest.json").write_text(json.dumps(manifest))
    assert list(find_problems(source, directory)) == []


def test_the_training_file_of_a_run_can_have_them_too(tmp_path: Path) -> None:
    """What counts as kept follows."""
    step = {"tool_calls": [{"name": "fly", "arguments": {}}]}
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [step, {"content": "done"}]})
    training = tmp_path / "trajectories" / "r.jsonl"
    run_dir = training.with_suffix("")
    assert run(tmp_path, **SCRIPTED).returncode == 0
    (reject,) = lines(run_dir / "exports" / "rejects.jsonl")
    assert reject["detail"].endswith("; --accept_rows=unknown_tool keeps such rows")
    assert compute_statistics(run_dir, style=Style())["kept"] == 0
    done = run(tmp_path, **SCRIPTED, accept_rows="unknown_tool")
    assert done.returncode == 0, done.stderr
    assert len(lines(training)) == 1
    accepting = run_style({"accept_rows": ["unknown_tool"]})
    assert compute_statistics(run_dir, style=accepting)["kept"] == 1
    refused = run(tmp_path, **SCRIPTED, accept_rows="unfinished")
    assert refused.returncode == 2
    assert "accept_rows" in refused.stderr
    assert "unknown_tool" in refused.stderr


def test_an_agent_saves_no_think_block_for_a_turn_that_hides_its_reasoning() -> None:
    messages = stored_messages([user(), assistant("A"), user(), assistant("B")])
    told = to_conversations(messages, [], [5])
    assert [turn["value"] for turn in told if turn["from"] == "gpt"] == [
        "<think>\n</think>\nA",
        "B",
    ]
