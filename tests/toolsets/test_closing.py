"""Several resources are closed, each of them also if another one fails to close."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agent.gateway.server import Gateway
from agent.models.client.pool import ModelPool
from agent.models.resolve import read_key
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import HostError
from batch_trajectories.engine.worker.reward_functions import RewardFunctions
from tests.helpers.running import lines, run, write_rows
from toolsets.context import ToolContext
from toolsets.sandbox.fork_servers import FORK_SERVERS
from toolsets.workspace.workspace import Workspace


class Closings:
    """Resources that note that they are closed, of which some fail."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def of(self, name: str, error: BaseException | None = None) -> Callable[..., Awaitable[None]]:
        async def close(*_: Any, **__: Any) -> None:
            self.closed.append(name)
            if error is not None:
                raise error

        return close

    def one(self, name: str, error: BaseException | None = None) -> Any:
        return SimpleNamespace(close=self.of(name, error), stop=self.of(name, error))


def test_all_are_closed_and_the_first_failure_is_raised() -> None:
    made = Closings()
    failing = [made.of("a", ValueError("a")), made.of("b"), made.of("c", OSError("c"))]
    with pytest.raises(ValueError, match="a"):
        asyncio.run(close_all(*failing, made.of("d")))
    assert made.closed == ["a", "b", "c", "d"]
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(close_all(made.of("e", ValueError()), made.of("f", asyncio.CancelledError())))


def test_a_resource_of_a_tool_that_does_not_close_leaves_nothing_else_open(tmp_path: Path) -> None:
    """Neither the others, nor the sandbox, nor the files; and the conversation is not lost."""
    made = Closings()
    workspace = Workspace(tmp_path / "w")
    workspace.make()
    context = ToolContext(workspace, made.one("sandbox"))
    broken = made.one("broken", ValueError("broken"))
    context.held.update({"first": made.one("first"), "broken": broken})
    asyncio.run(context.close(remove=True))
    assert made.closed == ["broken", "first", "sandbox"]
    assert not (tmp_path / "w").exists()
    asyncio.run(context.close(remove=True))  # may be repeated


@pytest.mark.parametrize("error", [HostError("no memory"), asyncio.CancelledError()])
def test_a_failure_of_the_machine_is_raised_once_all_is_closed(
    tmp_path: Path, error: BaseException
) -> None:
    made = Closings()
    workspace = Workspace(tmp_path / "w")
    workspace.make()
    context = ToolContext(workspace, made.one("sandbox", ValueError("sandbox")))
    context.held.update({"first": made.one("first"), "broken": made.one("broken", error)})
    with pytest.raises(type(error)):
        asyncio.run(context.close(remove=True))
    assert made.closed == ["broken", "first", "sandbox"]
    assert not (tmp_path / "w").exists()


def test_models_reward_functions_and_a_gateway_close_all_they_have() -> None:
    made = Closings()
    pool: Any = ModelPool(key_of=read_key, on_retry=print)
    pool._open = {n: made.one(f"model {n}", None if n else ValueError("0")) for n in range(3)}
    functions = RewardFunctions([], timeout_s=1.0)
    functions._functions = [made.one("function 0", ValueError("0")), made.one("function 1")]
    relay = made.one("relay", ValueError("0"))
    gateway = Gateway(relay, wires=())
    for n in range(2):
        shutdown = made.of(f"server {n}", ValueError("0"))
        server: Any = SimpleNamespace(pre_shutdown=lambda: None, shutdown=shutdown)
        listener: Any = SimpleNamespace(close=lambda: None)
        gateway._servers.append((listener, server))
    for close in (pool.close, functions.close, gateway.close):
        with pytest.raises(ValueError, match="0"):
            asyncio.run(close())
    names = ["model 0", "model 1", "model 2", "function 0", "function 1"]
    assert made.closed == [*names, "relay", "server 0", "server 1"]


@pytest.mark.parametrize("is_started", [True, False])
def test_closing_the_fork_servers_can_be_cancelled_and_ends_all_of_them(is_started: bool) -> None:
    """Of two servers, one is being ended, or started, when the cancellation comes."""
    made = Closings()

    async def use() -> None:
        ending = asyncio.Event()

        async def start() -> Any:
            try:
                await asyncio.sleep(0 if is_started else 3600)
            except asyncio.CancelledError:
                ending.set()
                await asyncio.sleep(0)
                raise
            return SimpleNamespace(close=close)

        async def close() -> None:
            made.closed.append("first")
            ending.set()
            await asyncio.Event().wait()

        async def start_second() -> Any:
            return made.one("second")

        FORK_SERVERS.open()
        servers = FORK_SERVERS.shared()
        servers._starting = {
            ("first",): asyncio.create_task(start()),
            ("second",): asyncio.create_task(start_second()),
        }
        await asyncio.sleep(0.01)
        closing = asyncio.create_task(FORK_SERVERS.close())
        await ending.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing

    asyncio.run(use())
    assert made.closed == (["first", "second"] if is_started else ["second"])


REMOVAL_FAILS = '''
"""A tool whose module has every removal of a workspace fail, after a while."""

import time

from toolsets.workspace.workspace import Workspace


def fail(self):
    time.sleep(0.5)
    raise ValueError("the removal fails")


Workspace.remove = fail


def nothing() -> str:
    """Do nothing."""
    return "nothing"


TOOLS = [nothing]
'''


@pytest.mark.slow
def test_a_removal_that_fails_does_not_keep_a_worker_from_ending_in_order(tmp_path: Path) -> None:
    (tmp_path / "tools_of_mine.py").write_text(REMOVAL_FAILS)
    script = [{"tool_calls": [{"name": "write_file", "arguments": {"path": "a", "content": "A"}}]}]
    write_rows(tmp_path / "p.jsonl", {"prompt": "x", "script": [*script, {"content": "done"}]})
    done = run(
        tmp_path,
        run_name="r",
        dataset_file="p.jsonl",
        model="scripted",
        num_workers=1,
        tools="tools_of_mine.py:TOOLS",
        enabled_toolsets="file,tools_of_mine",
    )
    assert done.returncode == 0, done.stderr
    run_dir = tmp_path / "trajectories" / "r"
    assert lines(run_dir / "records.jsonl")[0]["status"] == "completed"
    log = (run_dir / "run.log").read_text()
    assert "The files of a finished task were not removed" in log
    assert "in serve" not in log, "the traceback of a worker that did not end in order"
    assert not [*(run_dir / "inflight").iterdir()], "it has closed its journal"
