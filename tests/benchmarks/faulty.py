"""What faults of an endpoint, one kind at a time, cost beside the calls that they hit.

    python -m tests.benchmarks.faulty [--rate 0.03] [--seconds 12] [--together] [KIND ...]

A fake endpoint plays one kind of fault in a share of its replies. Runs with and without it take
turns, since machines change while they measure. Prints for each kind the replies per second, their
ratio to the mean of the two runs beside it, and the limit of calls in flight that was found; exit
code 1 if a ratio is below 0.8. `--together` plays all kinds at once instead.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import click

from tests.fakes.fake_endpoint import FakeEndpoint

ROOT = Path(__file__).parents[2]

KINDS = (
    "http429",
    "http429_none",
    "http429_1",
    "http429_date",
    "http408",
    "http409",
    "http500",
    "http502",
    "http503",
    "http529",
    "disconnect",
    "reset",
    "cut",
    "html",
    "empty",
    "garbage",
    "error200",
    "no_choices",
)
_LOWEST = 0.8
_WARM_S = 3.0
"""Until workers have started, and the limit has been looked for."""


class Measured(NamedTuple):
    """One run."""

    replies_per_s: float
    limit: int


def measure(dataset: Path, faults: dict[str, float], seconds: float) -> Measured:
    """Run until `seconds` after the start, then stop."""
    with (
        tempfile.TemporaryDirectory() as root,
        FakeEndpoint(
            turns=5,
            latency_s=0.2,
            seed=1,
            faults=faults,
            tool="write_file",
            arguments='{"path": "n{turn}", "content": "{turn}"}',
        ) as endpoint,
    ):
        command = [
            sys.executable,
            str(ROOT / "batch_runner.py"),
            "--model=m",
            "--key_env=none",
            f"--base_url={endpoint.openai_url}",
            f"--dataset_file={dataset}",
            "--run_name=r",
            f"--output_dir={root}",
            "--enabled_toolsets=file",
            "--sandbox=local",
            "--num_workers=2",
            "--batch_size=60",
            "--max_in_flight=64",
            "--grace_s=0",
            "--max_attempts=9",
        ]
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while not endpoint.journal()["replies"]:
                time.sleep(0.05)
            time.sleep(_WARM_S)
            began, before = time.monotonic(), endpoint.journal()["replies"]
            time.sleep(seconds)
            replies = endpoint.journal()["replies"] - before
            took = time.monotonic() - began
            os.killpg(process.pid, signal.SIGINT)
        summary = json.loads((Path(root) / "r" / "summary.json").read_bytes())
        return Measured(replies / took, summary["last_start"]["calls"][0]["limit"])


@click.command()
@click.argument("kinds", nargs=-1)
@click.option("--rate", default=0.03, show_default=True)
@click.option("--seconds", default=12.0, show_default=True)
@click.option("--together", is_flag=True)
def main(kinds: tuple[str, ...], rate: float, seconds: float, together: bool) -> None:
    """Measure each kind between two runs without faults."""
    named = {kind: {kind: rate} for kind in kinds or KINDS}
    if together:
        named = {"together": dict.fromkeys(kinds or KINDS, rate)}
    lowest = 1.0
    with tempfile.TemporaryDirectory() as root:
        dataset = Path(root) / "prompts.jsonl"
        rows = ({"prompt": f"Question number {n}"} for n in range(50_000))
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        before = measure(dataset, {}, seconds)
        for name, faults in named.items():
            hurt = measure(dataset, faults, seconds)
            after = measure(dataset, {}, seconds)
            ratio = 2 * hurt.replies_per_s / (before.replies_per_s + after.replies_per_s)
            lowest = min(lowest, ratio)
            click.echo(
                f"{name:<14} {hurt.replies_per_s:7.1f} replies/s   ratio {ratio:5.3f}   "
                f"limit {hurt.limit} (without faults {after.limit})"
            )
            before = after
    click.echo(f"lowest ratio {lowest:.3f}")
    sys.exit(lowest < _LOWEST and not together)


if __name__ == "__main__":
    main()
