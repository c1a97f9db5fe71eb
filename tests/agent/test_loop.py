"""The agent loop with the scripted model and real tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.loop.acceptance import MAX_CALLS, MAX_RUN_CALLS
from agent.messages.message import BeganEvent, Event, OpeningEvent, RestartedEvent, SubEvent
from agent.models.errors import ModelError
from agent.state.events import make_ids_unique, note_event
from agent.state.trajectory import CONTINUE_CUT, Trajectory
from tests.helpers.playing import OPENING, Played, call, calls, say
from tests.helpers.playing import play as play_with


def play(root: Path, script: list[Any], *, toolset: str = "file", **more: Any) -> Played:
    return play_with(root, script, toolset=toolset, **more)


SCRIPT: list[Any] = [
    {
        "reasoning": "two files",
        "tool_calls": [
            call("write_file", path="a", content="A"),
            call("write_file", path="b", content="B"),
        ],
    },
    {"tool_calls": [call("read_file", path="a"), call("read_file", path="b"), call("nothing")]},
    {"reasoning": "done", "content": "A and B"},
]


def test_a_conversation_runs_to_its_answer(tmp_path: Path) -> None:
    played = play(tmp_path / "w", SCRIPT)
    assert played.status == "completed"
    assert played.trajectory.final_text() == "A and B"
    assert [message["role"] for message in played.messages] == (
        ["user", "assistant", "tool", "tool", "assistant", "tool", "tool", "tool", "assistant"]
    )


def test_every_call_has_its_result_in_call_order(tmp_path: Path) -> None:
    played = play(tmp_path / "w", SCRIPT)
    ids = [c["id"] for m in played.messages for c in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in played.messages if m["role"] == "tool"]
    assert ids == answered
    assert len(set(ids)) == len(ids)


def test_mistakes_of_the_model_are_error_results(tmp_path: Path) -> None:
    """Unknown tools, arguments that are not JSON or do not fit, and failing tools."""
    played = play(
        tmp_path / "w",
        [
            {
                "tool_calls": [
                    {"name": "nope", "arguments": {}},
                    {"name": "read_file", "arguments": "{not json"},
                    {"name": "read_file", "arguments": {"wrong": 1}},
                    {"name": "read_file", "arguments": {"path": "absent.txt"}},
                ]
            },
            {"content": "I see."},
        ],
    )
    results = [message for message in played.messages if message["role"] == "tool"]
    assert played.status == "completed"
    assert [result["is_error"] for result in results] == [True] * 4
    assert results[0]["content"].startswith("Error: Tool 'nope' not found. Available: list_files")
    assert played.messages[1]["tool_calls"][1]["function"]["arguments"] == "{not json"


def test_a_disabled_tool_is_not_run(tmp_path: Path) -> None:
    """A tool outside the enabled toolsets is unknown, however well the model knows it."""
    played = play(
        tmp_path / "w",
        [{"tool_calls": [call("terminal", command="touch escaped")]}, {"content": "ok"}],
    )
    assert played.messages[2]["is_error"]
    assert not (tmp_path / "w" / "escaped").exists()


def test_calls_of_the_last_turn_are_run_and_the_ending_is_max_turns(tmp_path: Path) -> None:
    played = play(tmp_path / "w", SCRIPT, max_turns=1)
    assert played.status == "max_turns"
    assert (tmp_path / "w" / "b").read_text() == "B"
    assert played.messages[-1]["role"] == "tool"
    assert played.trajectory.final_text() == ""


def test_an_answer_on_the_last_turn_is_completed(tmp_path: Path) -> None:
    assert play(tmp_path / "w", SCRIPT, max_turns=3).status == "completed"


@pytest.mark.parametrize("ending", ["length", "refusal", "context_exceeded"])
def test_a_cut_reply_ends_the_conversation_and_none_of_its_calls_is_run(
    tmp_path: Path, ending: str
) -> None:
    script = [{"tool_calls": [call("write_file", path="a", content="A")], "finish_reason": ending}]
    played = play(tmp_path / "w", script)
    assert played.status == ending
    assert not (tmp_path / "w" / "a").exists()
    (result,) = played.results
    assert result["is_error"]
    assert result["details"] == {"failure": "not_run"}


def test_a_paused_turn_is_asked_on(tmp_path: Path) -> None:
    script = [{"content": "wait", "finish_reason": "pause"}, {"content": "there"}]
    played = play(tmp_path / "w", script)
    assert (played.status, played.trajectory.turns) == ("completed", 2)


def test_a_blank_answer_is_not_completed(tmp_path: Path) -> None:
    """It is asked for again, twice; what was paid for is kept beside the conversation."""
    blank = {"reasoning": "hm", "content": "  "}
    played = play(tmp_path / "w", [blank] * 3)
    assert played.status == "errors"
    assert played.roles == ["user"]
    assert [reply["discarded"] for reply in played.trajectory.discarded] == ["blank"] * 3
    again = play(tmp_path / "w", [blank, blank, {"content": "yes"}])
    assert (again.status, again.trajectory.turns) == ("completed", 1)
    assert again.trajectory.api_calls() == 3


def test_a_script_that_is_played_out_fails(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ends after turn 1"):
        play(tmp_path / "w", SCRIPT[:1])


def test_repeated_and_empty_call_ids_become_unique(tmp_path: Path) -> None:
    """Ids pair calls with results, and some servers send the same id again or none at all."""
    function = {"name": "f", "arguments": ""}
    message: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": function} for id in ("x", "", "x", "y", "z")
        ],
    }
    make_ids_unique(message, {"z"}, turn=1)
    ids = [c["id"] for c in message["tool_calls"]]
    assert ids == ["x", "call_1_1", "call_1_2", "y", "call_1_4"]
    message["tool_calls"][1]["id"] = ""
    message["tool_calls"][2]["id"] = "call_1_1"
    make_ids_unique(message, {"call_1_4"}, turn=1)
    ids = [c["id"] for c in message["tool_calls"]]
    assert ids == ["x", "call_1_1_2", "call_1_1", "y", "call_1_4_2"], "also against made-up ones"


@pytest.mark.parametrize(
    ("used", "given", "unique"),
    [
        ([], ["functions.f:0", "functions.f:0"], ["functions.f:0", "functions.f:1"]),
        (["functions.f:0"], ["functions.f:0"], ["functions.f:1"]),
        (["functions.f:0", "functions.f:1"], ["functions.f:0"], ["functions.f:2"]),
        (["f:0", "g:1"], ["f:0", "g:1"], ["f:2", "g:3"]),
        (["functions.f:0"], ["functions.f:0", "functions.f:1"], ["functions.f:2", "functions.f:1"]),
        (["functions.a.b-c:7"], ["functions.a.b-c:7"], ["functions.a.b-c:8"]),
        (["f:0", "f:1:2"], ["f:0", "f:1:2", ""], ["f:1", "call_3_1", "call_3_2"]),
        (["call_a", "1:2"], ["call_a", "1:2"], ["call_3_0", "call_3_1"]),
    ],
)
def test_numbered_ids_stay_numbered(used: list[str], given: list[str], unique: list[str]) -> None:
    """The template of Kimi shows them to the model, which counts its calls on from them."""
    calls = [
        {"id": id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for id in given
    ]
    message: Any = {"role": "assistant", "content": "", "tool_calls": calls}
    make_ids_unique(message, used, turn=3)
    assert [call["id"] for call in message["tool_calls"]] == unique


@pytest.mark.parametrize("length", range(9))
def test_resuming_after_any_event_gives_the_same_conversation(tmp_path: Path, length: int) -> None:
    """Killed after n journaled events: the rest is played on, and the messages are the same."""
    whole = play(tmp_path / "w", SCRIPT)
    resumed = play(tmp_path / "w", SCRIPT, past=whole.events[:length])
    assert len(whole.events) == 8
    assert resumed.status == whole.status
    assert resumed.messages == whole.messages
    assert len(resumed.trajectory.resumes) == 1


def test_an_interrupted_call_is_not_repeated_unless_its_tool_allows_it(tmp_path: Path) -> None:
    script = [
        {"tool_calls": [call("terminal", command="echo x >> log")]},
        {"content": "done"},
    ]
    events = play(tmp_path / "w", script, toolset="terminal").events
    resumed = play(tmp_path / "w", script, past=events[:1], toolset="terminal")
    assert resumed.status == "completed"
    assert (tmp_path / "w" / "log").read_text() == "x\n"
    assert resumed.messages[2]["is_error"]
    assert "interrupted" in resumed.messages[2]["content"]
    assert resumed.trajectory.resumes[0]["interrupted"] == ["call_1_0"]


def test_a_call_that_had_not_begun_runs(tmp_path: Path) -> None:
    """Where the journal has an event of each call that begins, one without it only waited."""
    script = [calls(call("count"), call("echo"), call("count")), say("done")]
    events = play_with(tmp_path / "w", script).events
    assert [event["kind"] for event in events].count("began") == 2, "echo may be repeated"
    waited, began = (
        [e for e in events[:-1] if e["kind"] == "reply" or e.get("call_id") in ids]
        for ids in ((), ("call_1_0",))
    )
    resumed = play_with(tmp_path / "w", script, past=waited, knows_begun=True)
    first, echoed, second = (result["content"] for result in resumed.results)
    assert echoed == ""
    assert {first, second} == {"3", "4"}, "both ran, in either order"
    assert resumed.trajectory.resumes[0]["interrupted"] == []
    resumed = play_with(tmp_path / "w", script, past=began, knows_begun=True)
    assert [result["is_error"] for result in resumed.results] == [True, False, False]
    assert resumed.trajectory.resumes[0]["interrupted"] == ["call_1_0"]
    # An earlier version wrote no such events: all may have begun.
    resumed = play_with(tmp_path / "w", script, past=waited)
    assert resumed.trajectory.resumes[0]["interrupted"] == ["call_1_0", "call_1_2"]


def test_a_call_of_a_new_attempt_has_not_begun_because_an_older_one_with_its_id_had(
    tmp_path: Path,
) -> None:
    """Many servers number their calls from 0 in each conversation."""
    script = [calls(call("count")), say("done")]
    reply, began, *_ = play_with(tmp_path / "w", script).events
    lost = RestartedEvent(kind="restarted", turn=1, reason="the workspace was lost", at=0.0)
    past = [reply, began, lost, reply]
    resumed = play_with(tmp_path / "w", script, past=past, knows_begun=True)
    assert resumed.trajectory.resumes[0]["interrupted"] == []
    assert [result["is_error"] for result in resumed.results] == [False]


def test_a_restart_leaves_nothing_of_the_earlier_attempt(tmp_path: Path) -> None:
    """Only what was paid, and the history of the task, stays."""
    script = [calls(call("count")), calls(call("delete", name="x")), calls(call("count"))]
    played = play_with(
        tmp_path / "w", [*script, say("done")], awaiting_input=True, user_replies=["yes"]
    )
    events: list[Event] = [*played.events]
    events.insert(-1, note_event(3, CONTINUE_CUT, "go on"))
    events.append(BeganEvent(kind="began", call_id="call_9"))
    events.append(SubEvent(kind="sub", key="a", name="a", event=events[0]))
    events.append(OpeningEvent(kind="opening", messages=[*OPENING, *OPENING]))
    lost = RestartedEvent(kind="restarted", turn=4, reason="the workspace was lost", at=0.0)
    fresh, restarted = vars(Trajectory(OPENING)), vars(Trajectory(OPENING, [*events, lost]))
    of_task = {"discarded", "restarts", "resumes", "cut", "forked", "agent_calls", "_outer"}
    paid = {"spent_usd", "unpriced", "spent_tokens", "uncounted", "_at_work", "_not_added"}
    for field in fresh.keys() - of_task - paid:
        old, new = (
            vars(state[field]) if field == "tally" else state[field] for state in (fresh, restarted)
        )
        assert new == old, field


def test_a_second_call_with_the_users_reply_begins_of_its_own(tmp_path: Path) -> None:
    script = [calls(call("delete", name="x")), say("done")]
    options: dict[str, Any] = {"awaiting_input": True, "user_replies": ["yes"]}
    events = play_with(tmp_path / "w", script, **options).events
    kinds = [event["kind"] for event in events]
    assert kinds == ["reply", "began", "result", "began", "result", "reply"]
    asked, began = (
        play_with(tmp_path / "w", script, past=events[:n], knows_begun=True, **options)
        for n in (3, 4)
    )
    assert asked.results[0]["content"].endswith("deleted x: yes")
    assert "interrupted" in began.results[0]["content"]


def test_calls_behind_an_interrupted_one_had_not_begun_and_are_run(tmp_path: Path) -> None:
    """Calls that change the workspace run one after the other, so only the first can have run."""
    first, second = (call("terminal", command=f"echo {n} >> log") for n in (1, 2))
    script = [{"tool_calls": [first, second]}, {"content": "done"}]
    events = play(tmp_path / "w", script, toolset="terminal").events
    (tmp_path / "w" / "log").unlink()
    resumed = play(tmp_path / "w", script, past=events[:1], toolset="terminal")
    assert resumed.status == "completed"
    assert [message["is_error"] for message in resumed.messages[2:4]] == [True, False]
    assert (tmp_path / "w" / "log").read_text() == "2\n"


def test_a_finished_conversation_that_is_resumed_asks_for_nothing(tmp_path: Path) -> None:
    """Killed between the last reply and the record: no model call is needed any more."""
    events = play(tmp_path / "w", SCRIPT).events
    resumed = play(tmp_path / "w", [{"content": "never"}], past=events)
    assert (resumed.status, resumed.trajectory.final_text()) == ("completed", "A and B")


class TestManyCalls:
    """A reply may hold any number of calls; only so many are run."""

    MANY = calls(*(call("echo", text=f"{n}") for n in range(MAX_RUN_CALLS + 3)))

    def test_calls_above_the_limit_are_not_run_and_their_results_say_so(
        self, tmp_path: Path
    ) -> None:
        played = play_with(tmp_path, [self.MANY, say("done")])
        assert played.status == "completed", "they use up no errors"
        contents = [result["content"] for result in played.results]
        assert contents[:MAX_RUN_CALLS] == [f"{n}" for n in range(MAX_RUN_CALLS)]
        assert (
            contents[MAX_RUN_CALLS:]
            == [
                "Error: this call was not run: of one reply, the first 128 calls are run. Make it "
                "again in a later reply if it is still needed."
            ]
            * 3
        )
        assert played.results[-1]["details"] == {"failure": "not_run"}

    @pytest.mark.parametrize("name", ["echo", "count"])
    @pytest.mark.parametrize("events", [1, 2, MAX_RUN_CALLS, MAX_RUN_CALLS + 2])
    def test_a_resumed_conversation_runs_no_more(
        self, tmp_path: Path, name: str, events: int
    ) -> None:
        """A call that was never to be run is none that may have been interrupted."""
        script = [calls(*(call(name) for _ in range(MAX_RUN_CALLS + 3))), say("done")]
        whole = play_with(tmp_path / "a", script)
        resumed = play_with(tmp_path / "b", script, past=whole.events[:events])
        assert resumed.status == "completed"
        assert resumed.results[MAX_RUN_CALLS:] == whole.results[MAX_RUN_CALLS:]

    @pytest.mark.parametrize("finish_reason", ["tool_calls", "length"])
    def test_a_reply_of_absurdly_many_is_set_aside(
        self, tmp_path: Path, finish_reason: str
    ) -> None:
        absurd = calls(*(call("echo") for _ in range(MAX_CALLS + 1)), finish_reason=finish_reason)
        played = play_with(tmp_path, [absurd, say("done")])
        (reply,) = played.trajectory.discarded
        assert played.status == "completed"
        assert reply["discarded"] == "too_many_calls"
        assert len(reply["message"]["tool_calls"]) == MAX_CALLS + 1, "the record holds it whole"
        played = play_with(tmp_path, [absurd] * 3)
        assert (played.status, played.roles) == ("errors", ["user"])
        assert played.end.reason == "3 unusable replies in a row, the last one too_many_calls"
