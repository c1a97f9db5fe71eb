"""Other agent runners on the same work, each in its own virtual environment.

    python -m tests.benchmarks.peers --venvs DIR [--agents 64,256] [--prompts 500] [--repeat 3]
    python -m tests.benchmarks.peers --venvs DIR --commands [--agents 64] [--prompts 300]

Conversations of 5 turns at 200 ms a call, with a trivial tool, or with --commands a shell command
per turn, under bubblewrap and without isolation. Environments are made in DIR the first time, from
the package index. Peers do other things beside: inspect_ai writes full logs, ours journals every
turn and exports. So read large ratios, not small ones.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from tests.benchmarks.throughput import Table, Work, measure, runner

HERE = Path(__file__).parent
PACKAGES = {
    "inspect": ("inspect_ai>=0.3.285,<0.4", "openai"),
    "mini": ("mini-swe-agent>=2.4,<3", "mcp"),
}

COMMAND = "echo step {turn}; ls"
Runner = Callable[[Work, str, Path], list[str]]


def environment(place: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment, which is made if it is not there."""
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        print(f"installing {', '.join(packages)} into {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def peer(name: str, venvs: Path) -> Runner:
    """The command of a peer."""
    python = str(environment(venvs.resolve() / name, PACKAGES[name]))

    def command(work: Work, url: str, cwd: Path) -> list[str]:
        if name == "inspect":
            script = [str(HERE / "peering" / "inspect_loop.py"), url]
            return [python, *script, str(work.prompts), str(work.agents)]
        script = [str(HERE / "peering" / "mini_threads.py"), url, str(work.prompts)]
        return [python, *script, str(work.agents), str(work.turns), work.sandbox or "nowhere"]

    return command


@click.command()
@click.option("--venvs", type=click.Path(path_type=Path), required=True)
@click.option("--agents", default="64,256", show_default=True)
@click.option("--prompts", default=500, show_default=True)
@click.option("--repeat", default=3, show_default=True)
@click.option("--latency", default=0.2, show_default=True, help="Seconds a call takes.")
@click.option("--workers", default=1, show_default=True, help="Of ours.")
@click.option("--commands", is_flag=True, help="Run a shell command in each turn.")
def main(
    venvs: Path,
    agents: str,
    prompts: int,
    repeat: int,
    latency: float,
    workers: int,
    commands: bool,
) -> None:
    """Measure all, in turns."""
    names = ["mini"] if commands else list(PACKAGES)
    runners: dict[str, Runner] = {"ours": runner, **{name: peer(name, venvs) for name in names}}
    table = Table()
    for _ in range(repeat):
        for in_flight in map(int, agents.split(",")):
            for sandbox in ("bwrap", "local") if commands else (None,):
                work = Work(
                    prompts=prompts,
                    turns=5,
                    latency_s=latency,
                    agents=in_flight,
                    workers=workers,
                    sandbox=sandbox,
                    text=COMMAND,
                )
                add_round(table, runners, work)
    table.show(f"{prompts} conversations of 5 turns, {latency:g} s a call")


def add_round(table: Table, runners: dict[str, Runner], work: Work) -> None:
    """Measure all runners once on the same work."""
    rates: dict[str, float] = {}
    for name, command in runners.items():
        mine = replace(work, tool="step", argument="number")
        if name == "mini":
            mine = replace(work, tool="bash", argument="command")
        elif work.sandbox is not None:
            mine = replace(work, tool="terminal", argument="command")
        # The client of one of them repeats a call now and then.
        figures = measure(command, mine, may_repeat=0 if name == "ours" else work.calls // 100)
        row = f"{name}, {work.agents} agents" + (f", {work.sandbox}" if work.sandbox else "")
        print(f"{row}: {figures}", file=sys.stderr)
        rates[name] = work.prompts / figures.wall_s
        table.add(f"{row}: wall over ideal", figures.wall_s / work.ideal_s)
        table.add(f"{row}: conversations a second", rates[name])
        table.add(f"{row}: CPU ms a call", figures.cpu_s / work.calls * 1000)
        table.add(f"{row}: MB", figures.parent_mb + figures.workers_mb)
        table.add(f"{row}: calls in flight at most", figures.max_in_flight)
        if name != "ours":
            table.add(f"{row}: ours is faster", rates["ours"] / rates[name])


if __name__ == "__main__":
    main()
