"""Sessions: one prompt after the other, forks, cancellation, transcripts, stream events."""

from __future__ import annotations

import asyncio
import json
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agent import session as agent_session
from agent.messages.message import Message
from agent.models.model import Request
from agent.models.scripted import ScriptedModel, parse_script
from agent.options import AgentOptions
from agent.session import AgentSession
from agent.setup import set_up
from agent.state.history import check_history, complete_history
from agent.views.views import add_views
from batch_trajectories.basics.errors import HostError
from run_agent import AIAgent
from tests.fakes.fake_endpoint import FakeEndpoint
from tests.helpers.playing import SETTINGS, TOOLS, Price, Watched, call, calls, make_file_agent, say
from tests.helpers.running import PATIENCE_S, WRITE_A_NOTE, lines
from toolsets.context import ToolContext
from toolsets.tool import tool

WRITE = calls(call("write_file", path="a", content="A"))
READ = calls(call("read_file", path="a"))


def roles(session: AgentSession) -> list[str]:
    return [message["role"] for message in session.messages]


def test_prompts_build_on_each_other_in_one_workspace() -> None:
    """The second prompt finds the messages and the files of the first."""
    with make_file_agent([WRITE, say("written"), READ, say("it is A")]).start_session() as session:
        assert session.get_variables()["status"] == "idle"
        assert session.new_prompt("write") == "written"
        assert session.new_prompt("read") == "it is A"
        assert roles(session) == ["user", "assistant", "tool", "assistant"] * 2
        assert session.get_last_result() == "it is A"
        assert session.get_variables() == {
            "last_answer": "it is A",
            "status": "done",
            "failed_turns": 0,
        }
        assert session.finalize_failures() is None


def test_a_fork_goes_its_own_way() -> None:
    """Messages and files are copies."""
    script = [WRITE, say("written"), calls(call("write_file", path="a", content="B")), say("b")]
    with make_file_agent([*script, READ, say("seen")]).start_session() as session:
        session.new_prompt("write")
        with session.fork() as fork:
            fork.new_prompt("change it")
            assert len(fork.messages) == 8
        assert len(session.messages) == 4
        session.new_prompt("the same from here")
        assert len(session.messages) == 8


def test_a_fork_knows_what_its_parent_knew() -> None:
    """The tools that the model was shown, and the prompts that failed."""
    none = set_up(AgentOptions(), SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())
    script = [*(calls(call(f"no{n}")) for n in range(3)), say("fine"), say("gone")]
    with make_file_agent(script, max_errors=3).start_session() as session:
        session.new_prompt("x")
        session.set_tools(none)
        with session.fork() as fork:
            failures = session.finalize_failures()
            assert failures is not None
            assert fork.finalize_failures() == failures
            fork.new_prompt("go on")
            (prompt,) = [m for m in fork.messages if "tools_changed" in m.get("notes", ())]
            assert prompt["content"].startswith("[Tools have changed; removed: list_files")
            with fork.fork() as second:
                second.new_prompt("and on")
                assert second.messages[-2]["content"] == "and on", "it was told before"


def test_failed_prompts_are_counted_and_summed_up() -> None:
    """A failed prompt that ended by its error budget counts, too."""
    script = [*(calls(call(f"no{n}")) for n in range(3)), say("fine")]
    with make_file_agent(script, max_errors=3).start_session() as session:
        assert session.new_prompt("x") == ""
        assert session.get_variables()["status"] == "failed"
        assert session.new_prompt("y") == "fine", "counters begin anew"
        failures = session.finalize_failures()
        assert failures is not None
        assert failures["tool"] == "cannot_complete"
        assert "3 errors" in failures["reason"]


def test_names_of_results_hold_over_prompts() -> None:
    """One name means one result in the whole session."""
    write = calls(call("write_file", path="a", content="A"))
    script = [
        write,
        say("1"),
        calls(call("write_file", path="b", content="$$write_file-res-1")),
        READ,
    ]
    with make_file_agent([*script, say("2")], result_references=True).start_session() as session:
        session.new_prompt("x")
        session.new_prompt("y")
        results = [m for m in session.messages if m["role"] == "tool"]
        assert [m["details"]["stored_as"] for m in results] == [
            "write_file-res-1",
            "write_file-res-2",
            "read_file-res-3",
        ]
        assert not any(m["is_error"] for m in results)


def test_a_reserved_name_is_refused_where_it_is_given() -> None:
    """`final_answer` and `cannot_complete` are reserved names."""

    @tool(name="final_answer")
    def mine(context: ToolContext) -> str:
        """Mine."""
        return ""

    with make_file_agent([say("x")]).start_session() as session:
        with pytest.raises(ValueError, match="'final_answer' is reserved"):
            session.set_tools(replace(session._setup.common, tools=(mine,)))
        assert session.new_prompt("x") == "x"


def test_a_prompt_must_not_be_blank() -> None:
    with (
        make_file_agent([say("x")]).start_session() as session,
        pytest.raises(ValueError, match="blank"),
    ):
        session.new_prompt(" ")


def test_the_answer_to_a_tool_that_asked_is_the_next_prompt() -> None:
    """Without a scripted reply the session waits for the next prompt."""
    setup = make_file_agent(
        [calls(call("delete", name="x")), say("gone")], awaiting_input=True
    )._setup
    setup = replace(setup, common=replace(setup.common, tools=TOOLS))
    with AgentSession(setup) as session:
        assert session.new_prompt("delete x") == "Delete x?"
        assert session.get_variables()["status"] == "awaiting_input"
        assert session.new_prompt("yes") == "gone"
        assert roles(session) == ["user", "assistant", "tool", "assistant"]
        assert "deleted x: yes" in session.messages[2]["content"]


def test_a_session_continues_after_a_cancelled_prompt() -> None:
    """The call in flight is cut off, its result says so, a note is kept."""
    with FakeEndpoint(turns=2, latency_s=30.0, **WRITE_A_NOTE) as endpoint:
        waiting = AIAgent("m", "k", endpoint.openai_url, enabled_toolsets=["file"])
        with waiting.start_session() as session:
            thread = threading.Thread(target=session.new_prompt, args=("x",))
            thread.start()
            while session._running is None or not endpoint.journal()["in_flight"]:
                pass
            session.cancel("enough")
            thread.join(timeout=PATIENCE_S)
            assert not thread.is_alive()
            assert session.get_variables()["status"] == "interrupted"
            assert session.end.status == "cancelled"
            assert session.messages[-1]["content"] == "x\n\n[The request was cancelled: enough]"
            assert session.messages[-1]["notes"] == ["cancelled"]


@pytest.mark.parametrize("step", ["run_here", "ModelPool"])
def test_a_prompt_that_has_not_called_the_model_yet_can_be_cancelled(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """A cancellation counts from the moment that `new_prompt` is called, and for it alone."""
    original = getattr(agent_session, step)

    def cancel_before(*given: Any, **more: Any) -> Any:
        session.cancel("at once")
        return original(*given, **more)

    with make_file_agent([say("one"), say("two")]).start_session() as session:
        session.cancel("before any prompt")
        with monkeypatch.context() as patched:
            patched.setattr(agent_session, step, cancel_before)
            assert session.new_prompt("x") == ""
        assert session.end.describe() == "cancelled: at once"
        assert session.messages[-1]["content"] == "x\n\n[The request was cancelled: at once]"
        session.cancel("after the prompt")
        assert session.new_prompt("y") == "one"
        assert session.get_variables()["failed_turns"] == 1


def test_a_prompt_that_could_not_begin_leaves_a_session_that_can_be_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(coroutine: Any) -> Any:
        coroutine.close()
        raise RuntimeError("can't start new thread")

    with make_file_agent([say("one")]).start_session() as session:
        with monkeypatch.context() as patched:
            patched.setattr(agent_session, "run_here", fail)
            with pytest.raises(RuntimeError, match="can't start"):
                session.new_prompt("x")
        assert session.get_variables() == {"last_answer": "", "status": "failed", "failed_turns": 1}
        assert session.new_prompt("y") == "one"


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["cancelled from outside", "a tool of the machine"])
def test_a_session_can_continue_after_an_exception(failure: str) -> None:
    """The calls that were open have a result, so the next prompt has no hole before it."""

    @tool()
    async def slow(context: ToolContext) -> str:
        """Take long, or fail with the machine."""
        if failure != "cancelled from outside":
            raise HostError("disk full")
        limit.reschedule(asyncio.get_running_loop().time())
        await asyncio.Event().wait()
        return ""

    setup = make_file_agent([calls(call("slow")), say("back")])._setup
    setup = replace(setup, common=replace(setup.common, tools=(slow,)))
    limit = asyncio.Timeout(None)  # which the tool ends

    async def use() -> None:
        with AgentSession(setup) as session:
            with pytest.raises((TimeoutError, HostError)):
                async with limit:
                    await session.anew_prompt("x")
            assert session.get_variables()["status"] == "failed"
            assert await session.anew_prompt("again") == "back"
            assert roles(session) == ["user", "assistant", "tool", "user", "assistant"]

    asyncio.run(use())


def test_one_prompt_at_a_time_and_none_after_the_end() -> None:
    async def use() -> None:
        with make_file_agent([say("one"), say("two")]).start_session() as session:
            first = asyncio.create_task(session.anew_prompt("x"))
            await asyncio.sleep(0)
            with pytest.raises(RuntimeError, match="is running"):
                await session.anew_prompt("y")
            assert await first == "one"
        with pytest.raises(RuntimeError, match="is closed"):
            await session.anew_prompt("z")

    asyncio.run(use())


def test_unfinished_conversations_are_saved_as_failed(tmp_path: Path) -> None:
    """A conversation is saved however it ends, and a failed save loses no answer."""
    slow = AIAgent(
        "scripted",
        script=[calls(call("terminal", command="sleep 60"))],
        enabled_toolsets=["terminal"],
        sandbox="local",
        save_trajectories=True,
        output_dir=tmp_path / "t",
    )

    async def use() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(slow.arun_conversation("x"), 1)

    asyncio.run(use())
    (path,) = (tmp_path / "t").iterdir()
    assert path.name == "failed_trajectories.jsonl"
    (row,) = lines(path)
    assert (row["completed"], row["status"]) == (False, "failed")
    (tmp_path / "file").write_text("")
    saving = make_file_agent([say("hi")], save_trajectories=True, output_dir=tmp_path / "file")
    assert saving.chat("x") == "hi"
    with pytest.raises(ValueError, match="blank"):
        saving.chat(" ")


def test_a_key_that_was_given_serves_subagents_of_the_same_endpoint() -> None:
    helper = {"name": "helper", "description": "Helps.", "model": "other"}
    with FakeEndpoint(
        turns=2, latency_s=0.0, key="k", tool="helper", arguments='{"task": "t"}'
    ) as f:
        talking = AIAgent("m", "k", f.openai_url, enabled_toolsets=["none"], subagents=[helper])
        assert talking.run_conversation("x")["status"] == "completed"


def test_max_turns_is_stated_beside_an_ephemeral_prompt() -> None:
    requests: list[Any] = []
    talking = make_file_agent([say("x")], state_max_turns=True, ephemeral_system_prompt="secret")
    result = talking.run_conversation("go")
    assert result["messages"][0]["content"] == "You have at most 20 replies for this task."
    model = Watched(ScriptedModel(parse_script([say("x")])), requests, Price(0.0, 0))
    shown = add_views(model, AgentOptions(ephemeral_system_prompt="secret"))
    asyncio.run(shown.complete(Request(result["messages"][:2])))
    assert requests[0].messages[0]["content"].startswith("secret\n\nYou have at most 20")


def test_tools_can_be_replaced_between_prompts() -> None:
    """The model sees an added tool, and a removed one cannot be called."""
    options = AgentOptions()
    none = set_up(options, SETTINGS, enabled_toolsets=["none"], disabled_toolsets=())
    with make_file_agent([say("hi"), READ, say("no tool")]).start_session() as session:
        session.new_prompt("hello")
        session.set_tools(none)
        session.new_prompt("read a")
        prompt = session.messages[2]
        assert prompt["content"].startswith("[Tools have changed; removed: list_files, patch_file")
        assert prompt["notes"] == ["tools_changed"]
        assert "not found" in session.messages[4]["content"]


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([{"role": "robot", "content": "x"}], "message 0 of the history: its role is 'robot'"),
        ([{"role": "user", "content": " "}], "message 0 .*: its content must be text"),
        ([{"role": "user", "content": "x"}, {"role": "system", "content": "y"}], "message 1 .*"),
        ([{"role": "tool", "content": "x", "tool_call_id": "a"}], "without an open call"),
        (
            [
                {"role": "user", "content": "x"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": ""}}],
                },
                {"role": "user", "content": "x"},
            ],
            r"message 2 of the history: the calls \['a'\] before it have no result",
        ),
        (
            [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": "", "tool_calls": [{}]},
            ],
            "a call needs an id",
        ),
        ([{"role": "assistant", "content": "x"}], "begins with an assistant message"),
    ],
)
def test_a_history_with_a_hole_is_refused(history: list[Message], message: str) -> None:
    """The error names the message before any request is made."""
    with pytest.raises(ValueError, match=message):
        check_history(history)
    with pytest.raises(ValueError, match=message):
        make_file_agent([say("x")]).run_conversation("x", conversation_history=history)


class TestTranscript:
    """A conversation is a JSONL file that is readable up to a crash."""

    def test_it_holds_all_that_happened(self, tmp_path: Path) -> None:
        talking = make_file_agent([WRITE, say(" "), say("done")], transcript_dir=tmp_path / "t")
        talking.run_conversation("x", task_id="../my run")
        (path,) = (tmp_path / "t").iterdir()
        assert path.name == "_my_run.jsonl"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        written = lines(path)
        assert [line["type"] for line in written] == [
            "request",
            "response",
            "tool_result",
            "response",
            "response",
            "accounting",
        ]
        assert written[3]["discarded"] == "blank"
        assert written[-1]["cost_usd"] == 0.0

    def test_an_error_is_a_line_and_the_key_is_nowhere(self, tmp_path: Path) -> None:
        with FakeEndpoint(turns=1, latency_s=0.0, key="right-key-123") as endpoint:
            AIAgent(
                "m",
                "wrong-key-456",
                endpoint.openai_url,
                enabled_toolsets=["none"],
                transcript_dir=tmp_path,
            ).chat("x")
        (path,) = tmp_path.iterdir()
        assert [line["type"] for line in lines(path)] == ["request", "error", "accounting"]
        assert b"wrong-key-456" not in path.read_bytes()

    def test_without_a_directory_there_is_none(self, tmp_path: Path) -> None:
        make_file_agent([say("x")]).chat("x")
        assert not list(tmp_path.iterdir())


class TestEvents:
    """A handler receives each event; without one nothing changes."""

    def test_turns_calls_and_results_are_reported_in_order(self) -> None:
        events: list[Any] = []
        script = [{**WRITE, "reasoning": "hm", "content": "writing"}, say("done")]
        make_file_agent(script, stream_handler=events.append).chat("x")
        assert [event["type"] for event in events] == [
            "thinking_delta",
            "text_delta",
            "tool_use_start",
            "tool_use_delta",
            "tool_use_stop",
            "tool_result",
            "turn_start",
            "text_delta",
        ]
        result = events[5]
        assert result["tool_name"] == "write_file"
        assert result["is_error"] is False
        assert result["duration_ms"] >= 0
        assert events[6]["turn_index"] == 1

    @pytest.mark.parametrize("dialect", ["openai_chat", "anthropic_messages"])
    def test_streamed_or_not_the_record_is_the_same(self, dialect: Any) -> None:
        def converse(**more: Any) -> dict[str, Any]:
            url = fake.openai_url if dialect == "openai_chat" else fake.anthropic_url
            watched = AIAgent("m", "k", url, api=dialect, enabled_toolsets=["file"], **more)
            return watched.run_conversation("x")

        events: list[Any] = []
        with FakeEndpoint(
            turns=3, latency_s=0.0, reasoning_chars=80, calls_per_turn=2, **WRITE_A_NOTE
        ) as fake:
            whole, streamed = converse(), converse(stream_handler=events.append)
        assert streamed["messages"] == whole["messages"]
        assert {event["type"] for event in events} == {
            "turn_start",
            "thinking_delta",
            "text_delta",
            "tool_use_start",
            "tool_use_delta",
            "tool_use_stop",
            "tool_result",
        }

    def test_a_handler_that_fails_loses_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        def broken(event: Any) -> None:
            raise RuntimeError("handler")

        assert make_file_agent([WRITE, say("done")], stream_handler=broken).chat("x") == "done"
        assert "handler" in caplog.text


def test_an_unknown_option_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="max_turn: unknown option; did you mean 'max_turns'"):
        make_file_agent([say("x")], max_turn=3)


def test_it_works_from_a_loop_and_says_what_it_knows() -> None:
    async def notebook() -> str:
        with make_file_agent([say("hi", reasoning="why")]).start_session() as session:
            return await session.anew_prompt("x")

    assert asyncio.run(notebook()) == "hi"
    result = make_file_agent([say("hi", reasoning="why")]).run_conversation("x")
    assert result["last_reasoning"] == "why"
    assert json.dumps(result["messages"])


def test_a_history_may_hold_text_parts_and_a_developer() -> None:
    history: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    ]
    assert [(m["role"], m["content"]) for m in complete_history(history)] == [
        ("system", "Be brief."),
        ("user", "Hi"),
        ("assistant", "Hello."),
    ]
    assert history[0]["role"] == "developer"
