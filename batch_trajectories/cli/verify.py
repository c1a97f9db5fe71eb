"""The commands `verify` and `merge`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.cli.command_line import LocalPath, PlacePath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.shared import (
    run_dir_argument,
    show_run,
)
from batch_trajectories.records.names import MANIFEST_FILE, RUN_FILE

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


@click.command()
@run_dir_argument
@click.option("--read_data", is_flag=True, help="Also rebuild the training files and compare them.")
@click.option(
    "--repair", is_flag=True, help="Set unreadable data aside, and rebuild derived files."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--sha256", metavar="HEX", help="For a publication: the digest that its manifest must have."
)
@click.option(
    "--given",
    metavar="OPTIONS",
    help="For a publication: say what its job needs besides these options.",
)
@click.option(
    "--same_as",
    metavar="DIR",
    type=LocalPath(path_type=Path),
    help="For a publication: compare its rows with those of another publication.",
)
def verify(
    run: str,
    output_dir: Path,
    read_data: bool,
    repair: bool,
    as_json: bool,
    sha256: str | None,
    given: str | None,
    same_as: Path | None,
) -> None:
    """Check that RUN is complete and consistent. The exit code is 6 if it is not.

    Nothing is changed without --repair. The run must not be in progress. If RUN is a directory that
    `publish` has written, its files are compared with its manifest.
    """
    if (Path(run) / MANIFEST_FILE).exists() and not (Path(run) / RUN_FILE).exists():
        with errors_as_exit_codes():
            if read_data or repair:
                raise ConfigError("--read_data and --repair are only for runs")
            is_whole = _verify_publication(
                Path(run), sha256=sha256, given=given, same_as=same_as, as_json=as_json
            )
        sys.exit(0 if is_whole else PROBLEMS)
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.maintenance.upkeep import check

    with errors_as_exit_codes():
        if (sha256, given, same_as) != (None, None, None):
            raise ConfigError(
                f"{run}: this is no publication; only for one are --sha256, --given and --same_as"
            )
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


def _verify_publication(
    directory: Path,
    *,
    sha256: str | None,
    given: str | None,
    same_as: Path | None,
    as_json: bool,
) -> bool:
    """Print what a received publication lacks; returns whether it is whole."""
    from batch_trajectories.publishing.verifying import (
        find_differences,
        find_missing,
        find_problems,
        read_publication,
    )

    found = read_publication(directory)
    problems = [*find_problems(found, expected=sha256)]
    missing = [] if given is None else [*find_missing(found, given)]
    differences: list[str] = []
    if same_as is not None:
        other = read_publication(same_as)
        problems += [f"{same_as}: {one}" for one in find_problems(other)]
        differences = [*find_differences(found, other)]
    if as_json:
        facts: dict[str, Any] = {"sha256": found.sha256, "problems": problems}
        facts |= {"differences": differences, "missing": missing}
        show(json.dumps(facts, indent=2))
    else:
        lines = [*problems, *(f"not the same: {one}" for one in differences)]
        if same_as is not None and not lines:
            lines.append(f"{same_as}: the same rows")
        lines += [] if problems else [found.describe()]
        show("\n".join([*lines, *missing]))
    return not problems and not differences and not missing


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
@click.option(
    "--drop_unfinished", is_flag=True, help="Leave out conversations that have not ended."
)
@click.option(
    "--allow_gaps",
    is_flag=True,
    help="Merge although shards are missing. Their tasks stay pending.",
)
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
    from batch_trajectories.engine.stored_scan import load_scan
    from batch_trajectories.maintenance.merge import common_config
    from batch_trajectories.maintenance.merge import merge as merge_runs
    from batch_trajectories.maintenance.upkeep import snapshot_dataset

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
        scan = load_scan(config.run_dir, first, config)
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
    from batch_trajectories.engine.origin import describe_received, harmless_options

    if stored.is_own:
        return
    config = stored.identity["config"]
    harmless = harmless_options(config)
    if named := [
        name for name in ("only_sound", "rows") if name in config and name not in harmless
    ]:
        raise ConfigError(
            f"{describe_received(stored.path)}, so its {named[0]}={config[named[0]]!r} is not "
            "read; give --dataset_file with the rows as they are in the run directory"
        )
