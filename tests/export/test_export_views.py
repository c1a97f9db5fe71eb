"""A row says what of its conversation the model did not see as it stands there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.messages.message import Message
from agent.options import AgentOptions
from agent.runner import was_compacted
from agent.views.views import compact, first_compacted_reply
from batch_trajectories.export.conversation.validity import Rejected
from tests.agent.test_options import ANSWER
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import judged_record, make_run, rejects, rows
from tests.helpers.playing import Played, call_echo, play, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from tests.helpers.stored import to_record, to_row

LONG = "R" * 300


def record_from(played: Played, **options: Any) -> dict[str, Any]:
    """The record of a conversation that was played with these options."""
    offered = [{"type": "function", "function": {"name": "echo", "parameters": {}}}]
    given = AgentOptions(**options)
    return record_of(user()) | {
        **played.trajectory.to_record(),
        "tools": offered,
        "options": given.given(),
        "view_compacted": was_compacted(played.trajectory, given),
        "status": played.status,
    }


def metadata_of(record: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = json.loads(to_row(to_record(record))["metadata"])
    return metadata


@pytest.mark.parametrize("after", [1, 2, 3, 9])
def test_replies_that_saw_older_messages_in_short_are_counted(tmp_path: Path, after: int) -> None:
    script = [
        call_echo("a", content="one"),
        call_echo(LONG, content="two"),
        call_echo("b"),
        call_echo("c", content="three", reasoning=LONG),
        call_echo("d", content="four"),
        ANSWER,
    ]
    played = play(tmp_path, script, compact_after=after)
    seen = sum("_compacted" in json.dumps(list(request.messages)) for request in played.requests)
    record = record_from(played, compact_after=after)
    assert metadata_of(record).get("view_compacted", 0) == seen
    assert record["view_compacted"] is (seen > 0)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12), st.integers(1, 4))
def test_the_place_from_which_they_did_is_that_of_the_view(
    said: list[tuple[bool, bool]], after: int
) -> None:
    messages: list[Message] = []
    for has_text, is_long in said:
        text = "x" if has_text else " "
        messages.append({"role": "user", "content": "go"})
        messages.append({"role": "assistant", "content": text, "reasoning": LONG * is_long})
    first = first_compacted_reply(messages, after)
    for place in range(1, len(messages), 2):
        before = messages[:place]
        in_short = any(a is not b for a, b in zip(compact(before, after), before, strict=True))
        assert in_short is (place >= first)


def test_replies_that_saw_a_summary_are_counted(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    given: dict[str, Any] = {"summarize_over_messages": 6, "summarize_keep": 2}
    played = play(tmp_path, script, **given)
    seen = sum("[Summary of" in json.dumps(list(request.messages)) for request in played.requests)
    metadata = metadata_of(record_from(played, **given))
    assert (metadata["view_compacted"], metadata["summaries"]) == (seen, 1)
    assert seen == 2


def test_a_summary_that_was_not_used_is_none(tmp_path: Path) -> None:
    given: dict[str, Any] = {"summarize_over_messages": 6, "summarize_keep": 2}
    played = play(
        tmp_path, [call_echo("a"), call_echo("b"), call_echo("c"), say(" "), ANSWER], **given
    )
    metadata = metadata_of(record_from(played, **given))
    assert metadata.keys().isdisjoint({"view_compacted", "summaries"})


def test_results_that_the_model_saw_cut_are_counted(tmp_path: Path) -> None:
    script = [call_echo("x" * 500), call_echo("short"), ANSWER]
    record = record_from(play(tmp_path, script, observation_chars=200), observation_chars=200)
    assert metadata_of(record)["cut_results"] == 1


def test_results_that_an_export_cuts_are_counted_too(tmp_path: Path) -> None:
    record = record_of(
        user(),
        assistant("", call(), call(id="c2")),
        result("x" * 500),
        result("short", id="c2"),
        assistant("Hi."),
    )
    (row,) = rows(make_run(tmp_path, record), "openai", max_tool_chars=100)
    assert json.loads(row["metadata"])["cut_by_export"] == 1
    (row,) = rows(make_run(tmp_path, record), "openai", max_tool_chars=500)
    assert "cut_by_export" not in json.loads(row["metadata"])


def resumed_event(*calls: str, kept: bool = True) -> dict[str, Any]:
    return {"turn": 1, "interrupted": list(calls), "repeated": [], "workspace_kept": kept}


def test_a_workspace_that_was_lost_is_counted() -> None:
    record = record_of(
        user(), assistant("Hi."), resumes=[resumed_event(), resumed_event(kept=False)]
    )
    metadata = metadata_of(record)
    assert (metadata["interrupted_calls"], metadata["workspace_lost"]) == (0, 1)


def test_what_was_seen_whole_says_nothing_more() -> None:
    plain = record_of(user(), assistant("Hi."), resumes=[resumed_event()], options={"max_turns": 3})
    more = plain | {"view_compacted": False}
    assert to_row(to_record(more)) == to_row(to_record(plain))
    keys = {"view_compacted", "summaries", "cut_results", "cut_by_export", "workspace_lost"}
    assert metadata_of(plain).keys().isdisjoint(keys)


def test_each_side_of_a_pair_says_it(tmp_path: Path) -> None:
    broken = judged_record(0.0, "B") | {"resumes": [resumed_event("c1", kept=False)]}
    source = make_run(tmp_path, judged_record(1.0, "A") | {"resumes": []}, broken, samples=2)
    assert rows(source, "dpo") == [], "the row that it would be was interrupted"
    (pair,) = rows(source, "dpo", accept_rows="interrupted")
    parsed = json.loads(pair["metadata"])
    assert parsed["chosen"].keys() == {"id", "reward"}
    assert parsed["rejected"]["interrupted_calls"] == parsed["rejected"]["workspace_lost"] == 1


def test_filters_leave_them_out(tmp_path: Path) -> None:
    """Also where an older program recorded no more than that it was so."""
    short = record_of(user(), assistant("Hi."), view_compacted=True)
    broken = record_of(user(), assistant("Ho."), resumes=[resumed_event("a", "b")])
    source = make_run(tmp_path, short, broken, record_of(user(), assistant("Hm.")))

    def left_out(**filters: Any) -> dict[str, str]:
        given = {"exact_duplicates": False, **filters}
        return rejects(source, formats="openai", filters=given)

    assert left_out(shortened_views="keep", max_interrupted_calls=2) == {}
    assert left_out(shortened_views="reject") == {"t0": "shortened_views", "t1": "interrupted"}
    assert left_out(max_interrupted_calls=1) == {"t1": "max_interrupted_calls"}
    assert left_out(max_interrupted_calls=0) == {"t1": "max_interrupted_calls"}


def test_rows_with_an_interrupted_result_are_left_out_unless_they_are_accepted(
    tmp_path: Path,
) -> None:
    broken = record_of(user(), assistant("Ho."), resumes=[resumed_event("a")])
    resumed_only = record_of(user(), assistant("Hi."), resumes=[resumed_event()])
    source = make_run(tmp_path, broken, resumed_only)
    assert rejects(source, formats="openai") == {"t0": "interrupted"}
    assert rejects(source, formats="openai", accept_rows="interrupted") == {}
    assert rejects(source, formats="openai", mask={"interrupted_result": True}) == {}
    with pytest.raises(Rejected, match="interrupted"):
        to_row(to_record(broken))


def test_a_branch_of_a_conversation_with_an_interrupted_result_is_left_out_too(
    tmp_path: Path,
) -> None:
    """The resume that says so is in its parent's record, the result in both."""
    cut_off = result("Error: cut off", is_error=True) | {"details": {"failure": "interrupted"}}
    branch = record_of(user(), assistant("", call()), cut_off, assistant("Hi."))
    branch["fork"] = {"run": "r", "record": "t0", "turn": 1, "branch": 0}
    branch["turns"][0]["inherited"] = True
    source = make_run(tmp_path, branch)
    assert rejects(source, formats="openai") == {"t0": "interrupted"}
    assert rejects(source, formats="openai", filters={"max_interrupted_calls": 1}) == {}
    too_many = rejects(source, formats="openai", filters={"max_interrupted_calls": 0})
    assert too_many == {"t0": "max_interrupted_calls"}
    (row,) = rows(source, "openai", accept_rows="interrupted")
    assert json.loads(row["metadata"])["interrupted_calls"] == 1


@pytest.mark.slow
def test_the_training_file_of_a_run_says_it(tmp_path: Path) -> None:
    step = {"tool_calls": [{"name": "list_files", "arguments": {}}]}
    script = [
        {"content": "one", "reasoning": LONG, **step},
        {"content": "two", **step},
        {"content": "done"},
    ]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": script})
    (tmp_path / "run.yaml").write_text("compact_after: 1\n")
    done = run(tmp_path, **SCRIPTED, config="run.yaml")
    assert done.returncode == 0, done.stderr
    (row,) = lines(tmp_path / "trajectories" / "r.jsonl")
    assert json.loads(row["metadata"])["view_compacted"] == 1
