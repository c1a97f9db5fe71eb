"""The commands that steer a run that works: pause, resume, limits, stop, retry."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import run_dir_argument


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
