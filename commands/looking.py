"""Commands for looking at runs: report, show, compare."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from batch.console import show
from commands.ending import errors_as_exit_codes
from commands.shared import output_dir_option, path_of, run_argument, run_dir_argument


@click.command()
@run_dir_argument
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="HTML file to write.  [default: report.html in the run directory]",
)
def report(run: str, output_dir: Path, output: Path | None) -> None:
    """Write a page to look at RUN (a name or a directory) in a browser, also while it runs."""
    with errors_as_exit_codes():
        _report(path_of(run, output_dir), output)


@click.command("show")
@run_dir_argument
@click.argument("record_id", metavar="ID")
@click.option("--turn", type=click.IntRange(min=1), metavar="N", help="Only this turn.")
@click.option("--json", "as_json", is_flag=True, help="Print the record, or turn, as JSON.")
def show_one(run: str, record_id: str, output_dir: Path, turn: int | None, as_json: bool) -> None:
    """Show one conversation of RUN by its id, or by a beginning that no other id has."""
    with errors_as_exit_codes():
        _show(path_of(run, output_dir), record_id, turn=turn, as_json=as_json)


@click.command()
@run_argument("first")
@run_argument("second")
@output_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all that changed.")
def compare(first: str, second: str, output_dir: Path, as_json: bool) -> None:
    """Show two runs (names or directories) side by side, and which tasks ended differently."""
    with errors_as_exit_codes():
        _compare(path_of(first, output_dir), path_of(second, output_dir), as_json=as_json)


def _report(run_dir: Path, output: Path | None) -> None:
    from report.writer import write_report

    written = write_report(run_dir, output)
    beside = f", with its data in {written.files}" if written.files else ""
    show(f"{written.path}: {written.trajectories:,} trajectories{beside}")


def _show(run_dir: Path, record_id: str, *, turn: int | None, as_json: bool) -> None:
    from report.conversation_text import Conversation, turn_as_json
    from report.stored import find_record

    record = find_record(run_dir, record_id)
    if as_json:
        show(_json(record if turn is None else turn_as_json(record, turn)))
        return
    is_terminal = sys.stdout.isatty()
    colours = is_terminal and not os.environ.get("NO_COLOR")
    text = "\n".join(Conversation(record, colours=colours).text(turn=turn))
    if is_terminal:
        click.echo_via_pager(text + "\n")
    else:
        show(text)


def _compare(first: Path, second: Path, *, as_json: bool) -> None:
    from report import compared

    found = compared.compare(first, second)
    show(_json(found) if as_json else compared.as_text(found))


def _json(value: Any) -> str:
    import orjson

    return orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()
