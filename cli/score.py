"""The command `score`: rewards for a run, given after it."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from cli.exit_codes import errors_as_exit_codes
from cli.shared import run_dir_argument
from runs.process.console import show


@click.command()
@run_dir_argument
@click.option(
    "--reward",
    metavar="MODULE:FUNCTION,...",
    help="Functions that give rewards; see docs/rewards.md.",
)
@click.option(
    "--reward_timeout_s",
    metavar="NUMBER",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Time limit of a function.  [default: 60]",
)
def score(run: str, output_dir: Path, reward: str | None, reward_timeout_s: float) -> None:
    """Give the conversations of RUN rewards by functions, in scores.jsonl.

    Records stay as they are. The same command resumes, and scores what is new.
    """
    places = [place for place in map(str.strip, (reward or "").split(",")) if place]
    if not places:
        raise click.UsageError("give --reward MODULE:FUNCTION")
    from api.stored_run import open_run
    from export.scoring.by_functions import score_by_functions

    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        scored = score_by_functions(stored.path, places, timeout_s=reward_timeout_s)
    path = stored.path / "scores.jsonl"
    show(f"{path}: {scored.scores:,} scores, {scored.failed:,} of them failed")
    sys.exit(1 if scored.failed else 0)
