"""Commands about existing runs: status, export, verify, merge, label; steering one that works."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath, PlacePath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.export_options import ExportCommand, dataset_options, make_dataset
from batch_trajectories.cli.shared import (
    complete_runs,
    output_dir_option,
    run_argument,
    run_dir_argument,
    show_run,
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


@click.command(cls=ExportCommand)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", shell_complete=complete_runs)
@output_dir_option
@dataset_options
def export(runs: tuple[str, ...], output_dir: Path, **flags: Any) -> None:
    """Write the training files of RUN again from its records.

    With any option for datasets, build a dataset instead, also of several RUNs; see docs/export.md.
    """
    from batch_trajectories.api.start import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine.narrowing import refuse_narrowing
    from batch_trajectories.export.dataset.runs import Source

    with errors_as_exit_codes():
        opened = [open_run(run, output_dir) for run in runs]
        for stored in opened:
            refuse_narrowing(stored.path, stored.scan, stored.config, stored.identity, accepted=())
        if len(runs) > 1 or any(value not in (None, False) for value in flags.values()):
            sources = [
                Source(one.path, one.scan, one.config.num_samples, one.config) for one in opened
            ]
            sys.exit(make_dataset(sources, flags=flags))
        path, scan, config = opened[0].path, opened[0].scan, opened[0].config
        totals = write_results(path, scan, config)
    if totals.pending:
        say(f"warning: {plural(totals.pending, 'pending task')} not in the training file")
    show_run(path, totals)


@click.command()
@run_dir_argument
@click.option("--read_data", is_flag=True, help="Also rebuild the training files and compare them.")
@click.option("--repair", is_flag=True, help="Set unreadable data aside and rebuild derived files.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(run: str, output_dir: Path, read_data: bool, repair: bool, as_json: bool) -> None:
    """Check that RUN is complete and consistent; exit 6 if not.

    Read-only unless --repair is given. The run must not be in progress.
    """
    from batch_trajectories.api.start import write_results
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
    from batch_trajectories.api.start import write_results
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine.narrowing import refuse_narrowing
    from batch_trajectories.maintenance.merge import common_config
    from batch_trajectories.maintenance.merge import merge as merge_runs
    from batch_trajectories.maintenance.upkeep import keep_given, scan_of

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
        if dataset_file is not None:
            kept_dataset = keep_given(first, config)
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


@click.command()
@run_dir_argument
@click.argument("record_id", metavar="ID")
@click.option(
    "--verdict", type=click.Choice(["keep", "reject", "fix", "none"]), help="none takes it back."
)
@click.option("--no_loss", metavar="N,...", help="Turns that carry no loss; none takes them back.")
@click.option("--note", metavar="TEXT", help="none takes it back.")
@click.option(
    "--over", metavar="ID,...", help="Samples of the same prompt that this one is preferred to."
)
@click.option("--who", metavar="NAME", help="The reviewer.  [default: your user name]")
def label(
    run: str,
    record_id: str,
    output_dir: Path,
    no_loss: str | None,
    over: str | None,
    who: str | None,
    **said: str | None,
) -> None:
    """Decide about the conversation of RUN with this id or unique id prefix, in labels.jsonl.

    Recipes, masks, dpo, stats and compare read the labels; the last line of a reviewer counts.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.engine.control import user_name
    from batch_trajectories.records.scores import append_label, label_change, score_key

    with errors_as_exit_codes():
        if who is not None and not who.strip():
            raise ConfigError("--who: give a name, or leave it out for your user name")
        stored = open_run(run, output_dir, writes=True)
        record = stored.find(record_id)
        given: dict[str, Any] = {
            name: None if text == "none" else text
            for name, text in said.items()
            if text is not None
        }
        if no_loss is not None:
            numbers = [part.strip() for part in no_loss.split(",") if no_loss != "none"]
            if not all(number.isdecimal() for number in numbers):
                raise ConfigError(f"--no_loss: give numbers of turns such as 1,3, not {no_loss!r}")
            given["no_loss"] = [int(number) for number in numbers] or None
            if late := [number for number in numbers if int(number) > len(record.turns)]:
                turns = plural(len(record.turns), "turn")
                raise ConfigError(f"--no_loss: {record.id} has {turns}, and no turn {late[0]}")
        if over is not None:
            others = [
                stored.find(part) for part in dict.fromkeys(over.split(",")) if over != "none"
            ]
            if strange := [one.id for one in others if one.prompt_id != record.prompt_id]:
                raise ConfigError(f"--over: {strange[0]} is no sample of {record.prompt_id}")
            given["over"] = {one.id: score_key(one) for one in others} or None
        try:
            change = label_change(given)
        except ValueError as error:
            raise ConfigError(f"{record.id}: {error}") from error
        append_label(stored.path, score_key(record), record.id, who or user_name(), change)
    show(f"{stored.path / 'labels.jsonl'}: {record.id}")


@click.command()
@run_dir_argument
def pause(run: str, output_dir: Path) -> None:
    """Have RUN make no more calls until `resume`; those in flight end."""
    _steer(run, output_dir, "pause")


@click.command()
@run_dir_argument
def resume(run: str, output_dir: Path) -> None:
    """Have a paused RUN go on."""
    _steer(run, output_dir, "resume")


@click.command()
@run_dir_argument
@click.option("--rpm", type=float, metavar="NUMBER", help="Requests per minute per endpoint.")
@click.option(
    "--max_in_flight", type=click.IntRange(min=1), metavar="N", help="Calls per endpoint."
)
@click.option(
    "--max_run_cost_usd", type=float, metavar="NUMBER", help="The run's budget; only upwards."
)
def limits(run: str, output_dir: Path, **given: float | None) -> None:
    """Change limits of RUN while it works, until this start ends; the next has its own options."""
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise click.BadParameter(f"{value} is no limit", param_hint=f"--{name}")
    _steer(run, output_dir, "limits", **given)


@click.command()
@run_dir_argument
@click.argument("record_id", metavar="ID")
def stop(run: str, output_dir: Path, record_id: str) -> None:
    """Stop the conversation of RUN with this id; it counts as a failed attempt."""
    _steer(run, output_dir, "stop", id=record_id)


@click.command()
@run_dir_argument
def retry(run: str, output_dir: Path) -> None:
    """Have RUN try again, now, the conversations that failed since it started."""
    _steer(run, output_dir, "retry")


def _steer(run: str, output_dir: Path, do: str, **values: Any) -> None:
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine.control import steer

    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        show(f"{stored.path}: {steer(stored.path, stored.holder, do, **values)}")
