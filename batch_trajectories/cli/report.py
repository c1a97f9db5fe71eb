"""The commands `report` and `stats`."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batch_trajectories.basics.console import show, show_json
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.shared import (
    run_dir_argument,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


@click.command()
@run_dir_argument
@click.option(
    "--output",
    type=LocalPath(path_type=Path),
    help="HTML file to write.  [default: report.html in the run directory]",
)
def report(run: str, output_dir: Path, output: Path | None) -> None:
    """Write RUN as a page for the browser, during the run or afterwards."""
    from batch_trajectories.api.stored_run import open_run

    with errors_as_exit_codes():
        _report(open_run(run, output_dir), output)


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--format", type=click.Choice(["text", "json"]), help="json: the same as --json.")
@click.option(
    "--fail_on",
    metavar="NAMES",
    help="Exit with 6 if one of these health checks found a problem (names with commas, or all).",
)
def stats(
    run: str, output_dir: Path, as_json: bool, format: str | None, fail_on: str | None
) -> None:
    """Show statistics of RUN: from rows to training rows, problems, turns, tokens, tools."""
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.basics.console import WARNING
    from batch_trajectories.export.statistics.funnel import format_funnel
    from batch_trajectories.export.statistics.run import as_text

    names = _health_checks(fail_on)
    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        statistics = stored.statistics()
        distribution = stored.identity["meaning"].get("distribution") or {}
        funnel, trouble, signs = stored.funnel_if_known()
        if as_json or format == "json":
            told = [sign.to_json() for sign in signs]
            show_json({**statistics, "funnel": funnel, "signs": told})
        else:
            lines = [f"from rows to training rows: {trouble}"] if trouble else []
            lines += [f"{WARNING}{sign.text}" for sign in signs]
            lines += format_funnel(funnel) if funnel else []
            show("\n".join([*lines, "", *as_text(statistics, distribution)]))
    if any(result["is_problem"] and result["name"] in names for result in statistics["health"]):
        sys.exit(PROBLEMS)


def _health_checks(fail_on: str | None) -> Collection[str]:
    from batch_trajectories.basics.validation import did_you_mean
    from batch_trajectories.export.statistics.health import HEALTH_CHECKS

    if fail_on == "all":
        return HEALTH_CHECKS
    names = [name.strip() for name in fail_on.split(",")] if fail_on else []
    for name in names:
        if name not in HEALTH_CHECKS:
            hint = did_you_mean(name, HEALTH_CHECKS) or f"known: all, {', '.join(HEALTH_CHECKS)}"
            raise click.UsageError(f"--fail_on: no health check is called {name!r}; {hint}")
    return names


def _report(stored: StoredRun, output: Path | None) -> None:
    from batch_trajectories.basics.text import plural
    from batch_trajectories.report.page.writer import write_report

    written = write_report(stored, output)
    beside = f", with its data in {written.files}" if written.files else ""
    what = "task" if stored.identity["config"].get("audit") else "conversation"
    show(f"{written.path}: {plural(written.rows, what)}{beside}")
