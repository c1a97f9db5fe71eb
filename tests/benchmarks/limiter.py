"""How close a run comes to the best fixed concurrency of an endpoint that refuses the rest.

    python -m tests.benchmarks.limiter [--capacity 40] [--prompts 1200]

A fake endpoint answers 429 beyond `capacity` requests in flight. The same prompts are run with
the calls fixed at exactly that capacity (unknown beforehand), and with 4 workers x 64
conversations that have to find it. Prints the wall times, their ratio, and which share of the
calls was refused after the first 10 seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from tests.fakes.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).parents[2]
_SETTLED_AFTER_S = 10.0


def measure(cwd: Path, dataset: Path, capacity: int, name: str, *options: str) -> dict[str, float]:
    """Run all prompts once; give `wall_s`, `refused` (a share) and `refused_late`."""
    with FakeEndpoint(
        turns=5,
        latency_s=0.2,
        capacity=capacity,
        tool="write_file",
        arguments='{"path": "n{turn}", "content": "{turn}"}',
    ) as endpoint:
        command = [
            sys.executable,
            str(ROOT / "batch_runner.py"),
            "--model=m",
            "--key_env=none",
            f"--base_url={endpoint.openai_url}",
            f"--dataset_file={dataset}",
            f"--run_name={name}",
            f"--output_dir={cwd}",
            "--enabled_toolsets=file",
            *options,
        ]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(_SETTLED_AFTER_S)
        early = endpoint.journal()
        if process.wait():
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
        whole = endpoint.journal()
    refused, early_refused = (j["faults"].get("http429", 0) for j in (whole, early))
    late = whole["requests"] - early["requests"]
    return {
        "wall_s": whole["last_reply_at"] - whole["first_request_at"],
        "refused": refused / whole["requests"],
        "refused_late": (refused - early_refused) / late if late else 0.0,
    }


@click.command()
@click.option("--capacity", default=40, show_default=True)
@click.option("--prompts", default=1200, show_default=True)
def main(capacity: int, prompts: int) -> None:
    """Measure the fixed and the adaptive run, and print their ratio."""
    with tempfile.TemporaryDirectory() as root:
        dataset = Path(root) / "prompts.jsonl"
        rows = ({"prompt": f"Question number {n}"} for n in range(prompts))
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        ways = {
            "fixed": ("--num_workers=2", f"--batch_size={capacity // 2}"),
            "adaptive": ("--num_workers=4", "--batch_size=64"),
        }
        collected = {
            name: measure(Path(root), dataset, capacity, name, *options)
            for name, options in ways.items()
        }
    for name, figures in collected.items():
        click.echo(
            f"{name:<9} {figures['wall_s']:6.1f} s   refused {figures['refused']:6.2%}, "
            f"after {_SETTLED_AFTER_S:g} s {figures['refused_late']:6.2%}"
        )
    click.echo(
        f"adaptive / fixed {collected['adaptive']['wall_s'] / collected['fixed']['wall_s']:.3f}"
    )


if __name__ == "__main__":
    main()
