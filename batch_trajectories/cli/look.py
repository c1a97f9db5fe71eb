"""Commands that show runs: report, view, show, compare, stats."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import PROBLEMS, errors_as_exit_codes
from batch_trajectories.cli.shared import output_dir_option, run_argument, run_dir_argument

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun

_LISTED = 40
_ID_CHARS = 100


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
@click.argument("places", nargs=-1, metavar="[PLACE]...")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="[default: a free one]")
@click.option("--host", default="127.0.0.1", help="Address to listen on.  [default: 127.0.0.1]")
@click.option(
    "--password_env",
    metavar="NAME",
    help="Environment variable with a password, which any other HOST needs.",
)
@click.option("--who", metavar="NAME", help="The reviewer.  [default: your user name]")
def view(
    places: tuple[str, ...], port: int, host: str, password_env: str | None, who: str | None
) -> None:
    """Serve a page with all runs of PLACEs, alive, to look at, label and steer them.

    A PLACE is a directory of runs (default: trajectories), a run, or the URL of a mirrored run.
    """
    from batch_trajectories.engine.control import user_name
    from batch_trajectories.view.serving import password_of, serve

    ended = "view has ended; the runs are as they were"
    with errors_as_exit_codes(on_interrupt=ended):
        password = password_of(host, password_env)
        serve(
            list(places) or ["trajectories"],
            host=host,
            port=port,
            password=password,
            who=who or user_name(),
        )


@click.command("show")
@run_dir_argument
@click.argument("record_id", metavar="[ID]", required=False)
@click.option("--turn", type=click.IntRange(min=1), metavar="N", help="Only this turn.")
@click.option("--json", "as_json", is_flag=True, help="Print the record or turn as JSON.")
def show_one(
    run: str, record_id: str | None, output_dir: Path, turn: int | None, as_json: bool
) -> None:
    """Show the conversation of RUN with this id or unique id prefix.

    Without an ID, list the conversations that ended last.
    """
    if record_id is None and turn is not None:
        raise click.UsageError("--turn needs the ID of a conversation")
    from batch_trajectories.api.stored_run import open_run

    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        if record_id is None:
            _list(stored, as_json=as_json)
        else:
            _show(stored, record_id, turn=turn, as_json=as_json)


@click.command()
@run_argument("first")
@run_argument("second", required=False)
@output_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all differences.")
def compare(first: str, second: str | None, output_dir: Path, as_json: bool) -> None:
    """Compare two runs and list the tasks that ended differently.

    Of one run, list the verdicts that `check` changed, and why.
    """
    from batch_trajectories.api.stored_run import open_run

    if second is None:
        from batch_trajectories.report import rejudged

        with errors_as_exit_codes():
            changes = rejudged.changes_in(open_run(first, output_dir))
        show(_json(changes) if as_json else rejudged.as_text(changes))
        return
    from batch_trajectories.report import comparison

    with errors_as_exit_codes():
        difference = comparison.compare(open_run(first, output_dir), open_run(second, output_dir))
    show(_json(difference) if as_json else comparison.as_text(difference))


@click.command()
@run_dir_argument
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--format", type=click.Choice(["text", "json"]), help="json: the same as --json.")
@click.option(
    "--fail_on",
    metavar="NAMES",
    help="Exit 6 if a health check with one of these names (comma-separated; all) found a problem.",
)
def stats(
    run: str, output_dir: Path, as_json: bool, format: str | None, fail_on: str | None
) -> None:
    """Show statistics of RUN: from rows to training rows, problems, turns, tokens, tools."""
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.export.statistics.funnel import funnel_as_text
    from batch_trajectories.export.statistics.run import as_text

    names = _health_checks(fail_on)
    with errors_as_exit_codes():
        stored = open_run(run, output_dir)
        statistics = stored.statistics()
        distribution = stored.identity["meaning"].get("distribution") or {}
        funnel, trouble = stored.funnel_if_known()
        if as_json or format == "json":
            show(_json({**statistics, "funnel": funnel}))
        else:
            lines = [f"from rows to training rows: {trouble}"] if trouble else []
            lines += funnel_as_text(funnel) if funnel else []
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


def _show(stored: StoredRun, record_id: str, *, turn: int | None, as_json: bool) -> None:
    from batch_trajectories.report.conversation_text import ConversationText, turn_as_json

    record = stored.find(record_id)
    if as_json:
        show(_json(record.as_dict() if turn is None else turn_as_json(record, turn)))
        return
    is_terminal = sys.stdout.isatty()
    colours = is_terminal and not os.environ.get("NO_COLOR")
    text = "\n".join(ConversationText(record, colours=colours).text(turn=turn))
    if is_terminal:
        click.echo_via_pager(text + "\n")
    else:
        show(text)


def _list(stored: StoredRun, *, as_json: bool) -> None:
    from batch_trajectories.basics.text import plural
    from batch_trajectories.report.formatting import count, one_line

    entries, total = stored.last_entries(None if as_json else _LISTED)
    if as_json:
        show(_json([{"id": id, "status": e.status, "turns": e.turns} for id, e in entries]))
        return
    ids = [one_line(id, _ID_CHARS) or f"(unreadable, byte {entry.offset})" for id, entry in entries]
    width = max(map(len, ids), default=0)
    lines = [
        f"{id:<{width}}  {entry.status}, {plural(entry.turns, 'turn')}"
        for id, (_, entry) in zip(ids, entries, strict=True)
    ]
    head = f"{stored.path}: {plural(total, 'finished conversation')}"
    lines.insert(0, f"{head}, latest first" if total > 1 else head)
    if total > len(entries):
        lines.append(f"and {count(total - len(entries))} more; --json lists all")
    show("\n".join(lines))


def _json(value: Any) -> str:
    import orjson

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
