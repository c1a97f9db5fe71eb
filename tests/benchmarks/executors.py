"""The cost of Ray: the same runs with local workers and with Ray actors.

    python -m tests.benchmarks.executors [--prompts 1000] [--turns 5] [--latency_s 0.2] [--repeat 3]

Needs the extra `ray`. Starts a cluster of two nodes on this machine and a fake endpoint on
loopback, and runs the real runner, in turn, with local workers and with actors whose journals the
driver keeps. Prints, per run: conversations per second between the first request and the last
reply, the driver's own CPU per record in that time, and its CPU over its whole life, with start and
export. The last lines are medians; the ratio is that of runs that followed each other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import click

from tests.fakes.fake_endpoint import FakeEndpoint
from tests.fakes.ray_cluster import two_nodes

ROOT = Path(__file__).parents[2]
_TICKS = os.sysconf("SC_CLK_TCK")


def measure(
    cwd: Path,
    executor: list[str],
    *,
    prompts: int,
    turns: int,
    latency_s: float,
    workers: int,
    agents: int,
) -> tuple[float, float, float]:
    """Run once; give conversations per second, the driver's CPU per record while calls are made,
    in ms, and all its CPU, in seconds."""
    dataset = cwd / f"prompts{prompts}.jsonl"
    dataset.write_text(
        "".join(f'{{"prompt": "Question number {n}"}}\n' for n in range(prompts)), encoding="utf-8"
    )
    with FakeEndpoint(
        turns=turns,
        latency_s=latency_s,
        tool="write_file",
        arguments='{"path": "n{turn}", "content": "{turn}"}',
        reasoning_chars=400,
    ) as endpoint:
        command = [
            sys.executable,
            str(ROOT / "batch_runner.py"),
            "--fresh",
            *executor,
            "--model=openai:m",
            "--key_env=none",
            f"--base_url={endpoint.openai_url}",
            f"--dataset_file={dataset}",
            "--run_name=r",
            "--enabled_toolsets=file",
            f"--num_workers={workers}",
            f"--batch_size={agents}",
            f"--output_dir={cwd}",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=cwd
        )
        samples: list[tuple[float, float]] = []
        while process.poll() is None:
            with suppress(OSError):  # it may end at any moment
                stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                samples.append((time.monotonic(), (int(stat[11]) + int(stat[12])) / _TICKS))
            time.sleep(0.02)
        if process.returncode:
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
        journal = endpoint.journal()
    if journal["requests"] != prompts * turns:
        raise RuntimeError(f"{journal['requests']} requests for {prompts * turns} calls")
    began, ended = journal["first_request_at"], journal["last_reply_at"]
    in_time = [cpu_s for at, cpu_s in samples if began <= at <= ended]
    working_s = in_time[-1] - in_time[0]
    return prompts / (ended - began), working_s / prompts * 1000, max(samples)[1]


@click.command()
@click.option("--prompts", default=1000, show_default=True)
@click.option("--turns", default=5, show_default=True)
@click.option("--latency_s", default=0.2, show_default=True)
@click.option("--workers", default=2, show_default=True)
@click.option("--agents", default=32, show_default=True, help="In flight per worker.")
@click.option("--repeat", default=3, show_default=True)
def main(
    prompts: int, turns: int, latency_s: float, workers: int, agents: int, repeat: int
) -> None:
    """Measure both executors over PROMPTS prompts, in turn."""
    speeds: dict[str, list[float]] = {"local": [], "ray": []}
    costs: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as place, two_nodes(Path(place)) as cluster:
        flags = {"local": [], "ray": ["--executor=ray", f"--ray_address={cluster.address}"]}
        for _ in range(repeat):
            for name, executor in flags.items():
                speed, cost_ms, cpu_s = measure(
                    Path(place),
                    executor,
                    prompts=prompts,
                    turns=turns,
                    latency_s=latency_s,
                    workers=workers,
                    agents=agents,
                )
                print(f"{name}: {speed:.1f}/s, {cost_ms:.3f} ms, {cpu_s:.2f} s", flush=True)
                speeds[name].append(speed)
                costs[name].append(cost_ms)
    ratios = [ray / local for local, ray in zip(speeds["local"], speeds["ray"], strict=True)]
    shown = ", ".join(f"{ratio:.3f}" for ratio in sorted(ratios))
    print(f"throughput ray/local: median {statistics.median(ratios):.3f} of {shown}")
    for name, of_one in costs.items():
        print(f"driver CPU per record, {name}: median {statistics.median(of_one):.3f} ms")


if __name__ == "__main__":
    main()
