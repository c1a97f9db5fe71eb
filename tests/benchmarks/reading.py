"""How long commands that read a whole run take: `status`, `stats`, `report`, `verify`.

    python -m tests.benchmarks.reading [--rows 100000] [--size small] [--reps 3] [--against DIR]
                                 [--run DIR]

Makes a finished run of `--rows` records (see `export_speed`) and reads it with each command, each
time in a process of its own. With `--against`, the tree of another commit takes turns with this
one on the same run: on `--run` where that commit cannot read what this one makes. Printed are
medians of wall time and of CPU time, those of child processes included.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click

from tests.benchmarks.export_speed import ROOT, SIZES, make_run

COMMANDS = ("status", "stats", "report", "verify")


@click.command()
@click.option("--rows", default=100_000)
@click.option("--size", type=click.Choice(sorted(SIZES)), default="small")
@click.option("--reps", default=3)
@click.option("--against", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--run", "given", type=click.Path(path_type=Path, exists=True, file_okay=False))
def main(rows: int, size: str, reps: int, against: Path | None, given: Path | None) -> None:
    """Make a run, read it, print what it took."""
    trees = [ROOT] if against is None else [against, ROOT]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = given or make_run(Path(folder), rows, *SIZES[size])
        if given is None:
            argv = [sys.executable, "batch_runner.py", "export", str(run_dir)]
            subprocess.run(argv, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        megabytes = (run_dir / "records.jsonl").stat().st_size / 1e6
        click.echo(f"{run_dir}: {megabytes:.0f} MB; medians of {reps}")
        found = defaultdict(list)
        for _ in range(reps):
            for tree in trees:
                _save_scan(tree, run_dir)
                for command in COMMANDS:
                    found[tree, command].append(_timed(tree, run_dir, command))
    for command in COMMANDS:
        for tree in trees:
            wall, cpu = map(statistics.median, zip(*found[tree, command], strict=True))
            click.echo(f"{command:8} {wall:6.2f} s, {cpu:6.2f} s of CPU  {tree}")


def _save_scan(tree: Path, run_dir: Path) -> None:
    """As the end of a start leaves it; versions differ in what they save."""
    # Earlier trees have their rooms at the top.
    top = "batch_trajectories." if (tree / "batch_trajectories").is_dir() else ""
    is_flat = (tree / top.replace(".", "/") / "dataset").is_dir()
    scans = f"{top}dataset" if is_flat else f"{top}runs.dataset"
    code = (
        "import sys; from pathlib import Path;"
        f"from {top}api.stored_run import StoredRun;"
        f"from {scans}.scan_cache import save_scan;"
        "run = StoredRun(Path(sys.argv[1]).resolve()); saved = run.path / 'dataset.idx';"
        "saved.unlink(missing_ok=True); save_scan(saved, run.scan)"
    )
    subprocess.run([sys.executable, "-c", code, run_dir.resolve()], cwd=tree, check=True)


def _timed(tree: Path, run_dir: Path, command: str) -> tuple[float, float]:
    """Seconds of wall time and of CPU."""
    argv = [sys.executable, str(tree / "batch_runner.py"), command, str(run_dir.resolve())]
    began, before = time.monotonic(), os.times()
    done = subprocess.run(argv, cwd=tree, capture_output=True, check=False)
    after = os.times()
    assert done.returncode in (0, 6), done.stderr.decode()
    user, system = after.children_user - before.children_user, after.children_system
    return time.monotonic() - began, user + system - before.children_system


if __name__ == "__main__":
    main()
