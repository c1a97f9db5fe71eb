"""Everything is killed at random moments, and started again each time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, conversation_of, finished_lines, resume_and_judge
from tests.faults.test_process import asking
from tests.helpers.running import WRITE_A_NOTE, Process, started, wait_until, write_prompts

TURNS = 4
WORKERS = 2
AGENTS = 4
"""Conversations per worker."""


class Figures(NamedTuple):
    """What the kills came to; 0 lost, doubled, torn and orphaned is what the oracle asks for."""

    kills: int
    before_the_first_call: int
    """Of the kills, those that hit a start which had not asked for anything yet."""
    runs: int
    tasks: int
    calls: int
    repeated: int
    """Calls made again although their reply had left the endpoint."""
    in_flight: int
    """Calls that were under way at the kills: asked for, and no reply in any file."""


Key = tuple[str, int]
"""A conversation, as the endpoint names it, and a turn."""


def replies_on_disk(cwd: Path) -> set[Key]:
    """Replies that are in a record or a journal."""
    run_dir = cwd / "trajectories" / "r"
    names = {
        row["id"]: conversation_of({"messages": [{"role": "user", "content": row["prompt"]}]})
        for row in map(orjson.loads, (cwd / "p.jsonl").read_bytes().splitlines())
    }
    collected = set()
    for record in map(orjson.loads, finished_lines(run_dir / "records.jsonl").values()):
        collected |= {(names[record["id"]], turn["turn"]) for turn in record["turns"]}
    for journal in run_dir.glob("inflight/*.jsonl"):
        for line in journal.read_bytes().splitlines(keepends=True):
            entry = orjson.loads(line) if line.endswith(b"\n") else None
            if entry is not None and entry["event"]["kind"] == "reply":
                collected.add((names[entry["task"]], entry["event"]["turn"]))
    return collected


def asked_by_turn(endpoint: FakeEndpoint) -> dict[Key, int]:
    """How often each reply was asked for."""
    counts: list[dict[str, Any]] = endpoint.journal(full=True)["counts"]
    return {(count["conversation"], count["turn"]): count["asked"] for count in counts}


def kill_and_resume(cwd: Path, draw: random.Random, *, prompts: int, kills: int) -> Figures:
    """Kill a run at random moments until it comes to its end, and check all that is promised.

    A third of the moments lies in the first seconds of a start, the rest after its first call.
    """
    write_prompts(cwd / "p.jsonl", prompts)
    killed = in_flight = before_the_first_call = 0
    with FakeEndpoint(turns=TURNS, latency_s=0.05, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=WORKERS, batch_size=AGENTS)
        while killed < kills:
            before = asked_by_turn(endpoint)
            with started(cwd, **given) as process:
                if draw.random() > 1 / 3:
                    wait_for_a_call(process, endpoint, sum(before.values()))
                wait_for(process, draw.uniform(0, 1.5))
                if process.poll() is not None:
                    assert process.returncode == 0, (cwd / "output.txt").read_text()
                    break
                os.killpg(process.pid, signal.SIGKILL)
                assert_gone(process.pid)
            killed += 1
            wait_until(lambda: endpoint.journal()["in_flight"] == 0)
            after = asked_by_turn(endpoint)
            again = {key for key, count in after.items() if count > before.get(key, 0)}
            under_way = again - replies_on_disk(cwd)
            assert len(under_way) <= WORKERS * AGENTS
            in_flight += len(under_way)
            before_the_first_call += not again
        resume_and_judge(cwd, given, tasks=prompts, endpoint=endpoint, wasted=in_flight)
        journal = endpoint.journal()
    assert journal["requests"] == prompts * TURNS + in_flight
    calls, repeated = journal["requests"], journal["repeated"]
    return Figures(
        kills=killed,
        before_the_first_call=before_the_first_call,
        runs=1,
        tasks=prompts,
        calls=calls,
        repeated=repeated,
        in_flight=in_flight,
    )


def wait_for_a_call(process: Process, endpoint: FakeEndpoint, before: int) -> None:
    """Wait until more calls were made than `before`, or the run is over."""
    wait_until(lambda: process.poll() is not None or endpoint.journal()["requests"] > before)


def wait_for(process: Process, seconds: float) -> None:
    """Wait some time, or until the run is over."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


@pytest.mark.long
def test_a_hundred_random_group_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """During start-up, in the middle, while it exports; prints what they came to."""
    figures: list[Figures] = []
    while (done := sum(one.kills for one in figures)) < 100:
        seed = len(figures)
        cwd = tmp_path / str(seed)
        cwd.mkdir()
        figures.append(kill_and_resume(cwd, random.Random(seed), prompts=60, kills=100 - done))
        with capsys.disabled():
            print(f"\n{figures[-1]}")
    total = Figures(*map(sum, zip(*figures, strict=True)))
    with capsys.disabled():
        print(f"\n{total}; lost 0, doubled 0, torn 0, orphaned 0")
    assert total.repeated <= total.in_flight
