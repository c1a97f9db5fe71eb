"""The agent loop with the scripted model and real tools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agent.loop import run_agent, take_up
from agent.messages import Event, Message
from agent.models.errors import ModelError
from agent.models.scripted import ScriptedModel, parse_script
from agent.trajectory import Status, Trajectory
from toolsets.registry import resolve_toolsets, tools_of
from toolsets.sandbox import Limits, make_sandbox
from toolsets.space import TaskSpace
from toolsets.toolbox import Toolbox
from toolsets.workspace import Workspace

OPENING = [Message(role="user", content="go")]


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def open_toolbox(root: Path, toolset: str = "file") -> Toolbox:
    workspace = Workspace(root)
    return Toolbox(
        tools_of(resolve_toolsets([toolset])),
        TaskSpace(workspace, make_sandbox("local", workspace, Limits())),
    )


def play(
    root: Path,
    script: Sequence[Any],
    *,
    max_turns: int | None = 20,
    past: list[Event] | None = None,
    toolset: str = "file",
) -> tuple[Trajectory, Status, list[Event]]:
    """Run a script from `past` on; give the trajectory, its ending and all events."""
    events = list(past or ())
    trajectory = Trajectory(OPENING, events)

    async def run() -> Status:
        toolbox = open_toolbox(root, toolset)
        if past is not None:
            take_up(trajectory, toolbox=toolbox, journal=events.append, kept=True)
        status = await run_agent(
            trajectory,
            model=ScriptedModel(parse_script(script)),
            toolbox=toolbox,
            max_turns=max_turns,
            journal=events.append,
        )
        await toolbox.close(remove_workspace=False)
        return status

    return trajectory, asyncio.run(run()), events


SCRIPT: list[Any] = [
    {"reasoning": "two files", "tool_calls": [
        call("write_file", path="a", content="A"), call("write_file", path="b", content="B")]},
    {"tool_calls": [call("read_file", path="a"), call("read_file", path="b"), call("nothing")]},
    {"reasoning": "done", "content": "A and B"},
]  # fmt: skip


def test_a_conversation_runs_to_its_answer(tmp_path: Path) -> None:
    trajectory, status, _ = play(tmp_path / "w", SCRIPT)
    assert status == "completed"
    assert trajectory.final_text() == "A and B"
    assert [message["role"] for message in trajectory.messages] == (
        ["user", "assistant", "tool", "tool", "assistant", "tool", "tool", "tool", "assistant"]
    )


def test_every_call_has_its_result_in_call_order(tmp_path: Path) -> None:
    trajectory, _, _ = play(tmp_path / "w", SCRIPT)
    asked = [c["id"] for m in trajectory.messages for c in m.get("tool_calls", ())]
    answered = [m["tool_call_id"] for m in trajectory.messages if m["role"] == "tool"]
    assert asked == answered
    assert len(set(asked)) == len(asked)


def test_mistakes_of_the_model_are_error_results(tmp_path: Path) -> None:
    """Unknown tools, arguments that are no JSON, wrong arguments and failing tools go on."""
    trajectory, status, _ = play(tmp_path / "w", [
        {"tool_calls": [
            {"name": "nope", "arguments": {}},
            {"name": "read_file", "arguments": "{not json"},
            {"name": "read_file", "arguments": {"wrong": 1}},
            {"name": "read_file", "arguments": {"path": "absent.txt"}}]},
        {"content": "I see."},
    ])  # fmt: skip
    results = [message for message in trajectory.messages if message["role"] == "tool"]
    assert status == "completed"
    assert [result["is_error"] for result in results] == [True] * 4
    assert results[0]["content"].startswith("Error: Tool 'nope' not found. Available: list_files")
    assert trajectory.messages[1]["tool_calls"][1]["function"]["arguments"] == "{not json"


def test_a_disabled_tool_is_not_run(tmp_path: Path) -> None:
    """A tool outside the enabled toolsets is unknown, however well the model knows it."""
    trajectory, _, _ = play(
        tmp_path / "w",
        [{"tool_calls": [call("terminal", command="touch escaped")]}, {"content": "ok"}],
    )
    assert trajectory.messages[2]["is_error"]
    assert not (tmp_path / "w" / "escaped").exists()


def test_calls_of_the_last_turn_are_run_and_the_ending_is_max_turns(tmp_path: Path) -> None:
    trajectory, status, _ = play(tmp_path / "w", SCRIPT, max_turns=1)
    assert status == "max_turns"
    assert (tmp_path / "w" / "b").read_text() == "B"
    assert trajectory.messages[-1]["role"] == "tool"
    assert trajectory.final_text() == ""


def test_an_answer_on_the_last_turn_is_completed(tmp_path: Path) -> None:
    assert play(tmp_path / "w", SCRIPT, max_turns=3)[1] == "completed"


@pytest.mark.parametrize("ending", ["length", "refusal", "context_exceeded"])
def test_a_cut_reply_ends_the_conversation_and_none_of_its_calls_is_run(
    tmp_path: Path, ending: str
) -> None:
    script = [{"tool_calls": [call("write_file", path="a", content="A")], "finish_reason": ending}]
    trajectory, status, _ = play(tmp_path / "w", script)
    assert status == ending
    assert not (tmp_path / "w" / "a").exists()
    assert len(trajectory.messages) == 2


def test_a_paused_turn_is_asked_on(tmp_path: Path) -> None:
    script = [{"content": "wait", "finish_reason": "pause"}, {"content": "there"}]
    trajectory, status, _ = play(tmp_path / "w", script)
    assert (status, trajectory.turns) == ("completed", 2)


def test_a_blank_answer_is_not_completed(tmp_path: Path) -> None:
    assert play(tmp_path / "w", [{"reasoning": "hm", "content": "  "}])[1] == "errors"


def test_a_script_that_is_played_out_fails(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ends after turn 1"):
        play(tmp_path / "w", SCRIPT[:1])


def test_repeated_and_empty_call_ids_become_unique(tmp_path: Path) -> None:
    """Ids pair calls with results, and some servers send the same id again or none at all."""
    from agent.loop import _with_unique_call_ids

    trajectory = Trajectory(OPENING)
    function = {"name": "f", "arguments": ""}
    message: Any = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": id, "type": "function", "function": function} for id in ("x", "", "x", "y")
        ],
    }
    ids = [c["id"] for c in _with_unique_call_ids(message, trajectory)["tool_calls"]]
    assert ids == ["x", "call_1_1", "call_1_2", "y"]


@pytest.mark.parametrize("length", range(9))
def test_resuming_after_any_event_gives_the_same_conversation(tmp_path: Path, length: int) -> None:
    """Killed after n journaled events: the rest is played on, and the messages are the same."""
    whole, status, events = play(tmp_path / "w", SCRIPT)
    resumed, resumed_status, _ = play(tmp_path / "w", SCRIPT, past=events[:length])
    assert len(events) == 8
    assert resumed_status == status
    assert resumed.messages == whole.messages
    assert len(resumed.resumes) == 1


def test_an_interrupted_call_is_not_repeated_unless_its_tool_allows_it(tmp_path: Path) -> None:
    script = [
        {"tool_calls": [call("terminal", command="echo x >> log")]},
        {"content": "done"},
    ]
    _, _, events = play(tmp_path / "w", script, toolset="terminal")
    resumed, status, _ = play(tmp_path / "w", script, past=events[:1], toolset="terminal")
    assert status == "completed"
    assert (tmp_path / "w" / "log").read_text() == "x\n"
    assert resumed.messages[2]["is_error"]
    assert "interrupted" in resumed.messages[2]["content"]
    assert resumed.resumes[0]["interrupted"] == ["call_1_0"]


def test_calls_behind_an_interrupted_one_had_not_begun_and_are_run(tmp_path: Path) -> None:
    """Calls that change the workspace run one after the other, so only the first can have run."""
    first, second = (call("terminal", command=f"echo {n} >> log") for n in (1, 2))
    script = [{"tool_calls": [first, second]}, {"content": "done"}]
    _, _, events = play(tmp_path / "w", script, toolset="terminal")
    (tmp_path / "w" / "log").unlink()
    resumed, status, _ = play(tmp_path / "w", script, past=events[:1], toolset="terminal")
    assert status == "completed"
    assert [message["is_error"] for message in resumed.messages[2:4]] == [True, False]
    assert (tmp_path / "w" / "log").read_text() == "2\n"


def test_a_finished_conversation_that_is_resumed_asks_for_nothing(tmp_path: Path) -> None:
    """Killed between the last reply and the record: no model call is needed any more."""
    _, _, events = play(tmp_path / "w", SCRIPT)
    resumed, status, _ = play(tmp_path / "w", [{"content": "never"}], past=events)
    assert (status, resumed.final_text()) == ("completed", "A and B")
