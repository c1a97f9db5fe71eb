"""Several messages of the user: those of a row, and those of a model that plays the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.command_agent import CommandAgent
from agent.options import AgentOptions, SimulatedUser
from runs.dataset.row import RowRules
from tests.playing import call, calls, play, say

ANN = {"system_prompt": "You are Ann. You want tea.", "stop": "STOP"}


def texts(played: Any) -> list[tuple[str, str]]:
    return [
        (m["role"], m["content"]) for m in played.messages if m["role"] in ("user", "assistant")
    ]


def test_each_text_of_a_row_follows_an_answer(tmp_path: Path) -> None:
    script = [say("one"), calls(call("echo", text="x")), say("two"), say("three")]
    played = play(tmp_path, script, user_turns=["And?", "And then?"])
    assert played.status == "completed"
    assert texts(played)[1:] == [
        *(("assistant", "one"), ("user", "And?")),
        *(("assistant", ""), ("assistant", "two"), ("user", "And then?"), ("assistant", "three")),
    ]
    assert "notes" not in played.messages[2], "it is the user's, not the runtime's"


def test_the_turn_limit_is_that_of_the_whole_conversation(tmp_path: Path) -> None:
    played = play(tmp_path, [say("one"), say("two")], user_turns=["And?", "Then?"], max_turns=2)
    assert played.status == "max_turns"
    assert texts(played)[-1] == ("assistant", "two"), "no message stays without an answer"


@pytest.mark.parametrize(
    "user",
    [{"user_turns": ["And?"]}, {"simulated_user": {**ANN, "script": [say("And?")]}}],
)
def test_an_answer_at_the_turn_limit_is_not_asked_for_again(
    tmp_path: Path, user: dict[str, Any]
) -> None:
    script = [say("one"), say("again")]
    played = play(tmp_path, script, max_turns=1, final_summary=True, **user)
    assert played.status == "max_turns"
    assert texts(played) == [("user", "go"), ("assistant", "one")]


def test_the_last_answer_is_compared(tmp_path: Path) -> None:
    given: dict[str, Any] = {"check_expected": True, "expected": "42", "user_turns": ["And?"]}
    played = play(tmp_path, [say("41"), say("42")], **given)
    assert (played.status, played.trajectory.notes_of("expected")) == ("completed", 0)


def test_a_model_plays_the_user_until_it_writes_its_word(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("Green."), say("Thanks. STOP")]}
    script = [say("Which tea?"), calls(call("echo", text="x")), say("Here it is.")]
    played = play(tmp_path, script, simulated_user=user)
    assert played.status == "completed"
    assert ("user", "Green.") in texts(played)
    assert "STOP" not in str(played.messages)
    record = played.trajectory.to_record()
    assert [inner["name"] for inner in record["inner"]] == ["simulated_user"] * 2
    assert record["api_calls"] == 5
    seen = record["inner"][1]["messages"]
    assert [m["role"] for m in seen] == ["system", *["user", "assistant"] * 3]
    assert "x" not in {m["content"] for m in seen}, "users see no results of tools"
    assert [m["content"] for m in seen[3:-1]] == ["Which tea?", "Green.", "Here it is."]


def test_an_answer_that_was_cut_and_continued_is_one(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("STOP")]}
    script = [say("Half an ", finish_reason="length"), say("answer.")]
    played = play(tmp_path, script, simulated_user=user, continue_cut=1)
    seen = played.trajectory.to_record()["inner"][0]["messages"]
    assert seen[-2] == {"role": "user", "content": "Half an answer."}


def test_it_writes_so_many_messages_at_most(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("More.")] * 3, "max_turns": 2}
    played = play(tmp_path, [say("a"), say("b"), say("c")], simulated_user=user)
    assert (played.status, played.trajectory.turns) == ("completed", 3)


def test_a_user_that_says_nothing_ends_the_conversation(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("")] * 3}
    played = play(tmp_path, [say("a")], simulated_user=user)
    assert played.status == "errors"
    assert played.end.reason is not None
    assert played.end.reason.startswith("the simulated user ended as errors")


@pytest.mark.parametrize("finish", ["length", "refusal"])
def test_a_cut_message_is_never_sent(tmp_path: Path, finish: str) -> None:
    user = {**ANN, "script": [say("I wan", finish_reason=finish), say("STOP")]}
    script = [say("a"), say("b")]
    whole = play(tmp_path / "a", script, simulated_user=user)
    assert whole.end == ("errors", f"the simulated user ended as {finish}")
    resumed = play(tmp_path / "b", script, past=whole.events, simulated_user=user)
    assert resumed.end == whole.end
    assert (resumed.messages, resumed.requests) == (whole.messages, [])


def test_its_cost_counts_for_the_budget(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("More.")] * 3}
    played = play(
        tmp_path, [say("a"), say("b")], simulated_user=user, cost_usd=0.5, max_cost_usd=0.7
    )
    assert (played.status, played.trajectory.turns) == ("budget", 1)


def test_a_message_that_was_paid_for_is_not_asked_for_again(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("Green."), say("STOP")]}
    script = [say("Which?"), say("Here.")]
    whole = play(tmp_path / "a", script, simulated_user=user)
    for length in range(1, len(whole.events)):
        past = whole.events[:length]
        known = play_events(past)
        resumed = play(tmp_path / str(length), script, past=past, simulated_user=user)
        assert resumed.messages == whole.messages
        assert len(resumed.requests) == len(whole.requests) - known


def play_events(events: list[Any]) -> int:
    """How many replies there are, those of the user too."""
    inner = [event["event"] if event["kind"] == "sub" else event for event in events]
    return sum(event["kind"] == "reply" for event in inner)


def test_an_agent_that_is_a_command_has_one_message() -> None:
    agent = CommandAgent(name="a", command=("agent", "{prompt}"), speaks=("openai_chat",))
    with pytest.raises(ValueError, match="`user_turns`: means nothing with an agent"):
        RowRules(agent=agent).read({"prompt": "x", "user_turns": ["a"]})


RULES = RowRules(options=AgentOptions(simulated_user=SimulatedUser(model="openai:m", stop="STOP")))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"user_turns": "more"}, "`user_turns` must be a list of texts"),
        ({"user_turns": ["a", " "]}, "`user_turns[1]` is empty"),
        ({"user_turns": ["a"], "agent_options": {"completion_tools": True}}, "completion_tools"),
        ({"simulated_user": {"system_prompt": "x"}}, "give --simulated_user"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        RowRules().read({"prompt": "x", **row})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({}, "`simulated_user.system_prompt`: missing"),
        ({"simulated_user": "Ann"}, "`simulated_user` must be an object"),
        ({"simulated_user": {**ANN, "model": "openai:n"}}, "sets its model"),
        ({"simulated_user": {**ANN, "words": 3}}, "simulated_user.words"),
        ({"simulated_user": {**ANN, "max_turns": 0}}, "simulated_user.max_turns"),
        ({"simulated_user": {**ANN, "script": [{"text": "x"}]}}, "`simulated_user`: script"),
        ({"simulated_user": ANN, "user_turns": ["a"]}, "`user_turns` does not go together"),
        ({"simulated_user": ANN, "agent_options": {"completion_tools": True}}, "together"),
    ],
)
def test_a_simulated_user_that_cannot_be_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("[", r"\[")):
        RULES.read({"prompt": "x", **row})


def test_a_row_says_who_its_user_is() -> None:
    spec = RULES.read({"prompt": "x", "simulated_user": {"system_prompt": "You are Ann."}}).spec
    assert spec.options.simulated_user is not None
    assert spec.options.simulated_user.model == "openai:m"
    assert spec.options.simulated_user.instructions().startswith("You are Ann.")


def test_what_the_user_says_decides_the_conversation() -> None:
    plain = {"prompt": "x"}
    for more in ({"user_turns": ["a"]}, {"simulated_user": {"system_prompt": "You are Bo."}}):
        assert RULES.rollout_columns({**plain, **more}) != RULES.rollout_columns(plain)
