"""Commands about runs that there are: status, export, verify, merge."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cli.exit_codes import errors_as_exit_codes
from cli.export_options import asks_for_dataset, dataset_options, make_dataset
from cli.shared import export_and_account, open_for_reading, run_dir_argument, show_run
from runs.process.console import show

PROBLEMS = 6
"""What `verify` found is not whole."""


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--watch",
    type=click.FloatRange(min=0.1),
    is_flag=False,
    flag_value=5.0,
    metavar="[SECONDS]",
    help="Show it again every 5 or SECONDS seconds, while the run goes on.",
)
def status(run: str, output_dir: Path, as_json: bool, watch: float | None) -> None:
    """Show the accounts of RUN (a name or a directory) and what it is about, also while it runs."""
    from report.status import show_status

    with errors_as_exit_codes():
        show_status(*open_for_reading(run, output_dir), as_json=as_json, every_s=watch)


@click.command()
@run_dir_argument
@dataset_options
def export(run: str, output_dir: Path, **flags: Any) -> None:
    """Write the training files of RUN (a name or a directory) again from its records.

    With any of the options below, make a dataset of it instead: see docs/export.md.
    """
    from runs.narrowing import refuse_narrowing
    from runs.run_dir import read_run_json

    with errors_as_exit_codes():
        path, scan, config = open_for_reading(run, output_dir)
        if asks_for_dataset(flags):
            sys.exit(make_dataset(path, scan, num_samples=config.num_samples, flags=flags))
        refuse_narrowing(path, scan, config, read_run_json(path), accepted=())
        accounts = export_and_account(path, scan, config)
    if accounts.pending:
        click.echo(f"{accounts.pending} tasks are pending and not in the files", err=True)
    show_run(path, accounts)


@click.command()
@run_dir_argument
@click.option("--read_data", is_flag=True, help="Make the training files again and compare them.")
@click.option("--repair", is_flag=True, help="Set aside what is unreadable; make the rest anew.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: str, output_dir: Path, read_data: bool, repair: bool, as_json: bool) -> None:
    """Check that RUN (a name or a directory) is whole and that its files agree; exit 6 if not.

    Reads only, unless --repair is given. Not while the run is worked on.
    """
    from runs.maintenance.upkeep import check, find_run

    with errors_as_exit_codes():
        path, identity, config = find_run(run, output_dir)
        checked = check(
            path, identity, config, read_data=read_data, repair=repair, make=export_and_account
        )
    show(checked.as_json() if as_json else checked.describe())
    sys.exit(PROBLEMS if checked.left else 0)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--into", required=True, help="Name of the new run.")
@click.option(
    "--output_dir",
    type=click.Path(path_type=Path),
    default=Path("trajectories"),
    help="Where the new run goes, and RUNs are that are only names.  [default: trajectories]",
)
@click.option("--dataset_file", type=click.Path(path_type=Path), help="Dataset with all rows.")
@click.option("--drop_unfinished", is_flag=True, help="Leave behind what is under way.")
@click.option("--allow_gaps", is_flag=True, help="Leave the tasks of missing shards pending.")
def merge(
    runs: tuple[str, ...],
    into: str,
    output_dir: Path,
    dataset_file: Path | None,
    drop_unfinished: bool,
    allow_gaps: bool,
) -> None:
    """Make one run of several RUNs (names or directories) of the same config: of all shards."""
    from runs.maintenance.merge import common_config
    from runs.maintenance.merge import merge as merge_runs
    from runs.maintenance.upkeep import find_run, scan_of

    with errors_as_exit_codes():
        found = [find_run(run, output_dir)[:2] for run in runs]
        config = common_config(
            found,
            run_name=into,
            output_dir=output_dir,
            dataset_file=dataset_file,
            allow_gaps=allow_gaps,
        )
        dataset = {**found[0][1]["dataset"], "path": config.dataset_file}
        scan = scan_of(config.run_dir, {**found[0][1], "dataset": dataset}, config)
        merged = merge_runs(found, config, scan, drop=drop_unfinished)
        accounts = export_and_account(merged.path, scan, config)
    show(merged.describe())
    show_run(merged.path, accounts)
