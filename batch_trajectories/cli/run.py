"""run, estimate, check_tasks, check, import_hermes, which take the options of a run; import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show, show_json
from batch_trajectories.cli.command_line import EXAMPLES, LocalPath, RunCommand
from batch_trajectories.cli.exit_codes import end, errors_as_exit_codes, fail
from batch_trajectories.cli.shared import (
    Starting,
    live_option,
    make_plan_of,
    output_dir_option,
    run_dir_argument,
    show_run,
    start,
    starting_options,
    trust_option,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun

_FORMATS = ("atif", "openai", "sharegpt", "claude_code", "codex")
"""See `importing/readers/`, whose modules other commands do not need."""


@click.command(cls=RunCommand, epilog=EXAMPLES)
@starting_options
@live_option
@click.option("--dry_run", is_flag=True, help="Check everything and show what would run.")
def run(
    starting: Starting,
    dry_run: bool,
    **flags: Any,
) -> None:
    """Run all prompts of a dataset, or resume the run (the default command)."""
    with errors_as_exit_codes():
        plan = make_plan_of(starting, flags, will_start=not dry_run)
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
@live_option
@click.option(
    "--pilot",
    type=click.IntRange(min=2),
    metavar="N",
    default=30,
    help="Tasks to run, chosen at random; with --until_passed, prompts.  [default: 30]",
)
def estimate(
    starting: Starting,
    pilot: int,
    **flags: Any,
) -> None:
    """Run a random sample of the tasks, then forecast cost and time of the whole run.

    The sample is part of the run: the same command without `estimate` runs the rest.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.config.models import limits_of
    from batch_trajectories.engine.forecast import as_table, forecast, sample_tasks
    from batch_trajectories.export.statistics import by_model
    from batch_trajectories.records.files import replace_json

    with errors_as_exit_codes():
        plan = make_plan_of(starting, flags)
        config = plan.config
        by_prompt = config.until_passed is not None
        sample = sample_tasks(plan.scan, count=pilot, seed=config.seed, by_prompt=by_prompt)
        ended = start(plan, starting, only={key for keys in sample for key in keys})
        if ended.stopped_by is not None or ended.signal is not None:
            # The tasks that have ended are the quick ones: not a random sample.
            end(ended)
        limits = limits_of(config, plan.setups)
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
        fail("no task of the sample finished, so there is nothing to forecast", 1)
    show("\n".join([as_table(estimated), *by_model.as_text(models)]))
    end(ended)


@click.command(cls=RunCommand, name="import_hermes")
@click.argument("directory", type=LocalPath(path_type=Path, exists=True, file_okay=False))
@starting_options
def import_hermes(
    directory: Path,
    starting: Starting,
    **flags: Any,
) -> None:
    """Import a batch run of hermes-agent from DIRECTORY.

    The same command without `import_hermes DIRECTORY` then runs the rest.
    """
    from batch_trajectories.api.start import open_planned, write_results
    from batch_trajectories.importing.hermes import import_hermes

    with errors_as_exit_codes():
        plan = make_plan_of(starting, flags, will_start=False)
        accepted = starting.accept_config_change
        with open_planned(plan, fresh=starting.fresh, accept_config_change=accepted) as run_dir:
            imported = import_hermes(directory, plan.scan, run_dir)
            totals = write_results(run_dir.path, plan.scan, plan.config)
    show(imported.describe())
    show_run(run_dir.path, totals)


@click.command(name="import")
@click.argument(
    "sources", nargs=-1, required=True, metavar="SOURCE...", type=LocalPath(path_type=Path)
)
@click.option("--run_name", required=True, metavar="NAME", help="The run that gets their records.")
@output_dir_option
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    help="Their format.  [default: each file is looked at]",
)
def import_(sources: tuple[Path, ...], run_name: str, output_dir: Path, format: str | None) -> None:
    """Import conversations of other programs, from files, directories and the hub (hf:).

    They become records of the run NAME, for export, stats, report, score and compare. The same
    command goes on where it was stopped, and takes what has been added since. Exit code 1 if
    something could not be read: each is named.
    """
    from batch_trajectories.api.start import write_results
    from batch_trajectories.importing.importing import import_conversations

    with errors_as_exit_codes():
        imported, config, scan = import_conversations(sources, run_name, output_dir, format=format)
        totals = write_results(config.run_dir, scan, config)
    show(imported.describe())
    show_run(config.run_dir, totals)
    sys.exit(1 if imported.unreadable or imported.changed else 0)


@click.command(cls=RunCommand, name="check_tasks")
@starting_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    default=3,
    help="How often each check runs with the solution and without it.  [default: 3]",
)
def check_tasks(starting: Starting, repeats: int, **flags: Any) -> None:
    """Audit the tasks of a dataset, without a model: can each be passed, and only honestly?

    Takes the options of the run that is to use them. The same command resumes. Verdicts with
    evidence are in tasks.jsonl of the audit's directory; exit code 1 if a row is not sound.
    """
    from batch_trajectories.api.audit import audit
    from batch_trajectories.audit.audited import audited

    with errors_as_exit_codes():
        plan = make_plan_of(starting, flags, adapt=lambda config: audited(config, repeats=repeats))
        accepted = starting.accept_config_change
        ended = audit(plan, fresh=starting.fresh, accept_config_change=accepted)
    show(ended.as_table())
    if ended.reason is not None:
        fail(ended.reason, ended.exit_code)
    sys.exit(ended.exit_code)


_OF_CHECKS = (
    *("dataset_file", "rows", "columns", "images", "docker_image", "check_in", "check_expected"),
    *("check_network", "command_timeout_s", "env_from", "num_workers", "batch_size"),
    *("sandbox", "container_engine", "pull", "network"),
)
"""Options that `check` takes; all others are those of the run."""

_OF_ROWS = ("dataset_file", "rows", "columns")


@click.command(cls=RunCommand, only=_OF_CHECKS)
@run_dir_argument
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all that was left out.")
def check(run: str, output_dir: Path, as_json: bool, trust_run: bool, **flags: Any) -> None:
    """Judge the conversations of RUN again, with a changed or added check; no model is called.

    With --dataset_file or --rows by the checks of these rows, else by those of the run's own.
    Records stay as they are, verdicts are appended to scores.jsonl, and the last counts. The same
    command resumes; options that are not given are those of RUN.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.config.loading import load_config

    given = {name: value for name, value in flags.items() if value is not None}
    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        has_new_rows = any(name in given for name in _OF_ROWS)
        options = stored.identity["config"]
        if not stored.is_own:
            options = _of_received(stored, given, has_new_rows=has_new_rows, trust_run=trust_run)
        config = load_config(None, {**options, **given})

        from batch_trajectories.scoring.recheck import recheck

        ended = recheck(stored, config, has_new_rows=has_new_rows)
    if ended.reason is not None:
        fail(ended.reason, ended.exit_code)
    if as_json:
        show_json(ended.to_json())
    else:
        show(ended.as_table())
    sys.exit(ended.exit_code)


def _of_received(
    stored: StoredRun, given: dict[str, Any], *, has_new_rows: bool, trust_run: bool
) -> dict[str, Any]:
    """What `check` uses of the config of a run that was not started here, which it says."""
    from batch_trajectories.audit.audited import TAKEN
    from batch_trajectories.engine import origin

    options: dict[str, Any] = stored.identity["config"]
    used = {name: options[name] for name in TAKEN if name in options}
    if not has_new_rows:
        del used["dataset_file"]
    if trust_run:
        say(origin.describe_trust(stored.path, used))
        return options
    if unused := origin.describe_unused(stored.path, used, given=given):
        say(unused)
    # Its own rows are in the run directory, wherever they came from.
    own = {} if has_new_rows else {"dataset_file": options["dataset_file"]}
    return {**origin.harmless_options(options), **own}
