"""How much of their prompts conversations find cached, on a fleet of replicas.

    python -m tests.benchmarks.replicas [--sessions 96] [--replicas 12] [--room 1.5] [--modes ...]
        [--venvs DIR]

Sessions have as many turns as coding agents (half have 29 or more, one in a hundred 85). The fleet
has `room` times the tokens that all of them need at their ends. Printed for each mode: the share of
prompt tokens that was cached, what an endless cache of a single server would have had, replicas per
session, prompt tokens computed, requests that found less than half of the prompt before cached,
ids per session, and seconds.

blind      through the router, without ids
router     through the router, with ids
straight   to the replicas themselves, by `base_urls`
dead       straight, where one replica dies in the middle
kills      straight, where the run is killed three times
killed     through the router with ids, where the run is killed three times
inspect    inspect_ai through the router; only with --venvs, see `tests.benchmarks.peers`
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from tests.benchmarks.peers import peer
from tests.benchmarks.replica_fleet import BYTES_PER_TOKEN
from tests.benchmarks.throughput import ROOT, Work

MODES = ("blind", "router", "straight", "dead", "kills", "killed")
SYSTEM = "You work through a list of steps, one call at a time, and say when all is done. " * 40
MEDIAN_TURNS, MOST_TURNS = 29, 85
_SIGMA = math.log(MOST_TURNS / MEDIAN_TURNS) / 2.326
"""Of the logarithms, so that one of a hundred has `MOST_TURNS`."""

RESULT_TOKENS = 330
"""Tokens of a tool's result: what no server can have cached before."""

_OVERHEAD = 30
"""Tokens of a turn beside its reply and its result."""

TOOLS = '''
import random

from toolsets.tool import tool

@tool(idempotent=True)
async def step(number: int) -> str:
    """Take one step.

    Args:
        number: Which one.
    """
    return f"step {number}: " + "".join(random.choices("abcdefghijklmnopqrstuvwxyz  ", k=SIZE))

tools = [step]
'''


def turns_of(sessions: int) -> list[int]:
    """The turns of each session, the same each time."""
    draw = random.Random(47)
    return [
        max(2, round(math.exp(draw.gauss(math.log(MEDIAN_TURNS), _SIGMA)))) for _ in range(sessions)
    ]


class Running:
    """A fleet that runs."""

    def __init__(self, ports: dict[str, Any]) -> None:
        self.router = f"http://127.0.0.1:{ports['router']}"
        self.replicas = [f"http://127.0.0.1:{port}/v1" for port in ports["replicas"]]
        self._control = f"http://127.0.0.1:{ports['control']}"

    def counts(self) -> dict[str, Any]:
        """What the fleet has counted."""
        with urllib.request.urlopen(f"{self._control}/counts") as response:
            counts: dict[str, Any] = json.load(response)
            return counts

    def stop(self, number: int) -> None:
        """Take a replica down."""
        urllib.request.urlopen(f"{self._control}/stop/{number}", data=b"").close()

    def wait_for(self, requests: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until so many requests were answered."""
        while self.counts()["requests"] < requests and process.poll() is None:
            time.sleep(0.05)


@contextmanager
def fleet(terms: dict[str, Any]) -> Iterator[Running]:
    """A fleet, for as long as the block lasts."""
    command = [sys.executable, "-m", "tests.benchmarks.replica_fleet", json.dumps(terms)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield Running(json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()


def command_of(mode: str, running: Running, sessions: int, cwd: Path) -> list[str]:
    """Our run, without the interpreter's options; what it reads is written into `cwd`."""
    rows = ({"id": f"q{n}", "prompt": f"Question number {n}"} for n in range(sessions))
    (cwd / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (cwd / "own_tools.py").write_text(TOOLS.replace("SIZE", str(RESULT_TOKENS * BYTES_PER_TOKEN)))
    entry: dict[str, Any] = {"base_url": f"{running.router}/v1"}
    if mode == "blind":
        entry["session_header"] = "none"
    elif mode in ("straight", "dead", "kills"):
        entry = {"base_urls": running.replicas}
    options = {
        "run_name": "r",
        "dataset_file": "p.jsonl",
        "model": "fleet:m",
        "endpoints": json.dumps({"fleet": entry}),
        "system_prompt": SYSTEM,
        "tools": f"{cwd}/own_tools.py:tools",
        "enabled_toolsets": "own_tools",
        "max_turns": 200,
        "repeat_limit": 0,
        "num_workers": 2,
        "batch_size": -(-sessions // 2),
        "start_in_flight": sessions,
        "max_in_flight": sessions,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    return [sys.executable, str(ROOT / "batch_runner.py"), *flags]


def play(
    mode: str,
    running: Running,
    sessions: int,
    requests: int,
    cwd: Path,
    command: Callable[[Work, str, Path], list[str]] | None,
) -> float:
    """One mode from start to end; returns the seconds that it took."""
    work = Work(prompts=sessions, turns=0, agents=sessions)
    if command is None:
        line = command_of(mode, running, sessions, cwd)
    else:
        line = [*command(work, running.router, cwd), str(RESULT_TOKENS * BYTES_PER_TOKEN)]
    began = time.monotonic()
    kills = [requests * n // 4 for n in (1, 2, 3)] if mode in ("kills", "killed") else []
    with (cwd / "output.txt").open("wb") as output:
        while True:
            process = subprocess.Popen(
                line, cwd=cwd, stdout=output, stderr=output, start_new_session=True
            )
            if mode == "dead":
                running.wait_for(requests // 2, process)
                running.stop(0)
            if not kills:
                break
            running.wait_for(kills.pop(0), process)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.wait() != 0:
            raise SystemExit((cwd / "output.txt").read_text()[-3000:])
    return time.monotonic() - began


@click.command()
@click.option("--sessions", default=96, show_default=True)
@click.option("--replicas", default=12, show_default=True)
@click.option("--room", default=1.5, show_default=True, help="Times what all need at their ends.")
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("--reply_tokens", default=120, show_default=True)
@click.option("--tokens_per_s", default=100_000.0, show_default=True, help="Of a replica.")
@click.option("--reply_s", default=0.05, show_default=True)
@click.option("--venvs", type=click.Path(path_type=Path), help="Where inspect_ai is or gets.")
def main(
    sessions: int,
    replicas: int,
    room: float,
    modes: str,
    reply_tokens: int,
    tokens_per_s: float,
    reply_s: float,
    venvs: Path | None,
) -> None:
    """Measure all modes, one after the other."""
    turns = turns_of(sessions)
    requests = sum(turns)
    needed = sum(
        len(SYSTEM) // BYTES_PER_TOKEN + count * (reply_tokens + RESULT_TOKENS + _OVERHEAD)
        for count in turns
    )
    terms = {
        "replicas": replicas,
        "room": int(room * needed / replicas),
        "turns": turns,
        "reply_tokens": reply_tokens,
        "tokens_per_s": tokens_per_s,
        "reply_s": reply_s,
    }
    print(
        f"{sessions} sessions, {requests:,} turns (p50 {statistics.median(turns):.0f}, most "
        f"{max(turns)}), {replicas} replicas with {room:g} x {needed / 1e6:.1f} million tokens"
    )
    print("mode      cached  possible  replicas  computed    cold  most  ids  requests  seconds")
    chosen = [*filter(None, modes.split(",")), *(["inspect"] if venvs is not None else [])]
    for mode in chosen:
        command = peer("inspect", venvs) if mode == "inspect" and venvs is not None else None
        with fleet(terms) as running, tempfile.TemporaryDirectory() as directory:
            seconds = play(mode, running, sessions, requests, Path(directory), command)
            found = running.counts()
        computed = found["prompt"] - found["cached"]
        print(
            f"{mode:<9} {found['cached'] / found['prompt']:6.1%}  "
            f"{found['possible'] / found['prompt']:7.1%}  "
            f"{statistics.mean(found['replicas']):8.2f}  {computed / 1e6:7.2f} M  "
            f"{sum(found['cold']):5}  {max(found['cold']):4}  {max(found['ids']):3}  "
            f"{found['requests']:8,}  {seconds:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
