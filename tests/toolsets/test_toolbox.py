"""The toolbox turns every way a call can go wrong into a result the model can read."""

from __future__ import annotations

import asyncio
import errno
import math
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batch_trajectories.basics.errors import HostError, ToolError
from batch_trajectories.records.files import StorageError
from tests.helpers.running import PATIENCE_S
from toolsets.catalog.registry import TOOLSETS, collect_tools
from toolsets.context import ToolContext
from toolsets.function_threads import FunctionThreads
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.tool import MAX_RESULT_CHARS, Tool, ToolResult, tool
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(Workspace(tmp_path / "ws"))


@dataclass
class Point:
    """A value that JSON can hold as an object."""

    x: float
    y: float


ITSELF: list[Any] = [1]
ITSELF.append(ITSELF)


def raising(error: BaseException) -> Tool:
    @tool()
    def fail(context: ToolContext) -> str:
        """Fail."""
        raise error

    return fail


def raising_async(error: BaseException) -> Tool:
    @tool()
    async def fail(context: ToolContext) -> str:
        """Fail."""
        raise error

    return fail


def returning(value: Any) -> Tool:
    @tool()
    def give(context: ToolContext) -> Any:
        """Give."""
        return value

    return give


def call(toolbox: Toolbox, name: str, arguments: str = "{}") -> ToolResult:
    return asyncio.run(toolbox.call(name, arguments))


def test_unknown_tool_names_the_ones_there_are(context: ToolContext) -> None:
    toolbox = Toolbox([returning(""), raising(ValueError())], context)
    result = call(toolbox, "sudo")
    assert result.content == "Error: Tool 'sudo' not found. Available: fail, give"
    assert result.is_error
    empty = call(Toolbox([], context), "x")
    assert empty.content == "Error: Tool 'x' not found. Available: none"


def test_bad_arguments_are_explained(context: ToolContext) -> None:
    result = call(
        Toolbox(collect_tools([TOOLSETS["file"]]), context), "read_file", '{"start_line": 0}'
    )
    assert result.is_error
    assert result.content.startswith("Error: invalid arguments for read_file: path: Field required")


class Mute(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize("make", [raising, raising_async])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("boom"), "boom"),
        (ToolError("seen as it is"), "seen as it is"),
        (SystemExit(3), "3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RecursionError("too deep"), "too deep"),
        (MemoryError(), "MemoryError"),
        (asyncio.CancelledError(), "CancelledError"),
        (TimeoutError("mine"), "mine"),
        (BaseExceptionGroup("several", [ValueError("a")]), "several (1 sub-exception)"),
        (Mute(), "Mute"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)
def test_any_exception_of_a_tool_is_an_error_result(
    make: Any, error: BaseException, message: str, context: ToolContext
) -> None:
    result = call(Toolbox([make(error)], context), "fail")
    assert result.content == f"Error executing fail: {message}"
    assert result.is_error
    assert result.details["exception"] == type(error).__name__


def test_stop_iteration_from_a_thread_does_not_hang(context: ToolContext) -> None:
    """A future refuses this exception, so it must not be put into one."""
    toolbox = Toolbox([raising(StopIteration("end"))], context, call_timeout_s=60)
    assert call(toolbox, "fail").content == "Error executing fail: end"


@pytest.mark.parametrize("quick", [False, True])
def test_a_quick_function_runs_in_the_thread_of_the_event_loop(
    context: ToolContext, quick: bool
) -> None:
    @tool(quick=quick)
    def where() -> bool:
        """Say whether this is the main thread."""
        return threading.current_thread() is threading.main_thread()

    assert call(Toolbox([where], context), "where").content == str(quick).lower()


def test_messages_are_cut_and_hide_the_real_root(context: ToolContext) -> None:
    secret = f"{context.workspace.root}/a.txt is " + "long " * 2000
    result = call(Toolbox([raising(OSError(secret))], context), "fail")
    assert "Error executing fail: /workspace/a.txt is long" in result.content
    assert str(context.workspace.root) not in result.content
    assert "characters cut" in result.content
    assert len(result.content) < 2100


def test_slow_tools_are_given_up(context: ToolContext) -> None:
    release = threading.Event()

    @tool()
    def blocks(context: ToolContext) -> str:
        """Block a thread."""
        release.wait(PATIENCE_S)
        return "late"

    @tool()
    async def hangs(context: ToolContext) -> str:
        """Wait for ever."""
        return str(await asyncio.Event().wait())

    @tool()
    async def stubborn(context: ToolContext) -> str:
        """Swallow the cancellation."""
        try:
            await asyncio.Event().wait()
        except BaseException:
            return "as if nothing had happened"
        return ""

    async def calls() -> list[ToolResult]:
        toolbox = Toolbox([blocks, hangs, stubborn], context, call_timeout_s=0.1)
        try:
            return [await toolbox.call(name, "") for name in toolbox.names]
        finally:
            release.set()

    for name, result in zip(("blocks", "hangs", "stubborn"), asyncio.run(calls()), strict=True):
        assert result.content == f"Error executing {name}: no result within 0.1 s"
        assert result.is_error


@tool()
def meets(context: ToolContext) -> str:
    """Wait until as many others run."""
    _MEETING.wait(PATIENCE_S)
    return "met"


_MEETING = threading.Barrier(40)


def test_functions_run_at_the_same_time_however_many(context: ToolContext) -> None:
    async def calls() -> list[ToolResult]:
        toolbox = Toolbox([meets], context, call_timeout_s=PATIENCE_S)
        return await asyncio.gather(*(toolbox.call("meets", "") for _ in range(40)))

    assert [result.content for result in asyncio.run(calls())] == ["met"] * 40


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> FunctionThreads:
    """The machine refuses a second thread for functions."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def refuse(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    threads = FunctionThreads()
    monkeypatch.setattr("toolsets.function_threads._THREADS", threads)
    monkeypatch.setattr("threading.Thread.start", refuse)
    return threads


def test_time_that_a_call_waits_for_a_thread_is_not_its_own(
    context: ToolContext, one_thread: FunctionThreads
) -> None:
    release = threading.Event()
    one_thread.submit(partial(release.wait, PATIENCE_S))

    async def late() -> ToolResult:
        asyncio.get_running_loop().call_later(0.6, release.set)
        return await Toolbox([returning("in time")], context, call_timeout_s=0.5).call("give", "")

    assert asyncio.run(late()).content == "in time"


def test_a_call_begins_in_its_thread_and_not_while_it_waits_for_one(
    context: ToolContext, one_thread: FunctionThreads
) -> None:
    release = threading.Event()
    one_thread.submit(partial(release.wait, PATIENCE_S))
    begun: list[threading.Thread] = []

    @tool()
    def tells(context: ToolContext) -> bool:
        """Tell whether it was noted in this thread that the call begins."""
        return begun == [threading.current_thread()]

    async def waits() -> str:
        toolbox = Toolbox([tells], context)
        begin = lambda: begun.append(threading.current_thread())  # noqa: E731
        running = asyncio.create_task(toolbox.call("tells", "", begin=begin))
        await asyncio.sleep(0)
        assert not begun
        release.set()
        return (await running).content

    assert asyncio.run(waits()) == "true"


@pytest.mark.parametrize("kind", ["sync", "async", "quick"])
def test_a_call_whose_begin_cannot_be_noted_does_not_run(context: ToolContext, kind: str) -> None:
    ran: list[str] = []

    @tool(quick=kind == "quick")
    def act() -> str:
        """Act."""
        ran.append("sync")
        return ""

    @tool(name="act")
    async def act_async() -> str:
        """Act."""
        ran.append("async")
        return ""

    def refuse() -> None:
        raise StorageError("the disk is full")

    toolbox = Toolbox([act_async if kind == "async" else act], context)
    with pytest.raises(StorageError, match="full"):
        asyncio.run(toolbox.call("act", "", begin=refuse))
    assert not ran


def test_functions_that_hold_all_threads_for_ever_stop_the_run(
    context: ToolContext, one_thread: FunctionThreads
) -> None:
    release = threading.Event()

    @tool()
    def blocks(context: ToolContext) -> str:
        """Block a thread."""
        release.wait(PATIENCE_S)
        return "late"

    async def calls() -> None:
        toolbox = Toolbox([blocks, returning("")], context, call_timeout_s=0.05)
        try:
            assert (await toolbox.call("blocks", "")).details["failure"] == "timeout"
            await toolbox.call("give", "")
        finally:
            release.set()

    with pytest.raises(HostError, match="no thread is free"):
        asyncio.run(calls())


HANGING = """
import asyncio, threading
from toolsets.function_threads import LateCall, call_in_thread

async def call():
    try:
        await call_in_thread(threading.Event().wait, timeout_s=0.05)
    except LateCall as error:
        assert not error.future.done()

asyncio.run(call())
"""


def test_a_function_that_never_returns_does_not_keep_the_process_from_ending() -> None:
    subprocess.run([sys.executable, "-c", HANGING], check=True, timeout=PATIENCE_S)


def test_the_time_limit_of_a_function_begins_when_it_does(
    context: ToolContext, one_thread: FunctionThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hours in the queue for a thread do not count."""
    now = [0.0]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], process_time=time.process_time, thread_time=time.thread_time
    )
    monkeypatch.setattr("toolsets.function_threads.time", clock)
    release, begun, go_on = threading.Event(), threading.Event(), threading.Event()

    @tool()
    def waits(context: ToolContext) -> str:
        """Wait."""
        begun.set()
        go_on.wait(PATIENCE_S)
        return "in time"

    async def calls() -> ToolResult:
        one_thread.submit(partial(release.wait, PATIENCE_S))
        toolbox = Toolbox([waits], context, call_timeout_s=PATIENCE_S)
        called = asyncio.create_task(toolbox.call("waits", ""))
        await asyncio.sleep(0)
        now[0] = 100 * PATIENCE_S
        release.set()
        async with asyncio.timeout(PATIENCE_S):
            while not begun.is_set():
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it is looked at meanwhile
        go_on.set()
        return await called

    try:
        assert asyncio.run(calls()).content == "in time"
    finally:
        release.set()
        go_on.set()


@pytest.mark.parametrize("swallows", [False, True])
def test_cancelling_the_caller_is_passed_on(context: ToolContext, swallows: bool) -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()

        @tool()
        async def waits(context: ToolContext) -> str:
            """Wait."""
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not swallows:
                    raise
            return "swallowed"

        task = asyncio.create_task(Toolbox([waits], context).call("waits", ""))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())


@pytest.mark.parametrize(
    ("value", "content", "is_error"),
    [
        ({"ä": [1]}, '{"ä":[1]}', False),
        ("a\ud800b\ud83d\ude00", "a\ufffdb\U0001f600", False),
        (object(), "Error executing give: its result, a object, is not JSON", True),
        ({"n": [None, 1.5]}, '{"n":[null,1.5]}', False),
        ({"n": math.nan}, "Error executing give: its result, a dict, is not JSON: n is nan", True),
        (-math.inf, "Error executing give: its result, a float, is not JSON: it is -inf", True),
        (
            [None, {"a": (1, math.inf), 2**70: "long"}],
            "Error executing give: its result, a list, is not JSON: [1].a[1] is inf",
            True,
        ),
        (
            {"of": Point(1.0, math.nan)},
            "Error executing give: its result, a dict, is not JSON: of.y is nan",
            True,
        ),
        (
            {math.nan: 1},
            "Error executing give: its result, a dict, is not JSON: a key is nan",
            True,
        ),
        (ITSELF, "Error executing give: its result, a list, is not JSON", True),
        (ToolResult(7), "7", False),  # type: ignore[arg-type]  # what a careless tool returns
    ],
)
def test_results_become_valid_text(
    context: ToolContext, value: Any, content: str, is_error: bool
) -> None:
    result = call(Toolbox([returning(value)], context), "give")
    assert result.content.startswith(content)
    assert result.is_error is is_error
    result.content.encode()


def test_long_results_keep_their_head_and_tail(context: ToolContext) -> None:
    result = call(Toolbox([returning("a" + "x" * 500_000 + "z")], context), "give")
    assert result.content[0] + result.content[-1] == "az"
    assert f"{500_002 - MAX_RESULT_CHARS} characters cut" in result.content
    assert len(result.content) < MAX_RESULT_CHARS + 100


def test_details_that_json_cannot_hold_do_not_reach_the_record(context: ToolContext) -> None:
    result = call(Toolbox([returning(ToolResult("ok", details={"x": object()}))], context), "give")
    assert result.content == "ok"
    assert isinstance(result.details["details"], str)
    result = call(Toolbox([returning(ToolResult("", details={"x": math.nan}))], context), "give")
    assert result.details == {"details": "{'x': nan}"}, "and not null"


def test_schemas_and_traits_are_those_of_the_tools(context: ToolContext) -> None:
    toolbox = Toolbox(collect_tools(list(TOOLSETS.values())), context)
    assert toolbox.names == sorted(toolbox.names)
    assert [schema["function"]["name"] for schema in toolbox.schemas] == toolbox.names
    assert toolbox.is_idempotent("read_file")
    assert toolbox.is_idempotent("write_file")
    assert not toolbox.is_idempotent("patch_file")
    assert not toolbox.is_idempotent("terminal")
    assert toolbox.is_sequential("terminal")
    assert not toolbox.is_sequential("read_file")
    assert toolbox.is_idempotent("no-such-tool")
    assert not toolbox.is_sequential("no-such-tool")


def test_two_tools_of_one_name_are_refused(context: ToolContext) -> None:
    with pytest.raises(ValueError, match="same name"):
        Toolbox([returning(1), returning(2)], context)


@pytest.mark.parametrize("remove", [True, False])
def test_closing_removes_the_workspace_only_if_asked(tmp_path: Path, remove: bool) -> None:
    async def task() -> None:
        workspace = Workspace(tmp_path / "ws")
        context = ToolContext(workspace, make_sandbox("local", workspace, Limits()))
        toolbox = Toolbox(collect_tools(list(TOOLSETS.values())), context)
        await toolbox.call("terminal", '{"command": "mkdir -p a/b; touch a/b/c; chmod 500 a/b"}')
        assert (tmp_path / "ws" / "a" / "b" / "c").exists()
        await toolbox.close(remove_workspace=remove)
        await toolbox.close(remove_workspace=remove)
        late = await toolbox.call("write_file", '{"path": "x", "content": ""}')
        assert late.content == "Error executing write_file: the workspace is closed"

    asyncio.run(task())
    assert (tmp_path / "ws").exists() is not remove


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failure_of_the_machine_is_not_a_result(tmp_path: Path, asynchronous: bool) -> None:
    """A full disk must not become something that a model sees, or is trained on."""

    @tool(name="full")
    def full(context: ToolContext) -> str:
        """Write."""
        raise OSError(errno.ENOSPC, "No space left on device")

    @tool(name="full")
    async def async_full(context: ToolContext) -> str:
        """Write."""
        raise OSError(errno.ENOSPC, "No space left on device")

    context = ToolContext(Workspace(tmp_path / "w"))
    toolbox = Toolbox([async_full if asynchronous else full], context)
    with pytest.raises(HostError, match="No space left"):
        asyncio.run(toolbox.call("full", ""))
