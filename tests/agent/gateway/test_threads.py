"""Calls of an agent become conversations, in whatever order and form they come."""

from __future__ import annotations

import random
from typing import Any

import pytest

from agent.state.trajectory import Trajectory
from tests.agent.gateway.talking import TALKS, ChatTalk, Recording, Said, Talk

PROMPT = "Count the files."
EACH = pytest.mark.parametrize("api", TALKS)


def work(recording: Recording, talk: Talk, *commands: str) -> None:
    """An agent's loop: each command is called for and run, then the model ends it."""
    for n, command in enumerate(commands):
        recording.relay(talk, Said("Now.", command, thought=f"Thought {n}."))
        talk.result(f"ran {command}")
    recording.relay(talk, Said("Done."))


def roles(record: dict[str, Any]) -> list[str]:
    return [message["role"] for message in record["messages"]]


@EACH
def test_a_conversation_of_several_calls_is_one_thread_with_the_replies_of_the_wire(
    api: str,
) -> None:
    """Reasoning that the agent does not send back is in the record all the same."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(recording, talk, "ls", "wc")
    record = recording.trajectory.to_record()
    assert roles(record) == ["system", "user", *["assistant", "tool"] * 2, "assistant"]
    assert [m.get("reasoning") for m in record["messages"] if m["role"] == "assistant"] == [
        "Thought 0.",
        "Thought 1.",
        None,
    ]
    assert [turn["turn"] for turn in record["turns"]] == [1, 2, 3]
    assert [(call["turn"], call["name"]) for call in record["tool_calls"]] == [
        (1, "bash"),
        (2, "bash"),
    ]
    assert record["threads"] == [{"key": "thread#0", "name": "main", "calls": 3, "model": "m"}]
    assert record["api_calls"] == 3
    assert record["usage"]["input_tokens"] == 30
    assert [tool["function"]["name"] for tool in record["tools"]] == ["bash"]
    events = [event for event in recording.events if event["kind"] == "exchange"]
    assert [len(event["added"]) for event in events] == [2, 1, 1]
    assert ["tools" in event for event in events] == [True, False, False]


@EACH
def test_a_replayed_journal_gives_the_same_record(api: str) -> None:
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(recording, talk, "ls", "wc")
    again = Trajectory([{"role": "user", "content": PROMPT}], recording.events)
    assert again.to_record() == recording.trajectory.to_record()
    assert again.spent_tokens == 45


@EACH
def test_calls_of_conversations_at_the_same_time_are_told_apart(api: str) -> None:
    """The order of completion decides nothing but the numbers of threads."""
    for seed in range(20):
        draw = random.Random(seed)
        recording = Recording(PROMPT)
        talks = [TALKS[api](system=f"Agent {n}.") for n in range(4)]
        left = [draw.randrange(1, 4) for _ in talks]
        for n, talk in enumerate(talks):
            talk.say(PROMPT if n == 2 else f"Task {n}.")
        while any(left):
            n = draw.choice([n for n, more in enumerate(left) if more])
            recording.relay(talks[n], Said("Now.", f"step {left[n]}"))
            talks[n].result(f"ran {left[n]}")
            left[n] -= 1
        for talk in talks:
            recording.relay(talk, Said("Done."))
        record = recording.trajectory.to_record()
        assert record["messages"][0]["content"] == "Agent 2."
        shown = {one["messages"][0]["content"] for one in record["inner"]}
        assert shown == {"Agent 0.", "Agent 1.", "Agent 3."}
        for one in (record, *record["inner"]):
            assert roles(one) == [
                "system",
                "user",
                *["assistant", "tool"] * (len(one["turns"]) - 1),
                "assistant",
            ]
        assert {one["name"] for one in record["inner"]} == {"subagent"}


@EACH
def test_the_main_thread_is_never_simply_the_first(api: str) -> None:
    """A call for a title comes first, repeats the prompt in quotes and offers no tools."""
    recording = Recording(PROMPT)
    title, talk = TALKS[api](system="Make a title.", has_tools=False), TALKS[api]()
    title.say("A title, please.")
    title.say(f'"{PROMPT}"')
    talk.say(f'"{PROMPT}"')
    recording.relay(title, Said("Counting"))
    work(recording, talk, "ls")
    record = recording.trajectory.to_record()
    assert [(t["name"], t["calls"]) for t in record["threads"]] == [("main", 2), ("side", 1)]
    assert record["inner"][0]["messages"][-1]["content"] == "Counting"


@EACH
def test_a_title_whose_words_begin_a_session_is_not_its_main_thread(api: str) -> None:
    """Of a recorded session, the prompt is what its first call says."""
    title, talk = TALKS[api](has_tools=False), TALKS[api]()
    title.say("A title, please.")
    talk.say(PROMPT)
    recording = Recording("A title, please.")
    recording.relay(title, Said("Counting"))
    work(recording, talk, "ls")
    record = recording.trajectory.to_record()
    assert [(t["name"], t["calls"]) for t in record["threads"]] == [("main", 2), ("side", 1)]


@EACH
def test_a_subagent_with_the_words_of_the_prompt_is_not_the_main_thread(api: str) -> None:
    recording, talk, sub = Recording(PROMPT), TALKS[api](), TALKS[api](system="You are a helper.")
    talk.say(f"Remember the rules.\n{PROMPT}")
    recording.relay(talk, Said("Ask for help.", "helper"))
    sub.say(PROMPT)
    work(recording, sub, "a", "b", "c")
    talk.result("helped")
    recording.relay(talk, Said("Done."))
    record = recording.trajectory.to_record()
    assert [(t["key"], t["name"], t["calls"]) for t in record["threads"]] == [
        ("thread#0", "main", 2),
        ("thread#1", "subagent", 4),
    ]


@EACH
def test_a_call_beside_the_conversation_becomes_a_branch_and_is_paid_once(api: str) -> None:
    """The agent asks for a hint about the conversation so far, and continues without it."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    recording.relay(talk, Said("Now.", "ls"))
    talk.result("a b")
    aside = TALKS[api](items=[*talk.items])
    aside.say("What will the user say next?")
    recording.relay(aside, Said("Thanks."))
    work(recording, talk, "wc")
    record = recording.trajectory.to_record()
    assert [(t["key"], t["name"], t["calls"]) for t in record["threads"]] == [
        ("thread#1", "main", 3),
        ("thread#0", "branch", 1),
    ]
    [branch] = record["inner"]
    assert [turn.get("inherited", False) for turn in branch["turns"]] == [True, False]
    assert branch["api_calls"] == 1
    assert record["api_calls"] == 4
    assert sum(one["usage"]["input_tokens"] for one in record["inner"]) == 10
    assert record["usage"]["input_tokens"] == 40
    event = recording.events[2]
    assert event["kind"] == "exchange"
    assert (event["of"], event["shared"], len(event["added"])) == (0, 4, 0)


@EACH
def test_history_that_an_agent_changes_keeps_the_replies_of_the_wire(api: str) -> None:
    """A system prompt with the time in it: each call begins a thread, and the last has them all."""
    recording, talk = Recording(PROMPT), TALKS[api](system="It is 10:00.")
    talk.say(PROMPT)
    recording.relay(talk, Said("Now.", "ls", thought="First."))
    talk.result("a b")
    talk.system = "It is 10:01."
    recording.relay(talk, Said("Now.", "wc", thought="Second."))
    talk.result("2")
    talk.system = "It is 10:02."
    recording.relay(talk, Said("Done."))
    record = recording.trajectory.to_record()
    assert [m.get("reasoning") for m in record["messages"] if m["role"] == "assistant"] == [
        "First.",
        "Second.",
        None,
    ]
    assert [turn["exchange"] for turn in record["turns"]] == [0, 1, 2]
    assert record["inner"] == []
    assert record["messages"][0]["content"] == "It is 10:02."
    shown = [(one["exchanges"], one["messages"][0]["content"]) for one in record["rewritten"]]
    assert shown == [([0], "It is 10:00."), ([0, 1], "It is 10:01.")]
    assert all((one["start"], one["end"]) == (0, 1) for one in record["rewritten"])


@EACH
def test_a_call_about_the_finished_conversation_is_not_its_answer(api: str) -> None:
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(recording, talk, "ls")
    about = TALKS[api](items=[*talk.items], has_tools=False)
    about.say("Who speaks next?")
    recording.relay(about, Said("The user."))
    record = recording.trajectory.to_record()
    assert record["messages"][-1]["content"] == "Done."
    assert [(t["name"], t["calls"]) for t in record["threads"]] == [("main", 2), ("side", 1)]


@EACH
def test_a_last_answer_without_tools_belongs_to_the_conversation(api: str) -> None:
    """Some agents take the tools away when their steps are used up."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    recording.relay(talk, Said("Now.", "ls"))
    talk.result("a b")
    talk.has_tools = False
    recording.relay(talk, Said("Two."))
    record = recording.trajectory.to_record()
    assert record["messages"][-1]["content"] == "Two."
    assert [(t["name"], t["calls"]) for t in record["threads"]] == [("main", 2)]
    assert [tool["function"]["name"] for tool in record["tools"]] == ["bash"]


@EACH
def test_what_follows_a_compaction_is_the_main_thread(api: str) -> None:
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    recording.relay(talk, Said("Now.", "ls"))
    talk.result("a b")
    summary = "There are two files so far, a and b."
    asking = TALKS[api](items=[*talk.items], has_tools=False)
    asking.say("Summarize.")
    recording.relay(asking, Said(summary))
    later = TALKS[api]()
    later.say(f"This session continues an earlier one: {summary}")
    work(recording, later, "wc")
    record = recording.trajectory.to_record()
    assert [(t["key"], t["name"]) for t in record["threads"]] == [
        ("thread#1", "main"),
        ("thread#0", "before compaction"),
    ]
    assert record["messages"][-1]["content"] == "Done."


SUMMARY = "There are two files so far, a and b."


@EACH
def test_a_compaction_that_keeps_the_latest_messages_is_followed_by_the_main_thread(
    api: str,
) -> None:
    """As of Claude Code, whose system prompt begins with another version then, and of Qwen Code."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    for command in ("ls", "wc"):
        recording.relay(talk, Said("", command))
        talk.result(f"ran {command}")
    asking = TALKS[api](items=[*talk.items[:-2]], has_tools=False)
    asking.say("Summarize.")
    said = f"<analysis>It is short.</analysis>\n<summary>\n{SUMMARY}\n</summary>"
    recording.relay(asking, Said(said))
    later = TALKS[api](system="You work on.")
    later.say(f"This session continues an earlier one.\n\nSummary:\n{SUMMARY}")
    later.items += talk.items[-2:]
    work(recording, later, "ls -l")
    record = recording.trajectory.to_record()
    names = {one["key"]: one["name"] for one in record["threads"]}
    assert (names["thread#0"], record["threads"][0]["name"]) == ("before compaction", "main")
    assert record["messages"][-1]["content"] == "Done."
    assert [(turn["exchange"], turn.get("inherited", False)) for turn in record["turns"]] == [
        (1, True),
        (3, False),
        (4, False),
    ]
    (before,) = [one for one in record["inner"] if one["name"] == "before compaction"]
    assert [turn["exchange"] for turn in before["turns"] if not turn.get("inherited")] == [0, 1]


@EACH
def test_what_follows_a_summary_that_stands_as_a_reply_is_the_main_thread(api: str) -> None:
    """As of opencode."""
    recording, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    recording.relay(talk, Said("Now.", "ls"))
    asking = TALKS[api](system="You summarize.", has_tools=False)
    asking.say("Here is the conversation so far: ls was run.")
    recording.relay(asking, Said(SUMMARY))
    later = TALKS[api]()
    later.say("What did we do so far?")
    later.items.append(asking.items[-1])
    later.say("Continue.")
    work(recording, later, "wc")
    record = recording.trajectory.to_record()
    assert [one["name"] for one in record["threads"]] == ["main", "before compaction"]
    assert record["messages"][-1]["content"] == "Done."
    assert [turn["exchange"] for turn in record["turns"]] == [1, 2, 3]


@EACH
def test_a_restarted_agent_gets_recorded_replies_and_pays_for_new_calls_only(api: str) -> None:
    first, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    first.relay(talk, Said("Now.", "ls"))
    talk.result("a b")
    first.relay(talk, Said("Now.", "wc"))
    second = Recording(PROMPT, first.events)
    second.restart()
    again = TALKS[api]()
    again.say(PROMPT)
    assert second.ask(again, Said("Other."))
    again.result("a b")
    assert second.ask(again, Said("Other."))
    again.result("2")
    assert not second.ask(again, Said("Done."))
    record = second.trajectory.to_record()
    assert [turn["exchange"] for turn in record["turns"]] == [0, 1, 2]
    assert record["api_calls"] == 3
    assert (record["set_aside"], record["diverged_at"], record["agent"]["starts"]) == ([], None, 2)
    assert [call["duration_s"] is None for call in record["tool_calls"]] == [False, True]


@EACH
def test_calls_after_a_divergence_are_set_aside_with_their_price(api: str) -> None:
    first, talk = Recording(PROMPT), TALKS[api]()
    talk.say(PROMPT)
    work(first, talk, "ls", "wc")
    second = Recording(PROMPT, first.events)
    second.restart()
    again = TALKS[api]()
    again.say(PROMPT)
    assert second.ask(again, Said())
    again.result("something else")
    assert not second.ask(again, Said("Now.", "wc"))
    again.result("3")
    assert not second.ask(again, Said("Three."))
    record = second.trajectory.to_record()
    assert [turn["exchange"] for turn in record["turns"]] == [0, 3, 4]
    assert record["diverged_at"] == 1
    assert [(one["number"], one["usage"]["input_tokens"]) for one in record["set_aside"]] == [
        (1, 10),
        (2, 10),
    ]
    assert record["set_aside"][1]["message"]["content"] == "Done."
    assert record["set_aside"][0]["added"][0]["content"] == "ran ls"
    assert record["api_calls"] == 5
    third = Recording(PROMPT, second.events)
    third.restart()
    last = TALKS[api]()
    last.say(PROMPT)
    assert third.ask(last, Said())
    last.result("ran ls")
    assert third.ask(last, Said())  # a call of the first start, which the second did not make


@EACH
def test_equal_calls_are_answered_once_each(api: str) -> None:
    first = Recording(PROMPT)
    for text in ("One.", "Two."):
        talk = TALKS[api]()
        talk.say(PROMPT)
        first.relay(talk, Said(text))
    second = Recording(PROMPT, first.events)
    second.restart()
    heard = []
    for _ in range(3):
        talk = TALKS[api]()
        talk.say(PROMPT)
        heard.append(second.ask(talk, Said("Three.")))
    assert heard == [True, True, False]
    record = second.trajectory.to_record()
    texts = [one["messages"][-1]["content"] for one in (record, *record["inner"])]
    assert sorted(texts) == ["One.", "Three.", "Two."]


def test_ids_that_an_agent_makes_itself_are_those_of_the_record() -> None:
    """Some servers give all calls one id; a record needs one for each."""

    class Repeating(ChatTalk):
        def reply(self, said: Said) -> dict[str, Any]:
            reply = super().reply(said)
            for call in reply["choices"][0]["message"].get("tool_calls", ()):
                call["id"] = "call_0"
            return reply

    recording, talk = Recording(PROMPT), Repeating()
    talk.say(PROMPT)
    work(recording, talk, "ls", "wc", "cat")
    messages = recording.trajectory.to_record()["messages"]
    made = [call["id"] for m in messages for call in m.get("tool_calls", ())]
    assert len(set(made)) == 3
    assert made == [m["tool_call_id"] for m in messages if m["role"] == "tool"]
    bodies = [event["body"] for event in recording.events if event["kind"] == "exchange"]
    assert bodies[1]["choices"][0]["message"]["tool_calls"][0]["id"] == "call_0"


def test_an_agent_without_calls_has_a_record_of_its_prompt() -> None:
    recording = Recording(PROMPT)
    recording.take(
        {
            "kind": "agent_exit",
            "exit_code": 41,
            "stdout": "",
            "stderr": "Invalid auth method",
            "duration_s": 1.0,
            "timed_out": False,
        }
    )
    record = recording.trajectory.to_record()
    assert record["messages"] == [{"role": "user", "content": PROMPT}]
    assert (record["threads"], record["turns"], record["api_calls"]) == ([], [], 0)
    assert record["agent"]["exit_code"] == 41
