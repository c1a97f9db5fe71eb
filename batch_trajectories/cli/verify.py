"""The commands `verify` and `merge`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import LocalPath, PlacePath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.shared import (
    run_dir_argument,
    show_run,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


@click.command()
@run_dir_argument
@click.option("--read_data", is_flag=True, help="Also rebuild the training files and compare them.")
@click.option("--repair", is_flag=True, help="Set unreadable data aside and rebuild derived files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: str, output_dir: Path, read_data: bool, repair: bool, as_json: bool) -> None:
    """Check that RUN is complete and consistent; exit 6 if not.

    Read-only unless --repair is given. The run must not be in progress.
    """
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.maintenance.upkeep import check

    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=repair)
        checked = check(
            stored.path,
            stored.identity,
            stored.config,
            read_data=read_data,
            repair=repair,
            make=write_results,
        )
    show(checked.as_json() if as_json else checked.describe())
    sys.exit(PROBLEMS if checked.left else 0)


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--into", required=True, help="Name of the new run.")
@click.option(
    "--output_dir",
    type=LocalPath(path_type=Path),
    default=Path("trajectories"),
    help="Directory of the new run and of RUNs given by name.  [default: trajectories]",
)
@click.option("--dataset_file", type=PlacePath(path_type=Path), help="Dataset with all rows.")
@click.option("--drop_unfinished", is_flag=True, help="Leave unfinished conversations out.")
@click.option("--allow_gaps", is_flag=True, help="Leave tasks of missing shards pending.")
def merge(
    runs: tuple[str, ...],
    into: str,
    output_dir: Path,
    dataset_file: Path | None,
    drop_unfinished: bool,
    allow_gaps: bool,
) -> None:
    """Merge RUNs of the same config, such as all shards, into one run."""
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine.narrowing import refuse_narrowing
    from batch_trajectories.maintenance.merge import common_config
    from batch_trajectories.maintenance.merge import merge as merge_runs
    from batch_trajectories.maintenance.upkeep import scan_of, snapshot_dataset

    with errors_as_exit_codes():
        opened = [open_run(run, output_dir) for run in runs]
        parts = [(stored.path, stored.identity) for stored in opened]
        config = common_config(
            parts,
            run_name=into,
            output_dir=output_dir,
            dataset_file=dataset_file,
            allow_gaps=allow_gaps,
        )
        first = parts[0][1]
        if dataset_file is None:
            if not opened[0].is_own:
                _ = opened[0].scan  # raises if its run.json names another file of this machine
        else:
            _refuse_strange_rows(opened[0])
            kept_dataset = snapshot_dataset(first, config)
            first = {**first, "dataset": {**first["dataset"], "path": kept_dataset.path}}
        scan = scan_of(config.run_dir, first, config)
        for path, identity in parts:
            refuse_narrowing(path, scan, config, identity, accepted=())
        made = []
        merged = merge_runs(
            parts,
            config,
            scan,
            drop=drop_unfinished,
            make=lambda *of_run: made.append(write_results(*of_run)),
        )
        # Nothing is made where the merge only had to be finished after a kill.
        totals = made[0] if made else write_results(merged.path, scan, config)
    show(merged.describe())
    show_run(merged.path, totals)


def _refuse_strange_rows(stored: StoredRun) -> None:
    """Raise `ConfigError` if a received run says by which files of this machine rows are read."""
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.engine.origin import harmless_options, received

    if stored.is_own:
        return
    config = stored.identity["config"]
    harmless = harmless_options(config)
    if named := [
        name for name in ("only_sound", "rows") if name in config and name not in harmless
    ]:
        raise ConfigError(
            f"{received(stored.path)}, so its {named[0]}={config[named[0]]!r} is not read; give "
            "--dataset_file with the rows as they are in the run directory"
        )
