"""Agents repeat replies in other words: rows have those of the wire all the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from agent.state.trajectory import Trajectory
from tests.agent.gateway.talking import (
    JSON,
    TALKS,
    ChatTalk,
    MessagesTalk,
    Recording,
    Said,
    Talk,
    TwoAtOnce,
)

PROMPT = "Count the files."
EACH = pytest.mark.parametrize("api", TALKS)

Change = Callable[[str], str]
"""What an agent makes of a reply, as JSON, before it repeats it."""


def drop_cd(reply: str) -> str:
    """Like Claude Code, which cuts the change to the directory that it is in."""
    return reply.replace("cd /workspace && ", "")


def rename_call(reply: str) -> str:
    """Like opencode, which shows a call that it could not make as one of another tool."""
    return reply.replace('"bash"', '"invalid"')


def drop_text(reply: str) -> str:
    """Only the calls are kept."""
    return reply.replace('"Now."', '""')


def turn(recording: Recording, talk: Talk, said: Said, change: Change) -> None:
    """One call, and what the agent makes of the reply to it."""
    reply = recording.relay(talk, said, echo=False)
    talk.hear(json.loads(change(json.dumps(reply))))


def work(recording: Recording, talk: Talk, change: Change, *commands: str) -> None:
    """An agent's loop to its end."""
    for command in commands:
        turn(recording, talk, Said("Now.", f"cd /workspace && {command}"), change)
        talk.result(f"ran {command}")
    recording.relay(talk, Said("Done."))


def commands_of(record: dict[str, Any]) -> list[str]:
    """What the conversation's calls run."""
    made = [call for m in record["messages"] for call in m.get("tool_calls", ())]
    return [json.loads(call["function"]["arguments"])["command"] for call in made]


def check(recording: Recording, *commands: str) -> None:
    """The record is one conversation with the replies of the wire, read from a journal too."""
    record = recording.trajectory.to_record()
    assert [turn["exchange"] for turn in record["turns"]] == [*range(len(commands) + 1)]
    said = [m for m in record["messages"] if m["role"] == "assistant"]
    assert [m["content"] for m in said] == [*["Now."] * len(commands), "Done."]
    assert {call["function"]["name"] for m in said for call in m.get("tool_calls", ())} == {"bash"}
    assert commands_of(record) == [f"cd /workspace && {command}" for command in commands]
    ids = [call["id"] for m in said for call in m.get("tool_calls", ())]
    assert ids == [m["tool_call_id"] for m in record["messages"] if m["role"] == "tool"]
    assert (record["inner"], record["rewritten"], record["set_aside"]) == ([], [], [])
    events = [event for event in recording.events if event["kind"] == "exchange"]
    assert [len(event["added"]) for event in events] == [2, *[1] * len(commands)]
    again = Trajectory([{"role": "user", "content": PROMPT}], recording.events)
    assert again.to_record() == record


@EACH
@pytest.mark.parametrize("change", [drop_cd, drop_text])
def test_a_call_that_is_shown_again_in_other_words_is_the_reply(api: str, change: Change) -> None:
    """Gemini's calls have no ids here: they are the only replies at their places."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(recording, talk, change, "ls", "wc", "ls")
    check(recording, "ls", "wc", "ls")


@pytest.mark.parametrize("api", ["openai_chat", "anthropic_messages", "openai_responses"])
def test_a_call_that_is_shown_again_as_one_of_another_tool_is_the_reply(api: str) -> None:
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(recording, talk, rename_call, "ls", "wc")
    check(recording, "ls", "wc")


@EACH
def test_a_text_of_which_an_agent_keeps_a_part_is_the_reply(api: str) -> None:
    """Agents whose calls are text keep what follows the thoughts."""
    recording, talk = Recording(PROMPT), TALKS[api](has_tools=False)
    talk.say(PROMPT)
    texts = ["Thought: first. Run ls.", "Thought: then. Run wc.", "Done."]
    for text in texts:
        reply = recording.relay(talk, Said(text), echo=False)
        talk.hear(json.loads(json.dumps(reply).replace("Thought: first. ", "")))
        talk.say("It ran.")
    record = recording.trajectory.to_record()
    assert [m["content"] for m in record["messages"] if m["role"] == "assistant"] == texts
    assert (len(record["turns"]), record["inner"]) == (3, [])


class Repeating(ChatTalk):
    """The server's ids begin anew with each reply."""

    def reply(self, said: Said) -> JSON:
        reply = super().reply(said)
        for n, call in enumerate(reply["choices"][0]["message"].get("tool_calls", ())):
            call["id"] = f"call_{n}"
        return reply


class Counting(ChatTalk):
    """The server's ids count the calls of a conversation."""

    def reply(self, said: Said) -> JSON:
        reply = super().reply(said)
        before = sum("tool_calls" in item for item in self.items)
        for call in reply["choices"][0]["message"].get("tool_calls", ()):
            call["id"] = f"functions.bash:{before}"
        return reply


@pytest.mark.parametrize("kind", [Repeating, Counting, *TALKS.values()])
def test_replies_are_found_at_their_places_whatever_the_order_of_calls(kind: type[Talk]) -> None:
    """Conversations at the same time, one of which changes its system prompt with each call."""
    for seed in range(20):
        draw = random.Random(seed)
        recording = Recording(PROMPT)
        talks = [kind(system=f"Agent {n}.") for n in range(4)]
        left = [draw.randrange(1, 4) for _ in talks]
        ids: list[list[str]] = [[] for _ in talks]
        for n, talk in enumerate(talks):
            talk.say(PROMPT if n == 2 else f"Task {n}.")
        while any(left):
            n = draw.choice([n for n, more in enumerate(left) if more])
            ids[n].append(f"cd /workspace && step {draw.randrange(2)}")
            turn(recording, talks[n], Said("Now.", ids[n][-1]), drop_cd)
            talks[n].result(f"ran {left[n]}")
            left[n] -= 1
            if n == 3 and kind is not TALKS["gemini"]:
                talks[n].system = f"Agent 3. It is {len(ids[n])}:00."
        for talk in talks:
            recording.relay(talk, Said("Done."))
        record = recording.trajectory.to_record()
        found = [record, *record["inner"]]
        found.sort(key=lambda one: one["messages"][0]["content"])
        assert [commands_of(one) for one in found] == ids
        assert sum(len(one["turns"]) for one in found) == len(recording.threads.exchanges)


def test_an_agent_that_keeps_one_of_several_calls_has_the_whole_reply_in_its_row() -> None:
    """Each further call adds what is new, and results belong to their calls."""

    class Two(ChatTalk):
        def reply(self, said: Said) -> JSON:
            reply = super().reply(said)
            message = reply["choices"][0]["message"]
            if made := message.get("tool_calls"):
                message["tool_calls"] = [{**made[0], "id": f"{made[0]['id']}_{n}"} for n in (0, 1)]
            return reply

        def hear(self, reply: JSON) -> None:
            message = reply["choices"][0]["message"]
            message["tool_calls"] = message.get("tool_calls", [])[1:]
            super().hear(reply)

    recording, talk = Recording(PROMPT), Two()
    talk.say(PROMPT)
    work(recording, talk, drop_cd, "ls", "wc", "cat")
    record = recording.trajectory.to_record()
    assert len(commands_of(record)) == 6
    made = [call["id"] for m in record["messages"] for call in m.get("tool_calls", ())]
    assert made[1::2] == [m["tool_call_id"] for m in record["messages"] if m["role"] == "tool"]
    assert (len(record["turns"]), record["inner"]) == (4, [])
    events = [event for event in recording.events if event["kind"] == "exchange"]
    assert [len(event["added"]) for event in events] == [2, 1, 1, 1]


def test_a_restarted_agent_continues_with_the_replies_of_the_wire() -> None:
    class Cutting(MessagesTalk):
        def hear(self, reply: JSON) -> None:
            super().hear(json.loads(drop_cd(json.dumps(reply))))

    first, talk = Recording(PROMPT), Cutting()
    talk.say(PROMPT)
    for command in ("ls", "wc"):
        first.relay(talk, Said("Now.", f"cd /workspace && {command}"))
        talk.result(f"ran {command}")
    second = Recording(PROMPT, first.events)
    second.restart()
    again = Cutting()
    again.say(PROMPT)
    for command in ("ls", "wc"):
        assert second.ask(again, Said("Other."))
        again.result(f"ran {command}")
    assert not second.ask(again, Said("Done."))
    check(second, "ls", "wc")
    assert second.trajectory.to_record()["diverged_at"] is None


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_results_that_come_in_another_order_after_a_kill_are_the_same_ones(
    order: tuple[int, int], apart: bool
) -> None:
    """The row has the first order; what a call after the kill was shown has the other one."""
    first, talk = Recording(PROMPT), TwoAtOnce(order=order, apart=apart)
    talk.say(PROMPT)
    for n in range(3):
        first.relay(talk, Said("Now.", "ls"))
        talk.result(f"result {n}")
    second = Recording(PROMPT, first.events)
    second.restart()
    again = TwoAtOnce(order=order[::-1], apart=apart)
    again.say(PROMPT)
    for n in range(3):
        assert second.ask(again, Said("Other."))
        again.result(f"result {n}")
        again.order = order
    assert not second.ask(again, Said("Done."))
    record = second.trajectory.to_record()
    assert (record["set_aside"], record["inner"], record["rewritten"]) == ([], [], [])
    results = [m["content"] for m in record["messages"] if m["role"] == "tool"]
    assert results == [f"result {n} {call}" for n in range(3) for call in order]
    *before, last = [turn["request"].get("shown", []) for turn in record["turns"]]
    moved = [{"at": 3, "message_at": 4}, {"at": 4, "message_at": 3}]
    assert (before, last) == ([[], [], []], moved)
