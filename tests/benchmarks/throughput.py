"""Whole runs, compared with latency alone and with the engines of `tests.benchmarks.engines`.

    python -m tests.benchmarks.throughput [--parts latency,cpu,...] [--repeat 5] [--json FILE]

latency   time from the first request to the last reply over what the model's latency alone takes
cpu       CPU per model call, start-up taken off, over that of each engine of `engines.py`
workers   calls per second of two workers over one, at a model without latency
memory    memory of a run for each agent in flight that is added, and that of its parent
start     time to the first request beside `import openai`, and CPU of --help

Everything is loopback and everything takes turns: each repetition measures all of a part once.
Printed are medians and spreads; the endpoint's CPU is never counted as a runner's. The runner is
the real command with journal, limits, tool, checks and export.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import click

from tests.benchmarks.engines import SYSTEM, TOOLS
from tests.fakes.quick_endpoint import QuickEndpoint, scripted_replies

ROOT = Path(__file__).parents[2]
_TOOL = '''
@tool(idempotent=True)
async def {name}(number: int) -> str:
    """{description}

    Args:
        number: Which one.
    """
    return f"{name} {{number}}"

'''
_TOOLS_FILE = (
    "from toolsets.tool import tool\n"
    + "".join(_TOOL.format(**one) for one in TOOLS)
    + f"tools = [{', '.join(one['name'] for one in TOOLS)}]\n"
)


@dataclass(frozen=True, slots=True)
class Work:
    """What one command is to do."""

    prompts: int = 500
    turns: int = 5
    latency_s: float = 0.0
    agents: int = 64
    """In flight, over all workers."""
    workers: int = 1
    api: str = "chat"
    tool: str = "step"
    argument: str = "number"
    """Of the tool."""
    text: str = "{turn}"
    """What a text argument is."""
    sandbox: str | None = None
    """Where the tool runs its argument as a command."""

    @property
    def calls(self) -> int:
        """How many model calls it takes."""
        return self.prompts * self.turns

    @property
    def ideal_s(self) -> float:
        """What the latency alone takes: agents work in waves."""
        return math.ceil(self.prompts / self.agents) * self.turns * self.latency_s


@dataclass(frozen=True, slots=True)
class Figures:
    """What one command took. CPU is that of the command with all its processes."""

    start_s: float
    """From its start to its first request."""
    wall_s: float
    """From its first request to its last reply."""
    cpu_s: float
    endpoint_cpu_s: float
    max_in_flight: int
    parent_mb: float
    workers_mb: float


@dataclass
class Table:
    """Named rows of figures over the repetitions of a part."""

    rows: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """Note one more repetition of a row."""
        self.rows.setdefault(name, []).append(value)

    def show(self, title: str) -> None:
        """Print median, least and most of each row."""
        print(f"\n{title}")
        for name, values in self.rows.items():
            median = statistics.median(values)
            spread = f"{min(values):.3f} to {max(values):.3f} in {len(values)}"
            print(f"  {name:<52} {median:8.3f}   {spread}", flush=True)


def runner(work: Work, url: str, cwd: Path) -> list[str]:
    """The command of a run."""
    dataset = cwd / "prompts.jsonl"
    lines = (json.dumps({"prompt": f"Question number {n}"}) for n in range(work.prompts))
    dataset.write_text("\n".join(lines))
    (cwd / "steps.py").write_text(_TOOLS_FILE)
    model, root = ("openai:m", f"{url}/v1") if work.api == "chat" else ("anthropic:m", url)
    tools = [f"--tools={cwd}/steps.py:tools", "--enabled_toolsets=steps"]
    if work.sandbox is not None:
        tools = ["--enabled_toolsets=terminal", f"--sandbox={work.sandbox}"]
    return [
        sys.executable,
        str(ROOT / "batch_runner.py"),
        "--fresh",
        "--key_env=none",
        f"--model={model}",
        f"--base_url={root}",
        f"--dataset_file={dataset}",
        "--run_name=r",
        f"--output_dir={cwd}",
        *tools,
        f"--num_workers={work.workers}",
        f"--batch_size={work.agents // work.workers}",
        f"--max_in_flight={work.agents}",
        f"--start_in_flight={work.agents}",
        f"--system_prompt={SYSTEM}",
        "--max_turns=100",
    ]


def engine(name: str) -> Callable[[Work, str, Path], list[str]]:
    """The command of an engine of `tests.benchmarks.engines`."""

    def command(work: Work, url: str, cwd: Path) -> list[str]:
        return [
            sys.executable,
            "-m",
            "tests.benchmarks.engines",
            name,
            f"--url={url}",
            f"--prompts={work.prompts}",
            f"--agents={work.agents}",
            f"--api={work.api}",
        ]

    return command


def measure(
    command: Callable[[Work, str, Path], list[str]], work: Work, *, may_repeat: int = 0
) -> Figures:
    """Run one command to its end against an endpoint of its own.

    Raises `RuntimeError` where it failed, or asked for less than the work or for more, beyond
    `may_repeat` calls.
    """
    replies = scripted_replies(
        work.turns, tool=work.tool, argument=work.argument, given_text=work.text
    )
    with (
        tempfile.TemporaryDirectory() as cwd,
        tempfile.TemporaryFile() as output,
        QuickEndpoint(replies, latency_s=work.latency_s) as endpoint,
    ):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started_at = time.monotonic()
        process = subprocess.Popen(
            command(work, endpoint.url, Path(cwd)),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=output,
        )
        peaks = _peaks(process)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        stats = endpoint.stats()
        output.seek(0)
        printed = output.read().decode(errors="replace")[-2000:]
    if process.returncode or not 0 <= stats["requests"] - work.calls <= may_repeat:
        raise RuntimeError(
            f"{work}: exit code {process.returncode} after {stats['requests']} requests:\n{printed}"
        )
    own = peaks.pop(process.pid)
    return Figures(
        start_s=stats["first_request_at"] - started_at,
        wall_s=stats["last_reply_at"] - stats["first_request_at"],
        cpu_s=after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        endpoint_cpu_s=stats["cpu_s"],
        max_in_flight=stats["max_in_flight"],
        parent_mb=own,
        workers_mb=sum(peaks.values()),
    )


def _peaks(process: subprocess.Popen[bytes]) -> dict[int, float]:
    """Wait for a command to end; the peak memory in MB of it and of its children (Linux)."""
    peaks: dict[int, float] = {}
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        try:
            for pid in [process.pid, *map(int, children.read_text().split())]:
                status = Path(f"/proc/{pid}/status").read_text()
                if "VmHWM:" in status:
                    peaks[pid] = int(status.split("VmHWM:")[1].split()[0]) / 1024
        except OSError:  # it may end at any moment
            continue
        time.sleep(0.05)
    return peaks


def latency(repeat: int, prompts: int) -> Table:
    """How far the wall time is from what the latency alone takes."""
    table = Table()
    for _ in range(repeat):
        for api in ("chat", "messages"):
            for agents, workers in ((64, 1), (64, 2), (256, 1), (256, 2), (1000, 1), (1000, 2)):
                work = Work(
                    prompts=prompts, turns=5, latency_s=0.2, agents=agents, workers=workers, api=api
                )
                figures = measure(runner, work)
                name = f"{api}, {agents} agents, {workers} workers"
                table.add(name, figures.wall_s / work.ideal_s)
        pool = Work(prompts=prompts, turns=5, latency_s=0.2, agents=64, workers=1, api="chat")
        table.add("chat, pool of 64 (naive)", measure(engine("pool"), pool).wall_s / pool.ideal_s)
    table.show("wall time over what the latency takes (200 ms, 5 turns)")
    return table


def cpu(repeat: int, prompts: int) -> Table:
    """CPU per call of the runner over that of each engine, without what starting takes."""
    table = Table()
    contenders = {name: engine(name) for name in ("journal", "aiohttp", "post", "typed")}
    for _ in range(repeat):
        for api in ("chat", "messages"):
            for turns in (5, 30):
                count = max(prompts * 5 // turns, 64)
                ours = _cpu_ms(
                    runner,
                    Work(prompts=count, turns=turns, latency_s=0.05, agents=64, workers=1, api=api),
                )
                table.add(f"{api}, {turns} turns: ms of ours", ours)
                for name, command in contenders.items():
                    theirs = _cpu_ms(
                        command,
                        Work(
                            prompts=count,
                            turns=turns,
                            latency_s=0.05,
                            agents=64,
                            workers=1,
                            api=api,
                        ),
                    )
                    table.add(f"{api}, {turns} turns: ms of {name}", theirs)
                    table.add(f"{api}, {turns} turns: ours over {name}", ours / theirs)
    table.show("CPU per model call")
    return table


def _cpu_ms(command: Callable[[Work, str, Path], list[str]], work: Work) -> float:
    few = Work(
        prompts=1, turns=work.turns, latency_s=0.0, agents=1, workers=work.workers, api=work.api
    )
    start = measure(command, few).cpu_s
    return (measure(command, work).cpu_s - start) / (work.calls - few.calls) * 1000


def workers(repeat: int, prompts: int) -> Table:
    """What a second worker brings where the model takes no time."""
    table = Table()
    for _ in range(repeat):
        for api in ("chat", "messages"):
            one = measure(
                runner,
                Work(prompts=prompts * 4, turns=5, latency_s=0.0, agents=64, workers=1, api=api),
            )
            two = measure(
                runner,
                Work(prompts=prompts * 4, turns=5, latency_s=0.0, agents=64, workers=2, api=api),
            )
            table.add(f"{api}: two workers over one", one.wall_s / two.wall_s)
            # Two workers fill both cores, and the endpoint takes its share of them.
            cores = os.cpu_count() or 1
            without = two.wall_s - two.endpoint_cpu_s / cores
            table.add(f"{api}: the same, the endpoint's share off", one.wall_s / without)
    table.show("calls per second without latency")
    return table


def memory(repeat: int, prompts: int) -> Table:
    """Memory for each agent that is added."""
    table = Table()
    for _ in range(repeat):
        few = measure(
            runner, Work(prompts=1000, turns=5, latency_s=0.5, agents=64, workers=1, api="chat")
        )
        many = measure(
            runner, Work(prompts=1000, turns=5, latency_s=0.5, agents=1000, workers=1, api="chat")
        )
        added = many.max_in_flight - few.max_in_flight
        table.add("KB for each agent added", (many.workers_mb - few.workers_mb) / added * 1024)
        table.add("MB of the worker at 64 agents", few.workers_mb)
        table.add("MB of the parent at 64 agents", few.parent_mb)
        table.add("MB of the parent at 1,000 agents", many.parent_mb)
    table.show("memory")
    return table


def start(repeat: int, prompts: int) -> Table:
    """What a start takes, beside importing the SDK that others begin with."""
    table = Table()
    for _ in range(repeat):
        run = measure(
            runner, Work(prompts=1, turns=1, latency_s=0.0, agents=1, workers=1, api="chat")
        )
        importing_s, importing_cpu_s = _command_s("-c", "import openai")
        table.add("s to the first request of one worker", run.start_s)
        table.add("the same over `import openai`", run.start_s / importing_s)
        table.add("s of CPU of a run of one prompt", run.cpu_s)
        table.add("the same over `import openai`: CPU", run.cpu_s / importing_cpu_s)
        table.add("s of CPU of --help", _command_s(str(ROOT / "batch_runner.py"), "--help")[1])
    table.show("start")
    return table


def _command_s(*arguments: str) -> tuple[float, float]:
    """Wall and CPU seconds of a Python command."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    wall_s = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


PARTS = {"latency": latency, "cpu": cpu, "workers": workers, "memory": memory, "start": start}


@click.command()
@click.option("--parts", default=",".join(PARTS), show_default=True, help="Comma-separated.")
@click.option("--repeat", default=5, show_default=True)
@click.option("--prompts", default=500, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures.")
def main(parts: str, repeat: int, prompts: int, json_file: Path | None) -> None:
    """Measure the parts, one after the other."""
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, Python {sys.version.split()[0]}")
    tables = {part: PARTS[part](repeat, prompts).rows for part in parts.split(",")}
    if json_file:
        json_file.write_text(json.dumps({"load": load, **tables}, indent=1))


if __name__ == "__main__":
    main()
