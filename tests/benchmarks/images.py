"""How much longer short conversations take in an image: wall time over the same without one.

    python -m tests.benchmarks.images [--conversations 100] [--turns 2] [--latency_ms 20] [--reps 5]
                                [--at_once 4] [--against DIR]

Each conversation has `--turns` replies of an endpoint on this machine, all but the last with a
call that runs a command: `plain` without an image, `same` in an image in which it changes nothing,
`edit` where it edits a file of the image's repository, so that its record has a diff. All take
turns in one run of this program, with `--against` also the tree of another commit. It wants a
quiet machine and an idle disk.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click

from tests.benchmarks.export_speed import ROOT
from tests.benchmarks.sandboxes import make_image
from tests.fakes.fake_endpoint import FakeEndpoint

COMMANDS = {"plain": "echo hi >a", "same": "echo hi", "edit": "echo 'x = 1' >>pkg/m1.py"}
FILES = {f"pkg/m{n}.py": "def add(a, b):\n    return a - b\n" for n in range(200)}


def run(tree: Path, place: Path, kind: str, conversations: int, at_once: int, url: str) -> float:
    """The seconds of a run."""
    in_image = kind != "plain"
    row = {"prompt": "Go", **({"image": "made:1"} if in_image else {})}
    rows = [json.dumps({"id": f"q{n}", **row}) for n in range(conversations)]
    with tempfile.TemporaryDirectory(dir=place) as cwd:
        Path(cwd, "prompts.jsonl").write_text("\n".join(rows) + "\n")
        argv = [sys.executable, str(tree / "batch_runner.py"), "--dataset_file=prompts.jsonl"]
        argv += ["--run_name=r", "--model=m", f"--base_url={url}/v1", "--sandbox=bwrap"]
        argv += ["--enabled_toolsets=terminal", "--num_workers=1", f"--batch_size={at_once}"]
        if in_image:
            argv += ["--row_setup", "--workspace=image", f"--images={place / 'images'}"]
        begun = time.monotonic()
        env = {**os.environ, "OPENAI_API_KEY": "none"}
        done = subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, check=False)
        taken = time.monotonic() - begun
    if done.returncode != 0:
        raise click.ClickException(done.stderr[-2000:])
    return taken


@click.command()
@click.option("--conversations", default=100)
@click.option("--turns", default=2)
@click.option("--latency_ms", default=20)
@click.option("--reps", default=5)
@click.option("--at_once", default=4)
@click.option("--against", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(
    conversations: int, turns: int, latency_ms: int, reps: int, at_once: int, against: Path | None
) -> None:
    """Make an image, run conversations, print medians and ratios."""
    trees = [ROOT] if against is None else [against.resolve(), ROOT]
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        make_image(place, FILES)
        for rep in range(-1, reps):  # the first one fills caches, and does not count
            for tree in trees:
                for kind, command in COMMANDS.items():
                    arguments = json.dumps({"command": command})
                    with FakeEndpoint(
                        turns=turns,
                        latency_s=latency_ms / 1000,
                        tool="terminal",
                        arguments=arguments,
                    ) as endpoint:
                        url = endpoint.anthropic_url
                        taken = run(tree, place, kind, conversations, at_once, url)
                    if rep >= 0:
                        found[tree, kind].append(taken)
    for tree in trees:
        without = statistics.median(found[tree, "plain"])
        for kind in COMMANDS:
            times = found[tree, kind]
            middle = statistics.median(times)
            spread = f"{min(times):.2f}-{max(times):.2f}"
            click.echo(f"{kind:6} {middle:5.2f} s ({spread})  {middle / without:.2f}  {tree}")


if __name__ == "__main__":
    main()
