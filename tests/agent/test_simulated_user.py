"""A model that plays the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.options import AgentOptions
from agent.state.forking import events_until
from agent.state.trajectory import Trajectory
from runs.dataset.row import RowRules
from tests.playing import OPENING, Played, call, calls, play, say

ECHO = calls(call("echo", text="x"))
SCRIPT = [say("one"), ECHO, say("two"), say("three")]
USER = [say("more"), say("even more"), say("Thanks. ###STOP###")]


def played(root: Path, script: list[Any], user: list[Any], **given: Any) -> Played:
    own = {key: given.pop(key) for key in ("stop", "max_turns_of_user") if key in given}
    own = {key.removesuffix("_of_user"): value for key, value in own.items()}
    simulated = {"model": "scripted", "system_prompt": "You want much.", "script": user, **own}
    return play(root, script, simulated_user=simulated, **given)


def user_of(done: Played) -> Trajectory:
    return done.trajectory.inner["simulated_user#1"].trajectory


def test_it_replies_to_each_answer_until_its_stop_word(tmp_path: Path) -> None:
    done = played(tmp_path, SCRIPT, USER)
    assert done.end == ("completed", None)
    said = [(m["role"], m["content"]) for m in done.messages if m["role"] != "tool"]
    assert said == [
        ("user", "go"),
        ("assistant", "one"),
        ("user", "more"),
        ("assistant", ""),
        ("assistant", "two"),
        ("user", "even more"),
        ("assistant", "three"),
    ]
    inner = user_of(done)
    assert [message["role"] for message in inner.messages] == [
        *("system", "user", "assistant"),
        *("user", "assistant", "user", "assistant", "user", "assistant"),
    ]
    assert [message["content"] for message in inner.messages[2:]] == [
        *("go", "one", "more", "two", "even more", "three", "Thanks. ###STOP###")
    ]
    system = inner.messages[0]["content"]
    assert system.startswith("You want much.")
    assert "###STOP###" in system
    record = done.trajectory.to_record()
    assert [inner["name"] for inner in record["inner"]] == ["simulated_user"]
    assert {user["reason"] for user in record["user_turns"]} == {"simulated_user"}
    assert record["api_calls"] == 7


def test_it_is_offered_no_tools(tmp_path: Path) -> None:
    done = played(tmp_path, SCRIPT, USER)
    shown = [len(request.tools) for request in done.requests]
    assert shown == [5, 0, 5, 5, 0, 5, 0]


def test_it_sends_at_most_max_turns_messages(tmp_path: Path) -> None:
    done = played(tmp_path, SCRIPT, USER, max_turns_of_user=1)
    assert done.end == ("completed", "the simulated user sent its 1 messages")
    assert user_of(done).turns == 1
    assert done.messages[-1]["content"] == "two"


def test_another_stop_word(tmp_path: Path) -> None:
    done = played(tmp_path, SCRIPT, [say("BYE")], stop="BYE")
    assert (done.status, done.trajectory.turns) == ("completed", 1)


def test_a_replay_of_any_beginning_continues_to_the_same_record(tmp_path: Path) -> None:
    whole = played(tmp_path / "whole", SCRIPT, USER)
    for count in range(1, len(whole.events)):
        again = played(tmp_path / str(count), SCRIPT, USER, past=whole.events[:count])
        assert again.end == whole.end
        assert again.messages == whole.messages
        assert user_of(again).messages == user_of(whole).messages
        assert again.trajectory.api_calls() == 7, f"a reply was paid again after event {count}"


@pytest.mark.parametrize(
    ("limit", "status"),
    [
        ({"max_cost_usd": 2.5, "cost_usd": 1.0}, "budget"),
        ({"max_total_tokens": 25, "reply_tokens": 10}, "budget"),
        ({"max_turns": 1}, "max_turns"),
    ],
)
def test_limits_are_those_of_the_whole_conversation(
    tmp_path: Path, limit: dict[str, Any], status: str
) -> None:
    done = played(tmp_path, SCRIPT, USER, **limit)
    assert done.status == status
    assert done.trajectory.api_calls() == (3 if status == "budget" else 2)


def test_its_stop_word_after_the_last_turn_completes(tmp_path: Path) -> None:
    assert played(tmp_path, SCRIPT, USER[2:], max_turns=1).status == "completed"


@pytest.mark.parametrize(
    ("user", "words"),
    [
        ([say("")] * 3, "3 unusable replies in a row, the last one blank"),
        ([say("I wan", finish_reason="length")], "the reply of the simulated user ended as length"),
        ([say("no", finish_reason="refusal")], "ended as refusal"),
    ],
)
def test_a_user_without_a_usable_reply_ends_it(tmp_path: Path, user: list[Any], words: str) -> None:
    done = played(tmp_path / "a", SCRIPT, user)
    assert done.status == "errors"
    assert words in (done.end.reason or "")
    again = played(tmp_path / "b", SCRIPT, user, past=done.events)
    assert again.end == done.end
    assert again.trajectory.api_calls() == done.trajectory.api_calls()


def test_the_expected_answer_is_that_to_its_last_message(tmp_path: Path) -> None:
    script = [say("42"), say("41"), say("42")]
    done = played(tmp_path, script, [say("sure?"), say("###STOP###")], check_expected=True,
                  expected="42")  # fmt: skip
    assert (done.status, done.trajectory.turns) == ("completed", 3)


def test_a_branch_asks_it_again_from_what_was_said(tmp_path: Path) -> None:
    whole = played(tmp_path / "a", SCRIPT, USER)
    record = {**whole.trajectory.to_record(), "options": {}}
    past = events_until(record, 3, opening=OPENING)
    script = [*SCRIPT[:3], say("other")]
    branch = played(tmp_path / "b", script, [say("###STOP###")], past=past)
    assert branch.status == "completed"
    assert [m["content"] for m in user_of(branch).messages[2:]] == [
        *("go", "one", "more", "two", "even more", "other", "###STOP###")
    ]


SCENARIO = {"system_prompt": "You want much."}


@pytest.mark.parametrize(
    ("row", "options", "words"),
    [
        ({"simulated_user": "x"}, {}, "`simulated_user` must be an object"),
        ({"simulated_user": {"stop": "x"}}, {}, "`simulated_user.system_prompt` is missing"),
        ({"simulated_user": {"model": "m"}}, {}, "`simulated_user.model`: cannot be set per row"),
        ({"simulated_user": {**SCENARIO, "max_turns": 0}}, {}, "`simulated_user.max_turns`"),
        ({"simulated_user": {**SCENARIO, "script": []}}, {}, "`simulated_user`: script"),
        ({"simulated_user": SCENARIO, "user_turns": ["x"]}, {}, "`user_turns` does not go togeth"),
        ({"agent_options": {"simulated_user": SCENARIO}}, {}, "use the column `simulated_user`"),
        ({}, {"simulated_user": {}}, "`simulated_user.system_prompt` is missing"),
        ({"simulated_user": SCENARIO}, {"completion_tools": True}, "does not go together"),
    ],
)
def test_a_wrong_row_is_refused(row: dict[str, Any], options: dict[str, Any], words: str) -> None:
    rules = RowRules(options=AgentOptions(**options))
    with pytest.raises(ValueError, match=words):
        rules.read({"prompt": "x", **row})


def test_a_row_changes_keys_of_the_runs_user() -> None:
    rules = RowRules(options=AgentOptions(simulated_user={"model": "m", "stop": "BYE"}))
    row = {"prompt": "x", "simulated_user": SCENARIO}
    user = rules.read(row).spec.options.simulated_user
    assert user is not None
    assert (user.model, user.stop, user.system_prompt) == ("m", "BYE", "You want much.")
    assert rules.rollout_columns(row) == row
