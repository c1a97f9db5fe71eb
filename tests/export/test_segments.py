"""Rows of segments: what the model was shown, compared with the requests that it got."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.options import AgentOptions
from agent.runner import was_compacted
from agent.setup import inner_schemas, set_up
from agent.wires.wires import WIRES
from batch_trajectories.export.dataset.checking import find_problems
from batch_trajectories.export.rows.recipe import Recipe
from batch_trajectories.export.segments import Segment, split_segments, views_by_conversation
from batch_trajectories.records.record_types import Record
from tests.agent.gateway.talking import TALKS, Recording, Said, Talk, TwoAtOnce, path_for
from tests.agent.test_options import ANSWER
from tests.helpers.builders import assistant, call, record_of, result, user
from tests.helpers.exporting import export_to_dataset, make_run, rows
from tests.helpers.playing import SETTINGS, Played, call_echo, play, say
from tests.helpers.stored import to_record

LONG = "R" * 300
SUMMARIES: dict[str, Any] = {"summarize_over_messages": 6, "summarize_keep": 2}
HELPER = {"name": "helper", "description": "Helps.", "system_prompt": "Help.", "max_turns": 9}


def record_from(played: Played, **options: Any) -> dict[str, Any]:
    """The record of a conversation that was played with these options."""
    given = AgentOptions(**options)
    offered = [{"type": "function", "function": {"name": "echo", "parameters": {}}}]
    setup = set_up(given, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())
    names = {inner.name for inner in played.trajectory.inner.values()}
    inside = {name: inner_schemas(setup, given, name) for name in names}
    return record_of(user()) | {
        **played.trajectory.to_record(),
        "inner_tools": {name: tools for name, tools in inside.items() if tools is not None},
        "tools": [*offered, {"type": "function", "function": {"name": "helper", "parameters": {}}}],
        "options": given.given(),
        "view_compacted": was_compacted(played.trajectory, given),
        "status": played.status,
    }


def read_texts(messages: Sequence[Any]) -> list[Any]:
    """What messages say, in one form for requests and for views."""
    found = []
    for message in messages:
        one = message if isinstance(message, Mapping) else msgspec.to_builtins(message)
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in one.get("tool_calls", ())
        ]
        thought = one.get("reasoning") or ""
        found.append((one["role"], one["content"], thought, calls, one.get("tool_call_id")))
    return found


def segments(record: Record, *, since_user: bool = False) -> list[Segment]:
    return [
        segment
        for part in views_by_conversation(record, since_user=since_user)
        for segment in split_segments(part)
    ]


def learnt_views(record: Record) -> list[list[Any]]:
    """What was shown for each turn that a segment learns, as its row has it."""
    return [
        read_texts(segment.messages[:place])
        for segment in segments(record)
        for place in segment.learnt
    ]


def replies_in(part: Mapping[str, Any]) -> int:
    return len(part["turns"]) + sum(map(replies_in, part["inner"]))


STEPS = st.lists(
    st.sampled_from(
        [
            call_echo("a"),
            call_echo(LONG),
            call_echo("b", content="so"),
            call_echo("c", content="x", reasoning=LONG),
        ]
    ),
    min_size=2,
    max_size=9,
)


@settings(max_examples=30)
@given(
    STEPS,
    st.sampled_from([{}, SUMMARIES, {"summarize_over_messages": 4, "summarize_keep": 2}]),
    st.sampled_from([None, 1, 2]),
    st.integers(0, 30),
)
def test_every_view_is_a_request_that_was_made(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[Any],
    summaries: dict[str, Any],
    after: int | None,
    killed_at: int,
) -> None:
    """Also where the process died after any event, and another one went on."""
    given: dict[str, Any] = {**summaries, "max_turns": 40}
    given |= {} if after is None else {"compact_after": after}
    root = tmp_path_factory.mktemp("w")
    # Replies to requests for summaries come from the same script.
    played = play(root, [*steps, *[say(f"S{n}") for n in range(8)]], **given)
    again = play(
        root, [*steps, *[say(f"S{n}") for n in range(8)]], **given, past=played.events[:killed_at]
    )
    made = [read_texts(request.messages) for request in (*played.requests, *again.requests)]
    record = record_from(again, **given)
    views = learnt_views(to_record(record))
    assert all(view in made for view in views)
    assert len(views) == replies_in(record)


def test_a_summary_begins_a_segment_and_has_one_of_its_own(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **SUMMARIES), **SUMMARIES)
    found = rows(make_run(tmp_path, record), "openai", segments=True)
    told = [json.loads(row["metadata"])["segment"] for row in found]
    assert told == [
        {"of": "main", "number": 1, "why": "start"},
        {"of": "main", "number": 2, "why": "messages"},
        {"of": "summary", "number": 3, "why": "start"},
    ]
    assert [row["id"] for row in found] == ["t0#s1", "t0#s2", "t0#s3"]
    after, summary = found[1]["messages"], found[2]["messages"]
    assert after[0]["content"] == "go\n\n[Summary of the conversation so far]\nTHE SUMMARY"
    assert summary[-1]["content"] == "THE SUMMARY"
    assert found[2]["tools"] == "[]"
    # The turn that both segments show is learnt in the first.
    marks = [[m.get("weight", 1) for m in r["messages"] if m["role"] == "assistant"] for r in found]
    assert marks == [[1, 1, 1], [0, 1, 1], [1]]
    assert [row["num_turns"] for row in found] == [3, 2, 1]


def test_records_that_do_not_name_the_summary_go_by_its_time(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **SUMMARIES), **SUMMARIES)
    new = learnt_views(to_record(record))
    for turn in record["turns"]:
        turn.pop("request", None)
    assert learnt_views(to_record(record)) == new


def test_the_summary_that_a_turn_saw_survives_a_new_beginning(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    played = play(tmp_path, script, **SUMMARIES)
    named = [turn.get("request") for turn in played.trajectory.to_record()["turns"]]
    assert named == [None, None, None, *[{"summary": "summary#5"}] * 2]
    lost = {"kind": "restarted", "turn": 5, "reason": "workspace_lost", "at": 1.0}
    played.trajectory.apply(lost)  # type: ignore[arg-type]
    assert played.trajectory.summarized == {}


def test_subagents_have_rows_with_their_own_tools(tmp_path: Path) -> None:
    given: dict[str, Any] = {"subagents": [{**HELPER, "enabled_toolsets": ["none"]}]}
    script = [
        {"tool_calls": [{"name": "helper", "arguments": {"task": "T"}}]},
        say("helped"),
        ANSWER,
    ]
    played = play(tmp_path, script, **given)
    record = record_from(played, **given)
    found = rows(make_run(tmp_path, record), "openai", segments=True)
    assert [json.loads(row["metadata"])["segment"]["of"] for row in found] == ["main", "helper"]
    assert [m["content"] for m in found[1]["messages"]] == ["Help.", "T", "helped"]
    assert found[1]["tools"] == "[]"
    views = learnt_views(to_record(record))
    assert views == [
        read_texts(request.messages)
        for request in (played.requests[0], played.requests[2], played.requests[1])
    ]


def test_records_without_the_tools_of_a_subagent_have_no_row_for_it(tmp_path: Path) -> None:
    given: dict[str, Any] = {"subagents": [{**HELPER, "enabled_toolsets": ["none"]}]}
    script = [
        {"tool_calls": [{"name": "helper", "arguments": {"task": "T"}}]},
        say("helped"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **given), **given)
    del record["inner_tools"]
    _, manifest = export_to_dataset(make_run(tmp_path, record), formats="openai", segments=True)
    told = manifest["formats"][0]["segments"]
    assert (told["conversations"], told["turns"], told["unknown_turns"]) == ({"main": 1}, 2, 1)


def test_masked_turns_carry_no_loss_in_segments(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        {"tool_calls": [{"name": "fail", "arguments": {}}]},
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **SUMMARIES), **SUMMARIES)
    source = make_run(tmp_path, record)
    recipe = {"segments": True, "mask": {"failed_call": True}, "accept_rows": ["unknown_tool"]}
    found = rows(source, "openai", **recipe)
    marks = [[m.get("weight", 1) for m in r["messages"] if m["role"] == "assistant"] for r in found]
    assert marks == [[1, 0, 1], [0, 1, 1], [1]]
    told = [json.loads(row["metadata"]).get("masked") for row in found]
    assert told == [[{"turn": 2, "reasons": ["failed_call"]}], None, None]
    found = rows(source, "llamafactory", **recipe)
    assert [row["id"] for row in found] == [
        "t0#s1.t1",
        "t0#s1.t3",
        "t0#s2.t2",
        "t0#s2.t3",
        "t0#s3.t1",
    ]


ASKED_TWICE = (
    user("Q1"),
    assistant("Look.", call(), reasoning="R1"),
    result("r1"),
    assistant("A1", reasoning="R2"),
    user("Q2"),
    assistant("A2", reasoning="R3"),
)


def test_reasoning_that_the_endpoint_drops_begins_a_segment(tmp_path: Path) -> None:
    source = make_run(tmp_path, record_of(*ASKED_TWICE))
    (whole,) = rows(source, "openai", segments=True)
    assert [m.get("weight") for m in whole["messages"]] == [None] * 6
    found = rows(source, "openai", segments=True, reasoning="since_user")
    assert [json.loads(row["metadata"])["segment"]["why"] for row in found] == [
        "start",
        "reasoning",
    ]
    thoughts = [
        [m.get("reasoning_content") for m in row["messages"] if m["role"] == "assistant"]
        for row in found
    ]
    assert thoughts == [["R1", "R2"], [None, None, "R3"]]
    assert [m.get("loss") for m in found[1]["messages"]] == [None, False, None, False, None, None]


@pytest.mark.parametrize(("name", "last"), [("llamafactory", "gpt"), ("hermes", "gpt")])
def test_formats_without_marks_have_a_row_for_each_turn(
    tmp_path: Path, name: str, last: str
) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **SUMMARIES), **SUMMARIES)
    found = rows(make_run(tmp_path, record), name, segments=True)
    assert [row["id"] for row in found] == [
        "t0#s1.t1",
        "t0#s1.t2",
        "t0#s1.t3",
        "t0#s2.t2",
        "t0#s2.t3",
        "t0#s3.t1",
    ]
    assert {row["num_turns"] for row in found} == {1}
    assert found[-1]["conversations"][-1]["from"] == last


def test_a_dataset_of_segments_is_made_again_from_the_records(tmp_path: Path) -> None:
    script = [
        call_echo("a"),
        call_echo("b"),
        call_echo("c"),
        say("THE SUMMARY"),
        call_echo("d"),
        ANSWER,
    ]
    record = record_from(play(tmp_path, script, **SUMMARIES), **SUMMARIES)
    source = make_run(tmp_path, record)
    directory, manifest = export_to_dataset(
        source, formats="openai,hermes,llamafactory", segments=True
    )
    assert list(find_problems(source, directory)) == []
    assert manifest["formats"][0]["segments"]["begun"] == {"messages": 1, "start": 2}
    card = (directory / "README.md").read_text()
    assert "rows of `openai` show messages as the model saw them: 2 of main, 1 of summary" in card
    assert "only the last turn of a row" in card


@pytest.mark.parametrize("name", ["dpo", "atif", "rl"])
def test_other_formats_have_no_segments(name: str) -> None:
    with pytest.raises(ValueError, match=f"segments: {name} has no rows for segments; choose"):
        Recipe.model_validate({"formats": name, "segments": True})


def test_since_user_is_for_segments() -> None:
    with pytest.raises(ValueError, match="since_user is for rows of segments"):
        Recipe.model_validate({"formats": "openai", "reasoning": "since_user"})


class Wire:
    """An agent between its talks and a gateway; keeps what each request said."""

    def __init__(self, api: str) -> None:
        self.recording = Recording("Count.")
        self.api = api
        self.sent: list[Any] = []
        self.answers = 0

    def call(self, talk: Talk, command: str | None = "ls", *, thought: str = "Hm.") -> None:
        """One call, or its recorded reply."""
        messages = WIRES[self.api].read(path_for(talk), talk.body()).messages
        self.answers += 1
        if not self.recording.ask(talk, Said(f"Reply {self.answers}.", command, thought)):
            self.sent.append(read_texts(messages))
        if command is not None:
            talk.result(f"result {self.answers}")

    def check(self) -> list[Segment]:
        """Compare segments with the requests."""
        record = to_record(agents_record(self.recording))
        views = [in_one_form(view) for view in learnt_views(record)]
        sent = [in_one_form(view) for view in self.sent]
        assert all(view in sent for view in views)
        live = self.recording.threads.live
        assert len(views) == len(live)
        return segments(record)


def in_one_form(view: list[Any]) -> list[Any]:
    """Arguments as values, and calls by their order: agents make ids of their own."""
    order: dict[str, int] = {}
    found = []
    for role, content, thought, calls, answers in view:
        for id, *_ in calls:
            order[id] = len(order)
        made = [(name, json.loads(arguments)) for _, name, arguments in calls]
        found.append((role, content.strip(), thought, made, order.get(answers)))
    return found


def agents_record(recording: Recording) -> dict[str, Any]:
    """The record of an agent's conversations."""
    found = recording.trajectory.to_record()
    found["agent"] = {"name": "a", "version": "1", **found["agent"]}
    plain = record_of(options={}, view_compacted=False, status_reason=None, finished_at=9.0)
    return {**plain, "attempt": 1, "input_digest": "d", "model": "m", **found}


def begun(api: str) -> tuple[Wire, Talk]:
    wire, talk = Wire(api), TALKS[api]()
    talk.say("Count.")
    wire.call(talk)
    wire.call(talk)
    return wire, talk


APIS = pytest.mark.parametrize("api", [*TALKS])


@APIS
def test_an_agent_that_drops_reasoning_has_a_segment_for_each_turn(api: str) -> None:
    wire, talk = begun(api)
    wire.call(talk, None)
    assert [segment.why for segment in wire.check()] == ["start", "reasoning", "reasoning"]


@APIS
def test_without_reasoning_a_conversation_is_one_segment(api: str) -> None:
    wire, talk = Wire(api), TALKS[api]()
    talk.say("Count.")
    for command in ("ls", "wc", None):
        wire.call(talk, command, thought="")
    (segment,) = wire.check()
    assert len(segment.learnt) == 3


@APIS
def test_another_system_prompt_begins_a_segment(api: str) -> None:
    wire, talk = begun(api)
    talk.system = "You work well."
    wire.call(talk, None)
    assert wire.check()[-1].why == "system"


@APIS
def test_other_tools_begin_a_segment(api: str) -> None:
    wire, talk = Wire(api), TALKS[api]()
    talk.say("Count.")
    wire.call(talk, thought="")
    talk.has_tools = False
    wire.call(talk, None, thought="")
    found = wire.check()
    assert [(one.why, len(one.tools)) for one in found] == [("start", 1), ("tools", 0)]


@APIS
def test_earlier_messages_that_change_begin_a_segment(api: str) -> None:
    wire, talk = begun(api)
    other = TALKS[api]()
    other.say("Count again.")
    talk.items[0] = other.items[0]
    wire.call(talk, None)
    assert len(wire.check()) >= 2


@APIS
def test_rows_of_an_agent_that_says_several_things_in_a_row(tmp_path: Path, api: str) -> None:
    wire, talk = Wire(api), TALKS[api]()
    talk.say("Mind the rules.")
    talk.say("Count.")
    wire.call(talk, thought="")
    talk.say("Remember.")
    wire.call(talk, None, thought="")
    (row,) = rows(make_run(tmp_path, agents_record(wire.recording)), "openai", segments=True)
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("system", "You work."),
        ("user", "Mind the rules.\n\nCount."),
        ("assistant", "Reply 1."),
        ("tool", "result 1\n\nRemember."),
        ("assistant", "Reply 2."),
    ]


def test_results_that_come_in_another_order_after_a_restart_begin_a_segment() -> None:
    wire = Wire("anthropic_messages")
    talk = TwoAtOnce()
    talk.say("Count.")
    wire.call(talk, thought="")
    wire.call(talk, thought="")
    wire.recording.restart()
    again = TwoAtOnce(order=(1, 0))
    again.say("Count.")
    wire.answers = 0
    wire.call(again)
    again.order = (0, 1)
    wire.call(again)
    wire.call(again, None, thought="")
    found = wire.check()
    assert [(one.why, len(one.learnt)) for one in found] == [("start", 2), ("messages", 1)]


STEP = st.sampled_from(["call", "say", "system", "tools", "change", "forget", "restart"])


@settings(max_examples=60)
@given(st.sampled_from([*TALKS]), st.lists(STEP, max_size=12), st.booleans())
def test_whatever_an_agent_does_its_segments_are_its_requests(
    api: str, steps: list[str], thinks: bool
) -> None:
    wire, talk = Wire(api), TALKS[api]()
    talk.say("Count.")
    thought = "Hm." if thinks else ""
    for n, step in enumerate(steps):
        match step:
            case "call":
                wire.call(talk, f"ls {n}", thought=thought)
            case "say":
                talk.say(f"And {n}?")
            case "system":
                talk.system = f"You work {n}."
            case "tools":
                talk.has_tools = not talk.has_tools
            case "change":
                other = TALKS[api]()
                other.say(f"Count {n}.")
                talk.items[0] = other.items[0]
            case "forget":
                other = TALKS[api]()
                other.say(f"So far: {n}.")
                talk.items[:] = other.items
            case "restart":
                wire.recording.restart()
                talk = TALKS[api]()
                talk.say("Count.")
                wire.call(talk, thought=thought)
    wire.call(talk, None, thought=thought)
    wire.check()
