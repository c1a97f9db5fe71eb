"""Several messages of the user: those of a row, and those of a model that plays the user."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.gateway.command_agent import CommandAgent
from agent.loop.simulated_user import SimulatedUserModel
from agent.messages.message import Event, Message
from agent.messages.tokens import SampledTokens
from agent.models.model import Completion, Request
from agent.models.scripted import ScriptedModel, parse_script
from agent.options import AgentOptions, SimulatedUser
from batch_trajectories.dataset.row import RowRules
from run_agent import AIAgent
from tests.helpers.playing import OPENING, Played, call, calls, play, say

ANN = {"system_prompt": "You are Ann. You want tea.", "stop": "STOP"}


def texts(played: Any) -> list[tuple[str, str]]:
    return [
        (m["role"], m["content"]) for m in played.messages if m["role"] in ("user", "assistant")
    ]


def seen_by_users(played: Played) -> list[list[Message]]:
    """What the user's model was shown, once for each message that it wrote."""
    return [
        list(request.messages)
        for request in played.requests
        if str(request.messages[0]["content"]).startswith(ANN["system_prompt"])
    ]


def test_each_text_of_a_row_follows_an_answer(tmp_path: Path) -> None:
    script = [say("one"), calls(call("echo", text="x")), say("two"), say("three")]
    played = play(tmp_path, script, user_turns=["And?", "And then?"])
    assert played.status == "completed"
    assert texts(played)[1:] == [
        ("assistant", "one"),
        ("user", "And?"),
        ("assistant", ""),
        ("assistant", "two"),
        ("user", "And then?"),
        ("assistant", "three"),
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
    assert (played.status, played.trajectory.count_notes("expected")) == ("completed", 0)


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
    seen = seen_by_users(played)[1]
    assert [m["role"] for m in seen] == ["system", *["user", "assistant"] * 2, "user"]
    assert "x" not in {m["content"] for m in seen}, "users see no results of tools"
    assert [m["content"] for m in seen[3:]] == ["Which tea?", "Green.", "Here it is."]


def test_only_what_the_user_writes_is_stored_and_its_instructions_once(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("Green."), say("Hot."), say("STOP")]}
    script = [say("Which tea?"), say("How?"), say("Here it is.")]
    played = play(tmp_path, script, simulated_user=user)
    inner = played.trajectory.to_record()["inner"]
    assert [[m["role"] for m in one["messages"]] for one in inner] == [
        ["system", "assistant"],
        *[["assistant"]] * 2,
    ]
    assert [one["messages"][-1]["content"] for one in inner] == ["Green.", "Hot.", "STOP"]
    system = seen_by_users(played)[0][0]
    assert inner[0]["messages"][0] == system
    stored = str(played.events)
    assert stored.count(ANN["system_prompt"]) == 1
    assert stored.count("Which tea?") == 1, "the user's calls do not repeat the conversation"


def test_a_conversation_whose_user_stored_all_that_it_saw_continues(tmp_path: Path) -> None:
    """Journals of earlier versions hold the whole conversation with each message of the user."""
    user = {**ANN, "script": [say("Green."), say("Hot."), say("STOP")]}
    script = [say("Which tea?"), say("How?"), say("Here it is.")]
    whole = play(tmp_path / "a", script, simulated_user=user)
    seen = iter(seen_by_users(whole))
    old: list[Event] = []
    for event in copy.deepcopy(whole.events):
        if event["kind"] == "sub" and event["event"]["kind"] == "opening":
            event["event"]["messages"] = next(seen)
        old.append(event)
    for length in range(1, len(old)):
        past = old[:length]
        resumed = play(tmp_path / str(length), script, past=past, simulated_user=user)
        assert (resumed.end, resumed.messages) == (whole.end, whole.messages)
        conversations = [request.messages for request in resumed.requests]
        assert (
            conversations == [request.messages for request in whole.requests][play_events(past) :]
        )


def test_the_ids_of_what_the_user_saw_are_not_stored() -> None:
    sampled = SampledTokens(prompt=b"1234" * 9, completion=b"1234", logprobs=b"5678")

    class Sampling(ScriptedModel):
        async def complete(self, request: Request) -> Completion:
            return replace(await super().complete(request), tokens=sampled)

    async def ask() -> Completion:
        scripted = Sampling(parse_script([say("Green.")]))
        model = SimulatedUserModel(scripted, OPENING, opening_length=0)
        return await model.complete(Request([]))

    completion = asyncio.run(ask())
    assert completion.tokens == SampledTokens(completion=b"1234", logprobs=b"5678")


def test_an_answer_that_was_cut_and_continued_is_one(tmp_path: Path) -> None:
    user = {**ANN, "script": [say("STOP")]}
    script = [say("Half an ", finish_reason="length"), say("answer.")]
    played = play(tmp_path, script, simulated_user=user, continue_cut=1)
    seen = seen_by_users(played)[0]
    assert seen[-1] == {"role": "user", "content": "Half an answer."}


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


@pytest.mark.parametrize(
    ("finish", "status"),
    [
        ("length", "errors"),
        ("refusal", "errors"),
        ("context_exceeded", "user_context_exceeded"),
    ],
)
def test_a_cut_message_is_never_sent(tmp_path: Path, finish: str, status: str) -> None:
    user = {**ANN, "script": [say("I wan", finish_reason=finish), say("STOP")]}
    script = [say("a"), say("b")]
    whole = play(tmp_path / "a", script, simulated_user=user)
    assert whole.end == (status, f"the simulated user ended as {finish}")
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


def test_an_agent_that_is_a_command_has_one_message_unless_it_continues() -> None:
    agent = CommandAgent(name="a", command=("agent", "{prompt}"), speaks=("openai_chat",))
    with pytest.raises(ValueError, match="`user_turns`: agent 'a' has no `continues`"):
        RowRules(agent=agent).read({"prompt": "x", "user_turns": ["a"]})
    agent = agent.model_copy(update={"continues": ("agent", "-c", "{prompt}")})
    read = RowRules(agent=agent).read({"prompt": "x", "user_turns": ["a"]})
    assert read.spec.user_turns == ("a",)


RULES = RowRules(options=AgentOptions(simulated_user=SimulatedUser(model="openai:m", stop="STOP")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"user_turns": "more"}, "`user_turns` must be a list of texts"),
        ({"user_turns": ["a", " "]}, "`user_turns[1]` is empty"),
        ({"user_turns": ["a"], "agent_options": {"completion_tools": True}}, "completion_tools"),
        ({"simulated_user": {"system_prompt": "x"}}, "give --simulated_user"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        RowRules().read({"prompt": "x", **row})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "`simulated_user.system_prompt`: missing"),
        ({"simulated_user": "Ann"}, "`simulated_user` must be an object"),
        ({"simulated_user": {**ANN, "model": "openai:n"}}, "sets its model"),
        ({"simulated_user": {**ANN, "words": 3}}, "simulated_user.words"),
        ({"simulated_user": {**ANN, "max_turns": 0}}, "simulated_user.max_turns"),
        ({"simulated_user": {**ANN, "writes_first": "yes"}}, "simulated_user.writes_first"),
        ({"simulated_user": {**ANN, "script": [{"text": "x"}]}}, "`simulated_user`: script"),
        ({"simulated_user": ANN, "user_turns": ["a"]}, "`user_turns` does not go together"),
        ({"simulated_user": ANN, "agent_options": {"completion_tools": True}}, "together"),
    ],
)
def test_a_simulated_user_that_cannot_be_is_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[")):
        RULES.read({"prompt": "x", **row})


def test_a_row_says_who_its_user_is() -> None:
    spec = RULES.read({"prompt": "x", "simulated_user": {"system_prompt": "You are Ann."}}).spec
    assert spec.options.simulated_user is not None
    assert spec.options.simulated_user.model == "openai:m"
    assert spec.options.simulated_user.instructions().startswith("You are Ann.")


@pytest.mark.parametrize("turns", [[], ["Then this."]])
def test_rows_with_a_simulated_user_and_with_fixed_messages_can_be_mixed(turns: list[str]) -> None:
    """The run's simulated user is for the rows that do not bring their user's messages."""
    spec = RULES.read({"prompt": "x", "user_turns": turns}).spec
    assert (spec.user_turns, spec.options.simulated_user) == (tuple(turns), None)
    assert RULES.read({"prompt": "x", "simulated_user": ANN}).spec.options.simulated_user


def test_what_the_user_says_decides_the_conversation() -> None:
    plain = {"prompt": "x"}
    for more in ({"user_turns": ["a"]}, {"simulated_user": {"system_prompt": "You are Bo."}}):
        assert RULES.rollout_columns({**plain, **more}) != RULES.rollout_columns(plain)


def test_a_row_that_a_rows_file_could_not_make_is_refused_with_its_reason() -> None:
    with pytest.raises(ValueError, match=r"rows\.yaml:3: the row has no `ticket`"):
        RULES.read({"id": "a", "row_error": "rows.yaml:3: the row has no `ticket`"})


FIRST: dict[str, Any] = {**ANN, "writes_first": True}
POLICY = [Message(role="system", content="You sell tea.")]


def test_a_user_that_writes_first_takes_the_place_of_the_prompt(tmp_path: Path) -> None:
    user = {**FIRST, "script": [say("Tea, please."), say("Green."), say("STOP")]}
    script = [say("Which?"), say("Here it is.")]
    played = play(tmp_path, script, opening=POLICY, simulated_user=user)
    assert played.status == "completed"
    assert [m["content"] for m in played.messages] == [
        "You sell tea.",
        "Tea, please.",
        "Which?",
        "Green.",
        "Here it is.",
    ]
    keys = [inner["key"] for inner in played.trajectory.to_record()["inner"]]
    assert keys == [f"simulated_user#{number}" for number in range(3)]
    seen = seen_by_users(played)
    assert [len(messages) for messages in seen] == [2, 4, 6]
    assert seen[2][: len(seen[1])] == seen[1], "each request continues the one before"
    assert seen[1][2:] == [
        Message(role="assistant", content="Tea, please."),
        Message(role="user", content="Which?"),
    ]


def test_a_first_message_that_was_paid_for_is_not_asked_for_again(tmp_path: Path) -> None:
    user = {**FIRST, "script": [say("Tea, please."), say("Green."), say("STOP")]}
    script = [say("Which?"), say("Here it is.")]
    whole = play(tmp_path / "a", script, opening=[], simulated_user=user)
    kinds = [event["kind"] for event in whole.events]
    assert kinds.index("opening") < kinds.index("reply"), "stored before the agent reads it"
    for length in range(1, len(whole.events)):
        past = whole.events[:length]
        resumed = play(tmp_path / str(length), script, past=past, opening=[], simulated_user=user)
        assert (resumed.end, resumed.messages) == (whole.end, whole.messages)
        assert len(resumed.requests) == len(whole.requests) - play_events(past)


def test_a_user_that_writes_first_writes_so_many_messages_in_all(tmp_path: Path) -> None:
    user = {**FIRST, "max_turns": 2, "script": [say("Tea."), say("Green."), say("Hot.")]}
    played = play(tmp_path, [say("Which?"), say("Here.")], opening=[], simulated_user=user)
    assert played.status == "completed"
    assert [m["content"] for m in played.messages] == ["Tea.", "Which?", "Green.", "Here."]


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (say("STOP"), "the simulated user wrote STOP in place of a first message"),
        (say("Tea", finish_reason="length"), "the simulated user ended as length"),
    ],
)
def test_a_user_that_writes_no_first_message_ends_the_conversation(
    tmp_path: Path, reply: dict[str, Any], reason: str
) -> None:
    user = {**FIRST, "script": [reply]}
    played = play(tmp_path, [say("Hello.")], opening=POLICY, simulated_user=user)
    assert (played.status, played.trajectory.turns) == ("errors", 0)
    assert played.end.reason == reason
    again = play(tmp_path, [say("Hello.")], past=played.events, opening=POLICY, simulated_user=user)
    assert (again.end, again.requests) == (played.end, [])


FIRST_RULES = RowRules(
    system_prompt="You sell tea.",
    options=AgentOptions(simulated_user=SimulatedUser(writes_first=True)),
)


def test_a_row_whose_user_writes_first_needs_no_prompt() -> None:
    assert FIRST_RULES.read({"simulated_user": ANN}).opening == POLICY
    own = [{"role": "system", "content": "Be kind."}]
    assert FIRST_RULES.read({"prompt": own, "simulated_user": ANN}).opening == own
    assert RULES.read({"simulated_user": FIRST}).opening == []
    # Rows of another kind in the same dataset.
    fixed = FIRST_RULES.read({"prompt": "x", "user_turns": ["And?"]})
    assert (fixed.opening[-1]["content"], fixed.spec.options.simulated_user) == ("x", None)
    later = {**ANN, "writes_first": False}
    assert FIRST_RULES.read({"prompt": "x", "simulated_user": later}).opening[-1]["content"] == "x"
    with pytest.raises(ValueError, match="no `prompt` field"):
        FIRST_RULES.read({"simulated_user": later})
    with pytest.raises(ValueError, match="no `prompt` field"):
        RULES.read({"simulated_user": ANN})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "`prompt`: the simulated user writes the first message"),
        (
            {"prompt": [{"role": "user", "content": "x"}]},
            "so it can only be a list with one system",
        ),
        ({"prompt": [{"role": "system", "content": " "}]}, "`prompt` has an empty message"),
        ({"messages": [{"role": "user", "content": "x"}]}, "`messages`: the simulated user writes"),
        ({"agent_options": {"preparation": "Look."}}, "does not go together with preparation"),
        ({"row_error": "rows.yaml:3: no"}, "rows.yaml:3: no"),
    ],
)
def test_a_row_that_does_not_fit_a_user_that_writes_first_is_named(
    row: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        FIRST_RULES.read({"simulated_user": ANN, **row})
    if "row_error" not in row and "agent_options" not in row:
        with pytest.raises(ValueError, match=message):
            RULES.read({"simulated_user": FIRST, **row})


def test_where_a_user_cannot_write_first_is_named() -> None:
    with pytest.raises(ValueError, match="give --simulated_user"):
        RowRules().read({"simulated_user": FIRST})
    with pytest.raises(ValueError, match="together with preparation"):
        AgentOptions(preparation="Look.", simulated_user=SimulatedUser(writes_first=True))
    with pytest.raises(ValueError, match="a session begins with your prompt"):
        AIAgent(
            "scripted", script=[say("Hi.")], simulated_user={**FIRST, "script": [say("x")]}
        ).chat("Hello.")
    agent = CommandAgent(
        name="a",
        command=("agent", "{prompt}"),
        continues=("agent", "-c", "{prompt}"),
        speaks=("openai_chat",),
    )
    with pytest.raises(
        ValueError, match=r"`simulated_user\.writes_first`: an agent that runs as a"
    ):
        RowRules(agent=agent, options=RULES.options).read({"simulated_user": FIRST})
