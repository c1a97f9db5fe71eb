"""The command `import`, and its former name for runs of hermes-agent."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from batch_trajectories.basics.console import say, show
from batch_trajectories.cli.command_line import LocalPath, RunCommand
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import Starting, plan_start, show_run, starting_options

_HERMES = "hermes"
"""The format of a batch run of hermes-agent, which continues as a run of a dataset."""

_FORMATS = ("atif", "openai", "sharegpt", "claude_code", "codex", _HERMES)
"""The formats of `importing/readers/` and `importing/hermes.py`; other commands load none."""

_COMMON_OPTIONS = ("sources", "format", "metadata", "run_name", "output_dir")
"""Parameters of the command that do not need `--format=hermes`."""


@click.command(cls=RunCommand, name="import")
@click.argument(
    "sources", nargs=-1, required=True, metavar="SOURCE...", type=LocalPath(path_type=Path)
)
@click.option(
    "--format",
    type=click.Choice(_FORMATS),
    help="Format of the sources.  [default: found out for each file]",
)
@click.option(
    "--metadata",
    metavar="NAME,...",
    help="Columns to keep beside the conversations. You can filter by short ones.",
)
@starting_options
@click.pass_context
def import_(
    ctx: click.Context,
    /,
    sources: tuple[Path, ...],
    format: str | None,
    metadata: str | None,
    starting: Starting,
    **flags: Any,
) -> None:
    """Import conversations of other programs, from files, directories and the hub (hf:).

    They become records of the run --run_name, for export, stats, report, score and compare. The
    same command continues after a stop, and adds what is new. It names whatever it could not read,
    and then the exit code is 1.

    With --format=hermes, SOURCE is the directory of one batch run of hermes-agent. Give the options
    of the run that will continue it. The same options without `import` then run the rest.
    """
    columns = [name.strip() for name in (metadata or "").split(",") if name.strip()]
    if format == _HERMES:
        if len(sources) != 1 or columns:
            raise click.UsageError("--format=hermes takes one SOURCE, and no --metadata")
        _import_hermes(sources[0], starting, flags)
        return
    for name in ctx.params:
        is_given = ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _COMMON_OPTIONS:
            raise click.UsageError(f"--{name} needs --format=hermes")
    if flags["run_name"] is None:
        raise click.UsageError("Missing option '--run_name'.")
    from batch_trajectories.api.results import write_results
    from batch_trajectories.importing.importing import import_conversations

    output_dir = Path(flags["output_dir"] or "trajectories")
    with errors_as_exit_codes():
        imported, config, scan = import_conversations(
            sources, flags["run_name"], output_dir, format=format, metadata=columns
        )
        totals = write_results(config.run_dir, scan, config)
    show(imported.describe())
    show_run(config.run_dir, totals)
    sys.exit(1 if imported.unreadable or imported.changed else 0)


@click.command(cls=RunCommand, name="import_hermes", hidden=True)
@click.argument("directory", type=LocalPath(path_type=Path))
@starting_options
def import_hermes(directory: Path, starting: Starting, **flags: Any) -> None:
    """Import a batch run of hermes-agent: the former name of `import --format=hermes`."""
    say(f"`import_hermes {directory}` is now `import {directory} --format=hermes`, same options")
    _import_hermes(directory, starting, flags)


def _import_hermes(directory: Path, starting: Starting, flags: dict[str, Any]) -> None:
    from batch_trajectories.api.results import write_results
    from batch_trajectories.api.start import open_planned_run
    from batch_trajectories.importing.hermes import import_hermes

    with errors_as_exit_codes():
        plan = plan_start(starting, flags, will_start=False)
        accepted = starting.accept_config_change
        with open_planned_run(plan, fresh=starting.fresh, accept_config_change=accepted) as run_dir:
            imported = import_hermes(directory, plan.scan, run_dir)
            totals = write_results(run_dir.path, plan.scan, plan.config)
    show(imported.describe())
    show_run(run_dir.path, totals)
