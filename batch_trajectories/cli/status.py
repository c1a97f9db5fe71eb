"""The command `status`."""

from __future__ import annotations

from pathlib import Path

import click

from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import (
    output_dir_option,
    run_argument,
)


@click.command()
@run_argument("run", required=False)
@output_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=5.0,
    metavar="[SECONDS]",
    help="Repeat every SECONDS (default: 5) until the run ends.",
)
def status(run: str | None, output_dir: Path, as_json: bool, watch: float | None) -> None:
    """Show the progress and totals of RUN, during the run or afterwards.

    Without a RUN, list the runs in the output directory.
    """
    if run is None and watch is not None:
        raise click.UsageError("--watch needs a RUN")
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.report.status import show_runs, show_status

    with errors_as_exit_codes():
        if run is None:
            show_runs(output_dir, as_json=as_json)
            return
        show_status(open_run(run, output_dir), as_json=as_json, every_s=watch)
