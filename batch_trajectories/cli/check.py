"""The commands `check_tasks` and `check`, which take the options of a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show, show_json
from batch_trajectories.cli.command_line import RunCommand
from batch_trajectories.cli.exit_codes import errors_as_exit_codes, fail
from batch_trajectories.cli.shared import (
    Starting,
    plan_start,
    run_dir_argument,
    starting_options,
    trust_option,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


_RECHECK_OPTIONS = (
    "dataset_file",
    "rows",
    "columns",
    "images",
    "docker_image",
    "check_in",
    "check_expected",
    "expected_match",
    "check_network",
    "command_timeout_s",
    "env_from",
    "num_workers",
    "batch_size",
    "sandbox",
    "container_engine",
    "pull",
    "registry",
    "network",
)
"""Options that `check` takes; all others are those of the run."""


_ROW_OPTIONS = ("dataset_file", "rows", "columns")


@click.command(cls=RunCommand, name="check_tasks")
@starting_options
@click.option(
    "--repeats",
    type=click.IntRange(min=1, max=1000),
    metavar="N",
    default=3,
    help="Run each check N times with the solution, and N times without.  [default: 3]",
)
def check_tasks(starting: Starting, repeats: int, **flags: Any) -> None:
    """Audit the tasks of a dataset, without a model: can each be passed, and only honestly?

    Give the options of the run that will use these tasks. The same command resumes. Verdicts with
    evidence are in tasks.jsonl of the audit's directory. The exit code is 1 if a row is not sound.
    """
    from batch_trajectories.api.audit import audit
    from batch_trajectories.audit.audited import make_audit_config

    with errors_as_exit_codes():
        plan = plan_start(
            starting, flags, adapt=lambda config: make_audit_config(config, repeats=repeats)
        )
        accepted = starting.accept_config_change
        ended = audit(plan, fresh=starting.fresh, accept_config_change=accepted)
    show(ended.as_table())
    if ended.reason is not None:
        fail(ended.reason, ended.exit_code)
    sys.exit(ended.exit_code)


@click.command(cls=RunCommand, only=_RECHECK_OPTIONS)
@run_dir_argument
@trust_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all that was left out.")
def check(run: str, output_dir: Path, as_json: bool, trust_run: bool, **flags: Any) -> None:
    """Judge the conversations of RUN again, with a changed or added check. No model is called.

    --dataset_file or --rows name rows with the new checks. Without them, the rows of the run count.
    Records stay as they are. Verdicts are appended to scores.jsonl, and the last one counts. The
    same command resumes. Options that you leave out are those of RUN. With --expected_match,
    answers are compared in another way than in RUN.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.config.loading import load_config

    given = {name: value for name, value in flags.items() if value is not None}
    with errors_as_exit_codes():
        stored = open_run(run, output_dir, writes=True)
        has_new_rows = any(name in given for name in _ROW_OPTIONS)
        options = stored.identity["config"]
        if not stored.is_own:
            options = _received_options(
                stored, given, has_new_rows=has_new_rows, trust_run=trust_run
            )
        config = load_config(None, {**options, **given})

        from batch_trajectories.scoring.recheck import recheck

        ended = recheck(
            stored, config, has_new_rows=has_new_rows, match=given.get("expected_match")
        )
    if ended.reason is not None:
        fail(ended.reason, ended.exit_code)
    if as_json:
        show_json(ended.to_json())
    else:
        show(ended.as_table())
    sys.exit(ended.exit_code)


def _received_options(
    stored: StoredRun, given: dict[str, Any], *, has_new_rows: bool, trust_run: bool
) -> dict[str, Any]:
    """The options of a received run's config that `check` uses, which it prints."""
    from batch_trajectories.audit.audited import SHARED_OPTIONS
    from batch_trajectories.engine import origin

    options: dict[str, Any] = stored.identity["config"]
    used = {name: options[name] for name in SHARED_OPTIONS if name in options}
    if not has_new_rows:
        del used["dataset_file"]
    if trust_run:
        say(origin.describe_trust(stored.path, used, given=given))
        return options
    if unused := origin.describe_unused(stored.path, used, given=given):
        say(unused)
    # Its own rows are in the run directory, wherever they came from.
    own = {} if has_new_rows else {"dataset_file": options["dataset_file"]}
    return {**origin.harmless_options(options, given=given), **own}
