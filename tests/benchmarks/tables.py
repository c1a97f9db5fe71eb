"""How fast a run is read as Arrow tables, and in how much memory.

    python -m tests.benchmarks.tables [--rows 100000] [--size small] [--reps 3]

Makes a finished run of `--rows` records (see `export_speed`) and reads each table in batches and
drops them, each time in a process of its own. Printed are the medians of MB of records per second
of CPU, and the peak memory of the process, for a tenth of the rows and for all: it must not grow.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_args

import click
import orjson

from batch_trajectories.api.stored_run import StoredRun
from batch_trajectories.api.tables import TableName
from tests.benchmarks.export_speed import ROOT, SIZES, make_run


@click.group(invoke_without_command=True)
@click.option("--rows", default=100_000)
@click.option("--size", type=click.Choice(sorted(SIZES)), default="small")
@click.option("--reps", default=3)
@click.pass_context
def main(context: click.Context, rows: int, size: str, reps: int) -> None:
    """Make two runs, read them, print what it took."""
    if context.invoked_subcommand is not None:
        return
    for number in (rows // 10, rows):
        with tempfile.TemporaryDirectory() as folder:
            run_dir = make_run(Path(folder), number, *SIZES[size])
            megabytes = (run_dir / "records.jsonl").stat().st_size / 1e6
            click.echo(f"{number:,} records, {megabytes:.0f} MB; medians of {reps}")
            for table in get_args(TableName):
                measured = [_in_a_process(run_dir, table) for _ in range(reps)]
                rate = megabytes / statistics.median(cpu for cpu, _ in measured)
                peak = max(peak for _, peak in measured)
                click.echo(f"{table:8} {rate:6.0f} MB/s, peak {peak:.0f} MB")


def _in_a_process(run_dir: Path, table: str) -> tuple[float, float]:
    """Seconds of CPU and peak MB."""
    command = [sys.executable, "-m", "tests.benchmarks.tables", "measure", str(run_dir), table]
    cpu, peak = orjson.loads(
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    )
    return cpu, peak


@main.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.argument("table", type=click.Choice(get_args(TableName)))
def measure(run_dir: Path, table: TableName) -> None:
    """Read one table and print the seconds of CPU and the peak MB of this process."""
    import pyarrow  # noqa: F401  its import is not measured

    before = time.process_time()
    for _ in StoredRun(run_dir).batches(table):
        pass
    cpu = time.process_time() - before
    status = Path("/proc/self/status").read_text()  # `ru_maxrss` takes over that of the parent
    peak = next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line) / 1024
    click.echo(orjson.dumps([cpu, peak]))


if __name__ == "__main__":
    main()
