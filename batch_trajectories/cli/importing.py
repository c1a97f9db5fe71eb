"""The commands `import` and `import_hermes`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import LocalPath, RunCommand
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import (
    Starting,
    make_plan_of,
    output_dir_option,
    show_run,
    starting_options,
)

if TYPE_CHECKING:
    pass


_FORMATS = ("atif", "openai", "sharegpt", "claude_code", "codex")
"""See `importing/readers/`, whose modules other commands do not need."""


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
@click.option(
    "--metadata",
    metavar="NAME,...",
    help="Columns of rows that are no part of a conversation; short ones can be filtered by.",
)
def import_(
    sources: tuple[Path, ...],
    run_name: str,
    output_dir: Path,
    format: str | None,
    metadata: str | None,
) -> None:
    """Import conversations of other programs, from files, directories and the hub (hf:).

    They become records of the run NAME, for export, stats, report, score and compare. The same
    command goes on where it was stopped, and takes what has been added since. Exit code 1 if
    something could not be read: each is named.
    """
    from batch_trajectories.api.results import write_results
    from batch_trajectories.importing.importing import import_conversations

    with errors_as_exit_codes():
        columns = [name.strip() for name in (metadata or "").split(",") if name.strip()]
        imported, config, scan = import_conversations(
            sources, run_name, output_dir, format=format, metadata=columns
        )
        totals = write_results(config.run_dir, scan, config)
    show(imported.describe())
    show_run(config.run_dir, totals)
    sys.exit(1 if imported.unreadable or imported.changed else 0)


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
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.start import open_planned_run
    from batch_trajectories.importing.hermes import import_hermes

    with errors_as_exit_codes():
        plan = make_plan_of(starting, flags, will_start=False)
        accepted = starting.accept_config_change
        with open_planned_run(plan, fresh=starting.fresh, accept_config_change=accepted) as run_dir:
            imported = import_hermes(directory, plan.scan, run_dir)
            totals = write_results(run_dir.path, plan.scan, plan.config)
    show(imported.describe())
    show_run(run_dir.path, totals)
