"""Several user turns in one conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.options import AgentOptions
from agent.state.forking import NotForkable, events_until
from agent.state.trajectory import Trajectory
from runs.dataset.row import RowRules
from tests.playing import OPENING, call, calls, play, say

ECHO = calls(call("echo", text="x"))
MORE = ("and then?", "anything else?")


def test_each_text_follows_an_answer(tmp_path: Path) -> None:
    played = play(tmp_path, [say("one"), ECHO, say("two"), say("three")], user_turns=MORE)
    assert played.status == "completed"
    assert played.roles == [
        *("user", "assistant", "user", "assistant", "tool", "assistant", "user", "assistant")
    ]
    said = [message["content"] for message in played.messages if message["role"] == "user"]
    assert said == ["go", *MORE]
    assert "notes" not in played.messages[2]
    assert [len(request.messages) for request in played.requests] == [1, 3, 5, 7]
    record = played.trajectory.to_record()
    assert [(u["turn"], u["reason"], u["text"]) for u in record["user_turns"]] == [
        (1, "user_turns", MORE[0]),
        (3, "user_turns", MORE[1]),
    ]


def test_a_conversation_without_them_has_no_key_in_its_record(tmp_path: Path) -> None:
    assert "user_turns" not in play(tmp_path, [say("one")]).trajectory.to_record()


def test_a_replay_of_any_beginning_continues_to_the_same_messages(tmp_path: Path) -> None:
    script = [say("one"), ECHO, say("two"), say("three")]
    whole = play(tmp_path / "whole", script, user_turns=MORE)
    for count in range(1, len(whole.events)):
        past = whole.events[:count]
        again = play(tmp_path / str(count), script, past=past, user_turns=MORE)
        assert again.status == "completed"
        assert again.messages == whole.messages
        assert [event for event in again.events if event["kind"] == "user"] != []
        assert sum(event["kind"] == "reply" for event in again.events) == 4


@pytest.mark.parametrize("options", [{}, {"final_summary": True}])
def test_at_max_turns_the_rest_is_not_sent(tmp_path: Path, options: dict[str, Any]) -> None:
    script = [say("one"), say("two"), say("three")]
    played = play(tmp_path, script, user_turns=MORE, max_turns=2, **options)
    assert played.end == ("max_turns", "1 of the row's user turns were not sent")
    assert played.roles == ["user", "assistant", "user", "assistant"]


def test_the_last_answer_at_max_turns_completes(tmp_path: Path) -> None:
    played = play(tmp_path, [say("1"), say("2"), say("3")], user_turns=MORE, max_turns=3)
    assert played.status == "completed"


@pytest.mark.parametrize(
    "limit",
    [{"max_cost_usd": 1.5, "cost_usd": 1.0}, {"max_total_tokens": 15, "reply_tokens": 10}],
)
def test_a_budget_is_that_of_all_user_turns(tmp_path: Path, limit: dict[str, Any]) -> None:
    played = play(tmp_path, [say("one"), say("two"), say("three")], user_turns=MORE, **limit)
    assert (played.status, played.trajectory.turns) == ("budget", 2)


def test_the_last_answer_is_compared_with_the_expected_one(tmp_path: Path) -> None:
    script = [say("42"), say("41"), say("42")]
    played = play(tmp_path, script, user_turns=MORE[:1], check_expected=True, expected="42")
    assert (played.status, played.trajectory.turns) == ("completed", 3)
    assert [note["reason"] for note in played.trajectory.notes] == ["expected"]


def test_a_cut_answer_is_not_replied_to(tmp_path: Path) -> None:
    played = play(tmp_path, [say("on", finish_reason="length"), say("x")], user_turns=MORE)
    assert (played.status, played.trajectory.turns) == ("length", 1)


def test_a_branch_continues_after_a_user_turn(tmp_path: Path) -> None:
    script = [say("one"), ECHO, say("two"), say("three")]
    played = play(tmp_path / "a", script, user_turns=MORE)
    record = {**played.trajectory.to_record(), "options": {}}
    events = events_until(record, 3, opening=OPENING)
    branch = Trajectory(OPENING, events)
    assert branch.messages == played.messages[:7]
    assert [user.get("inherited") for user in branch.user_turns] == [True, True]
    with pytest.raises(NotForkable, match="does not continue"):
        events_until(record, 4, opening=OPENING)


@pytest.mark.parametrize(
    ("turns", "options", "words"),
    [
        ("x", {}, r"`user_turns` must be a list of texts \(got text\)"),
        (["x", 1], {}, r"`user_turns\[1\]` must be text that is not blank \(got a number\)"),
        ([" "], {}, r"`user_turns\[0\]` must be text that is not blank \(got a blank text\)"),
        (["x"], {"completion_tools": True}, "does not go together with completion_tools"),
    ],
)
def test_a_wrong_row_is_refused(turns: Any, options: dict[str, Any], words: str) -> None:
    rules = RowRules(options=AgentOptions(**options))
    with pytest.raises(ValueError, match=words):
        rules.read({"prompt": "x", "user_turns": turns})


def test_an_edited_text_is_new_work_and_rows_without_them_are_as_before() -> None:
    rules = RowRules()
    assert rules.rollout_columns({"prompt": "x"}) == {"prompt": "x"}
    row = {"prompt": "x", "user_turns": ["y"]}
    assert rules.rollout_columns(row) == row
