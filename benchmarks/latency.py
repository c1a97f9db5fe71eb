"""How close a run comes to the floor that the model's latency sets, and what a prompt costs.

    python -m benchmarks.latency [--prompts 500] [--turns 5] [--latency_s 0.2] [--repeat 3]

Starts a fake endpoint on loopback and the real runner with a journal, tools and export, over
different numbers of prompts with the same conversations in flight. Prints, per run: the time
from the first request to the last reply over the ideal (prompts x turns x latency / in flight),
CPU per model call of the runner with all its processes, and the peak memory of the parent and
of the largest worker (Linux). The last lines compare the runs: nothing should grow with the
number of prompts.
"""

from __future__ import annotations

import contextlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).parent.parent


def measure(
    cwd: Path, *, prompts: int, turns: int, latency_s: float, workers: int, agents: int
) -> dict[str, float]:
    """Run once; give the figures of the module's docstring."""
    dataset = cwd / f"prompts{prompts}.jsonl"
    dataset.write_text(
        "".join(json.dumps({"prompt": f"Question number {n}"}) + "\n" for n in range(prompts))
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with FakeEndpoint(
        turns=turns,
        latency_s=latency_s,
        tool="write_file",
        arguments='{"path": "n{turn}", "content": "{turn}"}',
        reasoning_chars=400,
    ) as endpoint:
        command = [
            *(sys.executable, str(ROOT / "batch_runner.py"), "--fresh"),
            *("--model=openai:m", "--key_env=none", f"--base_url={endpoint.openai_url}"),
            *(f"--dataset_file={dataset}", f"--run_name=r{prompts}", "--enabled_toolsets=file"),
            *(f"--num_workers={workers}", f"--batch_size={agents}", f"--output_dir={cwd}"),
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        peaks = watch_memory(process)
        if process.returncode:
            msg = f"the run ended with exit code {process.returncode}"
            raise RuntimeError(msg)
        journal: dict[str, Any] = endpoint.journal()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    calls = prompts * turns
    if journal["requests"] != calls:
        msg = f"{journal['requests']} requests for {calls} calls"
        raise RuntimeError(msg)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wall = journal["last_reply_at"] - journal["first_request_at"]
    return {
        "prompts": prompts,
        "wall/ideal": wall / (calls * latency_s / (workers * agents)),
        "cpu_ms/call": (cpu - journal["cpu_s"]) / calls * 1000,
        "parent_mb": peaks[process.pid],
        "worker_mb": max(mb for pid, mb in peaks.items() if pid != process.pid),
    }


def watch_memory(process: subprocess.Popen[bytes]) -> dict[int, float]:
    """Wait for a run to end; give the peak memory of each of its processes in MB."""
    peaks: dict[int, float] = {}
    while process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        with contextlib.suppress(OSError):  # it may end at any moment
            for pid in [process.pid, *map(int, children.read_text().split())]:
                status = Path(f"/proc/{pid}/status").read_text()
                if "VmHWM:" in status:
                    peaks[pid] = int(status.split("VmHWM:")[1].split()[0]) / 1024
        time.sleep(0.1)
    return peaks


@click.command()
@click.option("--prompts", default=500, show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--latency_s", default=0.2, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--agents", default=32, show_default=True, help="In flight per worker.")
@click.option("--repeat", default=3, show_default=True)
def main(
    prompts: int, turns: int, latency_s: float, workers: int, agents: int, repeat: int
) -> None:
    """Measure the runner over PROMPTS and over four times as many, in turn."""
    runs: dict[int, list[dict[str, float]]] = {prompts: [], prompts * 4: []}
    with tempfile.TemporaryDirectory() as cwd:
        for _ in range(repeat):
            for count, measured in runs.items():
                figures = measure(
                    Path(cwd),
                    prompts=count,
                    turns=turns,
                    latency_s=latency_s,
                    workers=workers,
                    agents=agents,
                )
                measured.append(figures)
                print({name: round(value, 3) for name, value in figures.items()}, flush=True)
    for name in ("wall/ideal", "cpu_ms/call", "parent_mb", "worker_mb"):
        few, many = (statistics.median(run[name] for run in runs[n]) for n in runs)
        print(f"{name}: median {few:.3f} and {many:.3f}, ratio {many / few:.3f}")


if __name__ == "__main__":
    main()
