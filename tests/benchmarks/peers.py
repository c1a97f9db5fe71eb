"""Other agent runners on the same work, each in its own virtual environment.

    python -m tests.benchmarks.peers --venvs DIR [--agents 64,256] [--prompts 500] [--repeat 3]
    python -m tests.benchmarks.peers --venvs DIR --commands [--agents 64] [--prompts 300]

Conversations of 5 turns at 200 ms a call, with a trivial tool, or with --commands a shell command
per turn, under bubblewrap and without isolation. Environments are made in DIR the first time, from
the package index. Peers do other things beside: inspect_ai writes full logs, ours journals every
turn and exports. So read large ratios, not small ones.

All runners take turns on the same work, and one table shows them side by side, with their versions.
Each figure is the median of all rounds, with the least and the most.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import venv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from tests.benchmarks.throughput import Figures, Work, measure, runner

HERE = Path(__file__).parent
PACKAGES = {
    "inspect": ("inspect_ai>=0.3.285,<0.4", "openai"),
    "mini": ("mini-swe-agent>=2.4,<3", "mcp"),
}

_PACKAGE_OF = {"inspect": "inspect-ai", "mini": "mini-swe-agent"}

FIGURES: dict[str, Callable[[Work, Figures], float]] = {
    "wall over ideal": lambda work, figures: figures.wall_s / work.ideal_s,
    "conversations/s": lambda work, figures: work.prompts / figures.wall_s,
    "CPU ms/call": lambda work, figures: figures.cpu_s / work.calls * 1000,
    "MB": lambda work, figures: figures.parent_mb + figures.workers_mb,
    "calls in flight at most": lambda work, figures: figures.max_in_flight,
}
"""The rows of the table for each work, and how they are computed."""

_VERSION = "from importlib.metadata import version; print(version({!r}))"

COMMAND = "echo step {turn}; ls"
Runner = Callable[[Work, str, Path], list[str]]
Rounds = dict[Work, dict[str, list[Figures]]]
"""The figures of all rounds, by work and by the name of the runner."""


def environment(place: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment, which is made if it is not there."""
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        print(f"installing {', '.join(packages)} into {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def version_of(python: str, package: str) -> str:
    """The version of a package in the environment of an interpreter."""
    done = subprocess.run(
        [python, "-c", _VERSION.format(package)], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


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
    versions = {"ours": version_of(sys.executable, "batch-trajectories")}
    for name in names:
        package = _PACKAGE_OF[name]
        python = environment(venvs.resolve() / name, PACKAGES[name])  # made above
        versions[name] = f"{package} {version_of(str(python), package)}"
    rounds: Rounds = defaultdict(lambda: defaultdict(list))
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
                add_round(rounds[work], runners, work)
    print(f"{prompts} conversations of 5 turns, {latency:g} s a call, {repeat} rounds,", end=" ")
    print(f"{os.cpu_count()} cores, Python {sys.version.split()[0]}\n")
    print("\n".join(as_table(rounds, versions)))


def add_round(found: dict[str, list[Figures]], runners: Mapping[str, Runner], work: Work) -> None:
    """Measure all runners once on the same work."""
    for name, command in runners.items():
        mine = replace(work, tool="step", argument="number")
        if name == "mini":
            mine = replace(work, tool="bash", argument="command")
        elif work.sandbox is not None:
            mine = replace(work, tool="terminal", argument="command")
        # The client of one of them repeats a call now and then.
        figures = measure(command, mine, may_repeat=0 if name == "ours" else work.calls // 100)
        print(f"{name}, {work.agents} agents: {figures}", file=sys.stderr)
        found[name].append(figures)


def as_table(rounds: Rounds, versions: Mapping[str, str]) -> list[str]:
    """The lines of a Markdown table with a column for each runner."""
    lines = [
        " | ".join(["agents", "figure", *(f"{name} ({one})" for name, one in versions.items())]),
        "|".join(["---"] * (len(versions) + 2)),
    ]
    for work, found in rounds.items():
        place = str(work.agents) + (f", {work.sandbox}" if work.sandbox else "")
        for title, compute in FIGURES.items():
            values = {name: [compute(work, one) for one in found[name]] for name in versions}
            cells = [spread(values[name]) for name in versions]
            lines.append(" | ".join([place, title, *cells]))
        seconds = {name: [one.wall_s for one in found[name]] for name in versions}
        # Of the same round: what else the machine does changes from round to round.
        ratios = [
            spread(
                [theirs / ours for theirs, ours in zip(seconds[name], seconds["ours"], strict=True)]
            )
            for name in versions
        ]
        lines.append(" | ".join([place, "times the seconds of ours", *ratios]))
    return lines


def spread(values: Sequence[float]) -> str:
    """The median of some values, with the least and the most."""
    return f"{statistics.median(values):.3g} ({min(values):.3g}-{max(values):.3g})"


if __name__ == "__main__":
    main()
