"""A group kill during tool calls: which results say that they were interrupted."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from agent.messages.message import failure_of
from testing.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, judge_run_dir
from tests.faults.test_group_kills import wait_for
from tests.faults.test_process import asking
from tests.running import lines, run, started, wait_until, write_prompts

TURNS = 4

FUNCTIONS = '''
import os
import time
from pathlib import Path

from toolsets.context import ToolContext
from toolsets.tool import tool


@tool()
def act(context: ToolContext, turn: str, seconds: float) -> str:
    """Do what must not be done twice."""
    file = os.open("done", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, f"{context.workspace.root.name}:{turn}\\n".encode())
    os.close(file)
    time.sleep(seconds)
    return f"{turn} is done"


@tool()
def compute(context: ToolContext, turn: str) -> str:
    """As `act`, for a while without a pause, so that few threads are started."""
    answer = act.function(context, turn, 0.0)
    enough = time.thread_time() + 0.1
    while time.thread_time() < enough:
        pass
    return answer


ALL = [act, compute]
'''


class Killed(NamedTuple):
    """What came of a run that was killed and resumed."""

    records: list[dict[str, Any]]
    begun: int
    """Calls without a result that had begun at a kill, as the journals say."""


class Case(NamedTuple):
    """What the model calls."""

    toolset: str
    tool: str
    arguments: dict[str, Any]


def act(seconds: float) -> Case:
    return Case("acts", "act", {"turn": "{turn}", "seconds": seconds})


def kill_in_calls(
    cwd: Path, case: Case, draw: random.Random, *, prompts: int, kills: int, workers: int = 2
) -> Killed:
    """Kill a run of `prompts` conversations, all in flight, at random moments after its first
    calls of tools, and resume it to its end."""
    write_prompts(cwd / "p.jsonl", prompts)
    (cwd / "acts.py").write_text(FUNCTIONS)
    arguments = json.dumps(case.arguments)
    run_dir = cwd / "trajectories" / "r"
    begun = set()
    with FakeEndpoint(turns=TURNS, latency_s=0.1, tool=case.tool, arguments=arguments) as endpoint:
        given = asking(endpoint, num_workers=workers, batch_size=prompts // workers)
        given |= {"enabled_toolsets": case.toolset, "tools": "acts:ALL", "sandbox": "bwrap"}
        for _ in range(kills):
            replies = endpoint.journal()["replies"]
            with started(cwd, **given) as process:
                wait_until(
                    lambda process=process, replies=replies: (
                        process.poll() is not None or endpoint.journal()["replies"] > replies
                    )
                )
                wait_for(process, draw.uniform(0, 1))
                if process.poll() is not None:
                    assert process.returncode == 0, (cwd / "output.txt").read_text()
                    break
                os.killpg(process.pid, signal.SIGKILL)
                assert_gone(process.pid)
            begun |= begun_calls(run_dir)
        done = run(cwd, **given)
        assert done.returncode == 0, done.stderr
    judge_run_dir(run_dir, tasks=prompts)
    return Killed(lines(run_dir / "records.jsonl"), len(begun))


def begun_calls(run_dir: Path) -> set[tuple[str, str]]:
    """The task and call of those that had begun and have no result."""
    events = [
        (entry["deal"], entry["position"], entry["task"], entry["event"])
        for journal in run_dir.glob("inflight/*.jsonl")
        for entry in map(orjson.loads, journal.read_bytes().splitlines())
    ]
    begun = set()
    for *_, task, event in sorted(events, key=itemgetter(0, 1)):
        if event["kind"] == "began":
            begun.add((task, event["call_id"]))
        elif event["kind"] == "result":
            begun.discard((task, event["message"]["tool_call_id"]))
    return begun


def interrupted(record: dict[str, Any]) -> int:
    return sum(failure_of(message) == "interrupted" for message in record["messages"])


@pytest.mark.slow
def test_of_calls_with_effects_elsewhere_only_those_that_had_begun_are_interrupted(
    tmp_path: Path,
) -> None:
    """Most of them wait for a thread at the kill: they run once, as if nothing had happened."""
    case = Case("acts", "compute", {"turn": "{turn}"})
    killed = kill_in_calls(tmp_path, case, random.Random(1), prompts=32, kills=2, workers=1)
    check_acts(tmp_path, killed)
    assert 0 < killed.begun < 32


def check_acts(cwd: Path, killed: Killed) -> None:
    """No call ran twice, and those and only those are interrupted that had begun at a kill."""
    ran = Counter((cwd / "done").read_text().split())
    assert set(ran.values()) == {1}, "a call with effects elsewhere was repeated"
    assert sum(map(interrupted, killed.records)) == killed.begun
    calls = len(killed.records) * (TURNS - 1)
    assert calls - killed.begun <= len(ran) <= calls
