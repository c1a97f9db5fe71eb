"""The commands `run` and `estimate`."""

from __future__ import annotations

from typing import Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.cli.command_line import EXAMPLES, RunCommand
from batch_trajectories.cli.exit_codes import end, errors_as_exit_codes, fail
from batch_trajectories.cli.resuming import add_stored_options
from batch_trajectories.cli.shared import (
    Starting,
    plan_start,
    start,
    starting_options,
)


@click.command(cls=RunCommand, epilog=EXAMPLES)
@starting_options
@click.option(
    "--dry_run", is_flag=True, help="Check everything and show what would run, without a call."
)
def run(
    starting: Starting,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Run all prompts of a dataset, or resume the run (the default command)."""
    with errors_as_exit_codes():
        if starting.config_file is None:
            flags = add_stored_options(flags)
        plan = plan_start(starting, flags, will_start=not dry_run)
        if dry_run:
            from batch_trajectories.engine.plan import describe, name_bad_rows, warn
            from batch_trajectories.engine.preview import preview

            warn(plan, say)
            name_bad_rows(plan, say)
            show(describe(plan))
            accepted = starting.accept_config_change
            show(preview(plan, fresh=starting.fresh, accept_changes=accepted))
            return
        ended = start(plan, starting)
    end(ended)


@click.command(cls=RunCommand)
@starting_options
@click.option(
    "--pilot",
    type=click.IntRange(min=2),
    metavar="N",
    default=30,
    help="Run N tasks, chosen at random (with --until_passed: N prompts).  [default: 30]",
)
def estimate(
    starting: Starting,
    pilot: int,
    **flags: Any,
) -> None:
    """Run some random tasks as a pilot, then forecast cost and time of the whole run.

    The pilot is part of the run. The same command without `estimate` runs the rest.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.config.models import endpoint_limits
    from batch_trajectories.engine.forecast import as_table, forecast, sample_tasks
    from batch_trajectories.export.statistics import by_model
    from batch_trajectories.records.files import replace_json

    with errors_as_exit_codes():
        plan = plan_start(starting, flags)
        config = plan.config
        by_prompt = config.until_passed is not None
        sample = sample_tasks(plan.scan, count=pilot, seed=config.seed, by_prompt=by_prompt)
        ended = start(plan, starting, only={key for keys in sample for key in keys})
        if ended.stopped_by is not None or ended.signal is not None:
            # The tasks that have ended are the quick ones: not a random sample.
            end(ended)
        limits = endpoint_limits(config, plan.setups)
        estimated = forecast(
            config.run_dir,
            ended.totals,
            sample,
            conversations=config.conversations,
            limits=limits,
            seed=config.seed,
        )
        if estimated is not None:
            models = open_run(config.run_dir).by_model()
            made = estimated.to_json() | ({"models": models} if models else {})
            replace_json(config.run_dir / "estimate.json", made)
    if estimated is None:
        fail("no task of the pilot has ended, so there is nothing to forecast", 1)
    show("\n".join([as_table(estimated), *by_model.as_text(models)]))
    end(ended)
