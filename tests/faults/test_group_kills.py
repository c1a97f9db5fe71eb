"""F1: everything is killed at random moments, and started again each time."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import NamedTuple

import orjson
import pytest

from benchmarks.fake_endpoint import FakeEndpoint
from tests.faults.oracle import assert_gone, finished_lines, resume_and_judge
from tests.faults.test_process import asking
from tests.running import WRITE_A_NOTE, started, wait_until, write_prompts

TURNS = 4
WORKERS = 2
AGENTS = 4
"""Conversations per worker."""


class Figures(NamedTuple):
    """What the kills came to; 0 lost, doubled, torn and orphaned is what the oracle asks for."""

    kills: int
    runs: int
    tasks: int
    calls: int
    repeated: int
    """Calls made again although their reply had left the endpoint."""
    in_flight: int
    """Calls that were under way at the kills: asked for, and no reply in any file."""
    before_work: int
    """Kills before the first call of their start."""


def replies_on_disk(run_dir: Path) -> int:
    """Replies that are in a record or a journal, each once."""
    found = set()
    for line in finished_lines(run_dir / "records.jsonl").values():
        record = orjson.loads(line)
        found |= {(record["id"], turn["turn"]) for turn in record["turns"]}
    for journal in run_dir.glob("inflight/*.jsonl"):
        for line in journal.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                entry = orjson.loads(line)
                if entry["event"]["kind"] == "reply":
                    found.add((entry["task"], entry["event"]["turn"]))
    return len(found)


def kill_and_resume(cwd: Path, moments: Iterator[float], *, prompts: int, kills: int) -> Figures:
    """Kill one run after each of `moments` (seconds after its start) until it ends or is done.

    A start that comes to its end first is not killed. Checks all that is promised.
    """
    write_prompts(cwd / "p.jsonl", prompts)
    run_dir = cwd / "trajectories" / "r"
    killed = in_flight = before_work = 0
    with FakeEndpoint(turns=TURNS, latency_s=0.05, **WRITE_A_NOTE) as endpoint:
        given = asking(endpoint, num_workers=WORKERS, batch_size=AGENTS)
        while killed < kills:
            asked_before = endpoint.journal()["requests"]
            with started(cwd, **given) as process:
                until = monotonic() + next(moments)
                wait_until(lambda: process.poll() is not None or monotonic() >= until)  # noqa: B023
                if process.poll() is not None:
                    assert process.returncode == 0, (cwd / "output.txt").read_text()
                    break
                os.killpg(process.pid, signal.SIGKILL)
                assert_gone(process.pid)
            killed += 1
            wait_until(lambda: endpoint.journal()["in_flight"] == 0)
            journal = endpoint.journal(full=True)
            before_work += journal["requests"] == asked_before
            under_way = len(journal["counts"]) - replies_on_disk(run_dir)
            assert 0 <= under_way <= WORKERS * AGENTS
            in_flight += under_way
        resume_and_judge(cwd, given, tasks=prompts, endpoint=endpoint, wasted=in_flight)
        journal = endpoint.journal()
    assert journal["requests"] <= prompts * TURNS + in_flight
    return Figures(
        killed, 1, prompts, journal["requests"], journal["repeated"], in_flight, before_work
    )


def at_random(seed: int, longest_s: float) -> Iterator[float]:
    draw = random.Random(seed)
    while True:
        yield draw.uniform(0, longest_s)


@pytest.mark.long
def test_a_hundred_random_group_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """During start-up, in the middle, while it exports; prints what they came to."""
    sums: list[Figures] = []
    while (done := sum(one.kills for one in sums)) < 100:
        number = len(sums)
        cwd = tmp_path / str(number)
        cwd.mkdir()
        moments = at_random(number, 8.0)
        sums.append(kill_and_resume(cwd, moments, prompts=60, kills=100 - done))
    total = Figures(*map(sum, zip(*sums, strict=True)))
    with capsys.disabled():
        print(f"\n{total}; lost 0, doubled 0, torn 0, orphaned 0")
    assert total.kills == 100
    assert total.repeated <= total.in_flight
