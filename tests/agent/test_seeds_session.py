"""Behaviours of tests/seeds.md at the door for one agent, where no other test proves them."""

from __future__ import annotations

import inspect
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent.session import AgentSession
from batch_trajectories.api.ai_agent import COMPLETED_FILE, AIAgent
from batch_trajectories.basics.errors import HostError
from tests.helpers.playing import call, calls, make_file_agent, say
from tests.helpers.running import PATIENCE_S, ROOT, lines
from toolsets.context import ToolContext
from toolsets.tool import Tool, tool

WRITE = calls(call("write_file", path="a", content="A"))
LOOK = calls(call("list_files"))


def with_tools(made: AIAgent, *tools: Tool) -> AgentSession:
    setup = made._setup
    return AgentSession(replace(setup, common=replace(setup.common, tools=tools)))


def test_the_keywords_of_an_agent_and_their_defaults() -> None:
    """No company's model is the default."""
    parameters = inspect.signature(AIAgent).parameters
    named = (
        "model",
        "api_key",
        "base_url",
        "max_turns",
        "enabled_toolsets",
        "disabled_toolsets",
        "verbose_logging",
        "save_trajectories",
    )
    assert {name: parameters[name].default for name in named} == {
        "model": "",
        "api_key": None,
        "base_url": None,
        "max_turns": 20,
        "enabled_toolsets": None,
        "disabled_toolsets": None,
        "verbose_logging": False,
        "save_trajectories": False,
    }


@pytest.mark.parametrize("script", [[say("42")], [LOOK] * 2, [LOOK]], ids=["done", "bound", "gone"])
def test_a_conversation_has_the_same_keys_however_it_ends(script: list[Any]) -> None:
    """The final text is always a string."""
    result = make_file_agent([*script], max_turns=2).run_conversation("x")
    assert result.keys() == {
        "final_response",
        "messages",
        "status",
        "completed",
        "partial",
        "failed",
        "interrupted",
        "error",
        "api_calls",
        "last_reasoning",
        "usage",
        "cost_usd",
        "model",
        "task_id",
        "stop_reason",
        "transcript",
    }
    assert isinstance(result["final_response"], str)
    assert result["task_id"]


def test_workspaces_are_separate_and_removed_however_a_conversation_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The endings are completed, stopped, failed, and broken off by the machine."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    @tool()
    def breaks(context: ToolContext) -> str:
        """Break."""
        raise HostError("the disk is full")

    first = make_file_agent([WRITE, say("written")]).run_conversation("x", task_id="one")
    second = make_file_agent([LOOK, say("seen")]).run_conversation("x", task_id="two")
    assert (first["task_id"], second["task_id"]) == ("one", "two")
    assert second["messages"][2]["content"] == "[no files]"
    make_file_agent([WRITE, LOOK], max_turns=1).run_conversation("x")
    make_file_agent([WRITE]).run_conversation("x")
    with with_tools(make_file_agent([calls(call("breaks"))]), breaks) as session:
        assert list(tmp_path.iterdir())
        with pytest.raises(HostError):
            session.new_prompt("x")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_conversations_of_several_processes_are_saved_line_by_line(tmp_path: Path) -> None:
    """Appends to one file do not mix."""
    code = (
        "from run_agent import AIAgent\n"
        "for _ in range(20):\n"
        "    AIAgent('scripted', script=[{'content': 'x' * 20000}], enabled_toolsets='none',\n"
        "            save_trajectories=True, output_dir='t').chat('y' * 20000)\n"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        for _ in range(3)
    ]
    assert [process.wait(timeout=PATIENCE_S) for process in started] == [0, 0, 0]
    assert len(lines(tmp_path / "t" / COMPLETED_FILE)) == 60


def test_a_call_in_flight_is_cancelled_and_the_next_prompt_works() -> None:
    """The call has its result, the note stands in the history once."""
    begun, never = threading.Event(), threading.Event()

    @tool()
    async def waits(context: ToolContext) -> str:
        """Wait for ever."""
        import asyncio

        begun.set()
        while not never.is_set():
            await asyncio.sleep(0.01)
        return ""

    made = make_file_agent([calls(call("waits")), say("later")])
    with with_tools(made, waits) as session:
        thread = threading.Thread(target=session.new_prompt, args=("x",))
        thread.start()
        assert begun.wait(PATIENCE_S)
        session.cancel("enough")
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert session.get_variables()["status"] == "interrupted"
        assert session.messages[-1]["is_error"]
        assert session.new_prompt("y") == "later"
        assert session.get_variables()["status"] == "done"
        roles = [message["role"] for message in session.messages]
        assert roles == ["user", "assistant", "tool", "user", "assistant"]
        assert session.messages[2]["content"].count("[The request was cancelled: enough]") == 1


def test_the_files_of_a_fork_are_its_own() -> None:
    """A change in one of the two does not show in the other."""
    read = calls(call("read_file", path="a"))
    with make_file_agent([WRITE, say("written"), read, say("seen")]).start_session() as session:
        session.new_prompt("write")
        with session.fork() as fork:
            (fork._root / "workspace" / "a").write_text("B")
            for reader, content in ((session, "A"), (fork, "B")):
                reader.new_prompt("read")
                assert reader.messages[-2]["content"] == content


def test_prompts_that_ran_out_of_turns_or_gave_up_count_as_failed() -> None:
    """The session continues after such an ending."""
    gives_up = calls(call("cannot_complete", reason="no way"))
    script = [LOOK, gives_up, say("fine")]
    with make_file_agent([*script], max_turns=1, completion_tools=True).start_session() as session:
        for prompt, status, failed in (("a", "failed", 1), ("b", "failed", 2), ("c", "done", 2)):
            session.new_prompt(prompt)
            parsed = session.get_variables()
            assert (parsed["status"], parsed["failed_turns"]) == (status, failed)
        failures = session.finalize_failures()
    assert failures is not None
    assert failures["reason"] == "2 prompts failed; the last one: no way"


def test_a_transcript_without_an_id_is_named_by_its_time(tmp_path: Path) -> None:
    """The file is for its owner alone, under any umask."""
    before = os.umask(0)
    try:
        with make_file_agent(
            [say("hi")], transcript_dir=tmp_path / "deep" / "t"
        ).start_session() as session:
            session.new_prompt("x")
    finally:
        os.umask(before)
    (path,) = (tmp_path / "deep" / "t").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{8}\.jsonl", path.name)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
