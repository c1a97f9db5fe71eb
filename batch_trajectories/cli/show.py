"""The commands `show` and `compare`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batch_trajectories.basics.console import show, show_json
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import (
    output_dir_option,
    run_argument,
    run_dir_argument,
)

if TYPE_CHECKING:
    from batch_trajectories.api.stored_run import StoredRun


_MAX_LISTED = 40


_ID_CHARS = 100


@click.command("show")
@run_dir_argument
@click.argument("record_id", metavar="[ID]", required=False)
@click.option("--turn", type=click.IntRange(min=1), metavar="N", help="Only this turn.")
@click.option("--json", "as_json", is_flag=True, help="Print the record or turn as JSON.")
def show_one(
    run: str, record_id: str | None, output_dir: Path, turn: int | None, as_json: bool
) -> None:
    """Show a conversation of RUN.

    ID is its id, or the beginning of it. Without an ID, list the conversations that ended last.
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
    """Compare two runs, and list the tasks that ended differently.

    With one run, list the verdicts that `check` has changed, and why.
    """
    from batch_trajectories.api.stored_run import open_run

    if second is None:
        from batch_trajectories.report import rejudged

        with errors_as_exit_codes():
            changes = rejudged.compare_verdicts(open_run(first, output_dir))
        show_json(changes) if as_json else show(rejudged.as_text(changes))
        return
    from batch_trajectories.report import comparison

    with errors_as_exit_codes():
        difference = comparison.compare(open_run(first, output_dir), open_run(second, output_dir))
    show_json(difference) if as_json else show(comparison.as_text(difference))


def _show(stored: StoredRun, record_id: str, *, turn: int | None, as_json: bool) -> None:
    from batch_trajectories.report.conversation_text import ConversationText, turn_as_json

    record = stored.find(record_id)
    if as_json:
        show_json(record.as_dict() if turn is None else turn_as_json(record, turn))
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

    entries, total = stored.last_entries(None if as_json else _MAX_LISTED)
    if as_json:
        show_json([{"id": id, "status": e.status, "turns": e.turns} for id, e in entries])
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
