"""`max_conversation_s`: what counts, and what is cut off at the end."""

from __future__ import annotations

import asyncio
import copy
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from agent.loop.loop import run_agent
from agent.loop.rules import ConversationSpec
from agent.loop.tools import AgentTools
from agent.messages.message import Event, Message
from agent.models.client.endpoint import open_model
from agent.models.deadline import TimeAtWork
from agent.models.resolve import resolve_model
from agent.options import AgentOptions
from agent.state.trajectory import Trajectory
from run_agent import AIAgent
from tests.helpers.answering import JSON, answering
from tests.helpers.builders import chat_reply
from tests.helpers.playing import TOOLS, call, calls, play, say
from tests.helpers.running import SCRIPTED, lines, run, write_rows
from toolsets.context import ToolContext
from toolsets.tool import tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

ENOUGH = 3600.0
SOON = 0.3


@tool(idempotent=True)
async def forever(context: ToolContext) -> str:
    """Wait for what never comes."""
    await asyncio.Event().wait()
    return "never"


WITH_FOREVER = (*TOOLS, forever)
LOOK, DONE = calls(call("echo", text="x")), say("done")
HELPER = {"name": "helper", "description": "Helps."}


def longer(events: list[Event], *, kind: str, by_s: float, **more: Any) -> list[Event]:
    """The events, the first one of this kind as if it had begun so much earlier.

    They have taken no other time, however slow the machine was.
    """
    changed: list[Any] = copy.deepcopy(events)
    for event in changed:
        if "duration_s" in event:
            event["duration_s"] = 0.0
    event = next(event for event in changed if event["kind"] == kind)
    event["duration_s"] += by_s
    event["started_at"] -= by_s
    event.update(more)
    return changed


class TestWhatCounts:
    @pytest.mark.parametrize("kind", ["reply", "result"])
    def test_it_is_counted_on_over_starts(self, tmp_path: Path, kind: str) -> None:
        past = play(tmp_path / "a", [LOOK, LOOK, DONE]).events[:2]
        past = longer(past, kind=kind, by_s=1000.0)
        resumed = play(tmp_path / "b", [LOOK, LOOK, DONE], past=past, max_conversation_s=900)
        assert (resumed.status, resumed.requests) == ("time_limit", [])
        assert resumed.end.reason == "1000.0 s are over the limit of 900 s"
        resumed = play(tmp_path / "c", [LOOK, LOOK, DONE], past=past, max_conversation_s=ENOUGH)
        assert resumed.status == "completed"

    def test_waiting_for_a_turn_is_not(self, tmp_path: Path) -> None:
        past = play(tmp_path / "a", [LOOK, DONE]).events[:2]
        past = longer(past, kind="reply", by_s=1000.0, waited_s=900.0)
        resumed = play(tmp_path / "b", [LOOK, DONE], past=past, max_conversation_s=800)
        assert resumed.status == "completed"
        resumed = play(tmp_path / "c", [LOOK, DONE], past=past, max_conversation_s=90)
        assert resumed.status == "time_limit"

    def test_the_time_of_inner_conversations_is(self, tmp_path: Path) -> None:
        given: dict[str, Any] = {"subagents": [{**HELPER, "script": [LOOK, say("yes")]}]}
        script = [calls(call("helper", task="t")), DONE]
        whole = play(tmp_path / "a", script, **given)
        _, reply, *_ = (n for n, event in enumerate(whole.events) if event["kind"] == "sub")
        slow: Any = copy.deepcopy(whole.events[reply])
        slow["event"]["duration_s"] += 1000.0
        slow["event"]["started_at"] -= 1000.0
        past = [*whole.events[:reply], slow]
        resumed = play(tmp_path / "b", script, past=past, max_conversation_s=900, **given)
        assert resumed.status == "time_limit"
        assert resumed.results[0]["details"] == {"subagent": "helper", "status": "time_limit"}

    def test_time_of_parallel_calls_counts_once(self) -> None:
        at_work = TimeAtWork()
        for began, ended in ((0.0, 2.0), (3.0, 4.0), (6.0, 7.0), (1.0, 8.0), (10.0, 11.0)):
            at_work.add(began, ended)
        assert at_work.seconds == 9.0

    def test_a_clock_that_is_set_back_adds_no_time(self) -> None:
        at_work = TimeAtWork()
        at_work.add(5000.0, 5001.0)
        at_work.add(1000.0, 1002.0)
        assert at_work.seconds == 3.0


class TestTheEnd:
    def test_a_tool_is_cut_off(self, tmp_path: Path) -> None:
        script = [calls(call("echo"), call("forever")), DONE]
        given: dict[str, Any] = {"tools": WITH_FOREVER, "max_conversation_s": SOON}
        played = play(tmp_path / "a", script, **given)
        assert played.status == "time_limit"
        assert [result["is_error"] for result in played.results] == [False, True]
        assert played.results[1]["details"] == {"failure": "interrupted"}
        assert "ended before its result (time_limit)" in played.results[1]["content"]
        again = play(tmp_path / "b", script, past=played.events, **given)
        assert (again.status, again.requests) == ("time_limit", [])
        assert again.messages == played.messages

    def test_calls_behind_it_are_not_run(self, tmp_path: Path) -> None:
        script = [calls(call("forever"), call("echo")), DONE]
        given: dict[str, Any] = {"tools": WITH_FOREVER, "max_conversation_s": SOON}
        played = play(tmp_path, script, parallel_tools=False, **given)
        failures = [result["details"]["failure"] for result in played.results]
        assert (played.status, failures) == ("time_limit", ["interrupted", "not_run"])

    def test_a_model_call_is_cut_off_and_recorded(self) -> None:
        is_over = threading.Event()

        def answer(path: str, body: JSON) -> tuple[int, JSON]:
            is_over.wait()
            return 500, {}

        with answering(answer) as (url, requests):
            agent = AIAgent("m", "key", url, enabled_toolsets=["none"], max_conversation_s=SOON)
            with agent.start_session() as session:
                session.new_prompt("go")
            is_over.set()
        assert (session.end.status, len(requests)) == ("time_limit", 1)
        record = session.trajectory.to_record()
        assert [cut["turn"] for cut in record["cut_calls"]] == [1]
        assert (record["api_calls"], len(record["messages"])) == (0, 1)
        orjson.dumps(record)

    @pytest.mark.slow
    def test_a_subagent_whose_model_call_is_cut_off_ends_its_caller(self) -> None:
        is_over = threading.Event()

        def answer(path: str, body: JSON) -> tuple[int, JSON]:
            if body["messages"][0]["content"] == "the task":
                is_over.wait()
            function = {"name": "helper", "arguments": '{"task": "the task"}'}
            call = {"id": "c", "type": "function", "function": function}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            return 200, chat_reply(message)

        given: dict[str, Any] = {"max_conversation_s": 2, "subagents": [HELPER]}
        with answering(answer) as (url, requests):
            agent = AIAgent("m", "key", url, enabled_toolsets=["none"], **given)
            with agent.start_session() as session:
                session.new_prompt("go")
            is_over.set()
        assert (session.end.status, len(requests)) == ("time_limit", 2)
        assert "cut_calls" in session.trajectory.to_record()["inner"][0]

    def test_a_run_keeps_it_among_the_partial_rows(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "import asyncio\n\n\nasync def forever() -> str:\n"
            '    """Wait."""\n    await asyncio.Event().wait()\n    return ""\n'
        )
        script = [calls(call("forever")), DONE]
        slow = {"id": "slow", "agent_options": {"max_conversation_s": SOON}, "script": script}
        quick = {"id": "quick", "prompt": "x", "script": [DONE]}
        write_rows(tmp_path / "p.jsonl", {**slow, "prompt": "x"}, quick)
        given = {**SCRIPTED, "enabled_toolsets": "mine", "tools": "mine:forever"}
        done = run(tmp_path, **given, max_conversation_s=ENOUGH)
        assert done.returncode == 0, done.stderr
        run_dir = tmp_path / "trajectories" / "r"
        summary = orjson.loads((run_dir / "summary.json").read_bytes())
        assert summary["statuses"] == {"completed": 1, "time_limit": 1}
        (row,) = lines(run_dir / "exports" / "partial.jsonl")
        assert row["id"] == "slow"
        changed = run(tmp_path, **given, max_conversation_s=7)
        assert changed.returncode == 2
        assert "max_conversation_s" in changed.stderr


class LateGate:
    """A gate at which a turn comes later than the conversation may last."""

    sent_at = 0.0
    has_answered = False

    async def enter(self, claim: Any) -> LateGate:
        await asyncio.sleep(4.0)
        return self

    def leave(self, outcome: Any) -> None:
        """Nothing is counted."""


@pytest.mark.slow
@pytest.mark.parametrize("limit_s", [2.0, None])
def test_a_call_that_waits_for_its_turn_is_not_cut_off(
    tmp_path: Path, limit_s: float | None
) -> None:
    """Its reply says how long it waited, so that the report can leave that out."""
    options = AgentOptions(max_conversation_s=limit_s)
    trajectory = Trajectory([Message(role="user", content="go")])
    tools = AgentTools(Toolbox((), ToolContext(Workspace(tmp_path))), trajectory, options)

    def answer(path: str, body: JSON) -> tuple[int, JSON]:
        return 200, chat_reply("Done.")

    async def converse(url: str) -> str:
        settings = resolve_model("m", base_url=url, api=None, key_env="none")
        model = open_model(settings, api_key="key", on_retry=print, gate=LateGate())
        try:
            end = await run_agent(
                trajectory,
                model=model,
                tools=tools,
                spec=ConversationSpec(options),
                journal=lambda event: None,
            )
        finally:
            await model.close()
        return end.status

    with answering(answer) as (url, _):
        assert asyncio.run(converse(url)) == "completed"
    (reply,) = trajectory.replies
    assert reply["waited_s"] >= 4.0
