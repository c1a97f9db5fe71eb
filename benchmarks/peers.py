"""Other agent runners on the same work, each in its own virtual environment.

    python -m benchmarks.peers --venvs DIR [--agents 64,256] [--prompts 500] [--repeat 3]

Conversations of 5 turns at 200 ms a call, one trivial tool. Environments are made in DIR the first
time, from the package index. Peers do other things beside: inspect_ai writes full logs, ours
journals every turn and exports; mini-swe-agent is used without the commands that it is for. So
read large ratios, not small ones.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import click

from benchmarks.throughput import Table, Work, measure, runner

HERE = Path(__file__).parent
PACKAGES = {
    "inspect": ("inspect_ai>=0.3.285,<0.4", "openai"),
    "mini": ("mini-swe-agent>=2.4,<3", "mcp"),
}


def environment(place: Path, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment, which is made if it is not there."""
    python, done = place / "bin" / "python", place / "installed"
    if not done.exists():
        print(f"installing {', '.join(packages)} into {place}", file=sys.stderr)
        venv.create(place, with_pip=True, clear=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", *packages], check=True)
        done.touch()
    return python


def peer(name: str, venvs: Path) -> Callable[[Work, str, Path], list[str]]:
    """The command of a peer."""
    python = str(environment(venvs.resolve() / name, PACKAGES[name]))

    def command(work: Work, url: str, cwd: Path) -> list[str]:
        if name == "inspect":
            script = [str(HERE / "peering" / "inspect_loop.py"), url]
            return [python, *script, str(work.prompts), str(work.agents)]
        script = [str(HERE / "peering" / "mini_threads.py"), url, str(work.prompts)]
        return [python, *script, str(work.agents), str(work.turns)]

    return command


@click.command()
@click.option("--venvs", type=click.Path(path_type=Path), required=True)
@click.option("--agents", default="64,256", show_default=True)
@click.option("--prompts", default=500, show_default=True)
@click.option("--repeat", default=3, show_default=True)
def main(venvs: Path, agents: str, prompts: int, repeat: int) -> None:
    """Measure all, in turns."""
    runners = {"ours": runner, **{name: peer(name, venvs) for name in PACKAGES}}
    table = Table()
    for _ in range(repeat):
        for in_flight in map(int, agents.split(",")):
            for name, command in runners.items():
                tool = ("bash", "command") if name == "mini" else ("step", "number")
                work = Work(prompts, 5, 0.2, in_flight, 1, "chat", *tool)
                # The client of one of them repeats a call now and then.
                figures = measure(
                    command, work, may_repeat=0 if name == "ours" else work.calls // 100
                )
                row = f"{name}, {in_flight} agents"
                print(f"{row}: {figures}", file=sys.stderr)
                table.add(f"{row}: wall over ideal", figures.wall_s / work.ideal_s)
                table.add(f"{row}: conversations a second", prompts / figures.wall_s)
                table.add(f"{row}: CPU ms a call", figures.cpu_s / work.calls * 1000)
                table.add(f"{row}: MB", figures.parent_mb + figures.workers_mb)
                table.add(f"{row}: calls in flight at most", figures.max_in_flight)
    table.show(f"{prompts} conversations of 5 turns, 200 ms a call, one worker")


if __name__ == "__main__":
    main()
