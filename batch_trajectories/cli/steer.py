"""The commands that steer a run: pause, resume, limits, stop, cancel, retry."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.exit_codes import end, errors_as_exit_codes
from batch_trajectories.cli.shared import (
    Starting,
    plan_start,
    run_dir_argument,
    start,
    trust_option,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


@click.command()
@run_dir_argument
def pause(run: str, output_dir: Path) -> None:
    """Let RUN make no more calls until `resume`. Calls in flight end first."""
    _steer(run, output_dir, "pause")


@click.command()
@run_dir_argument
@trust_option
def resume(run: str, output_dir: Path, trust_run: bool) -> None:
    """Continue RUN: end its pause, or start it again with the options of its last start.

    To change options, use `run --run_name=RUN` with the options that differ.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.cli.resuming import stored_options

    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        if stored.holder is not None:
            _ask(stored, "resume")
            return
        flags = stored_options(stored, trust_run=trust_run)
        starting = Starting(config_file=None, fresh=False, accept_config_change=())
        ended = start(plan_start(starting, flags), starting)
    end(ended)


@click.command()
@run_dir_argument
@click.option(
    "--rpm", type=float, metavar="NUMBER", help="Maximum requests per minute per endpoint."
)
@click.option(
    "--max_in_flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum calls in flight per endpoint.",
)
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    metavar="N",
    help="Conversations in flight per worker.",
)
@click.option(
    "--max_run_cost_usd",
    type=float,
    metavar="NUMBER",
    help="Budget of the run. It can only be raised.",
)
def limits(run: str, output_dir: Path, **given: float | None) -> None:
    """Change limits of RUN while it works.

    They hold until this start ends. The next start has its own options.
    """
    for name, value in given.items():
        if value is not None and not math.isfinite(value):
            raise click.BadParameter(f"{value} cannot be a limit", param_hint=f"--{name}")
    _steer(run, output_dir, "limits", **given)


@click.command()
@run_dir_argument
@click.argument("record_id", metavar="[ID]", required=False)
def stop(run: str, output_dir: Path, record_id: str | None) -> None:
    """Stop RUN in order, as Ctrl-C does. `resume RUN` continues it.

    With an ID: `cancel`.
    """
    if record_id is None:
        _steer(run, output_dir, "stop_run")
    else:
        _steer(run, output_dir, "stop", id=record_id)


@click.command()
@run_dir_argument
@click.argument("record_id", metavar="ID")
def cancel(run: str, output_dir: Path, record_id: str) -> None:
    """Stop one conversation of RUN. It counts as a failed attempt."""
    _steer(run, output_dir, "stop", id=record_id)


@click.command()
@run_dir_argument
def retry(run: str, output_dir: Path) -> None:
    """Let RUN try conversations that failed in this start again, now."""
    _steer(run, output_dir, "retry")


def _steer(run: str, output_dir: Path, do: str, **values: Any) -> None:
    from batch_trajectories.api.stored_run import open_run

    with errors_as_exit_codes():
        _ask(open_run(run, output_dir, writes=True), do, **values)


def _ask(stored: StoredRun, do: str, **values: Any) -> None:
    """Ask the process that works on a run, and print its answer."""
    from batch_trajectories.engine.control import steer

    show(f"{stored.path}: {steer(stored.path, stored.holder, do, **values)}")
