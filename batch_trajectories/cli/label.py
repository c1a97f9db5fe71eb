"""The command `label`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.exit_codes import errors_as_exit_codes
from batch_trajectories.cli.shared import run_dir_argument
from batch_trajectories.records.names import LABELS_FILE


@click.command()
@run_dir_argument
@click.argument("record_id", metavar="ID")
@click.option(
    "--verdict",
    type=click.Choice(["keep", "reject", "fix", "none"]),
    help="Your decision. none: take it back.",
)
@click.option("--no_loss", metavar="N,...", help="Turns that carry no loss. none: take this back.")
@click.option("--note", metavar="TEXT", help="A note. none: take it back.")
@click.option(
    "--over", metavar="ID,...", help="Samples of the same prompt that are worse than this one."
)
@click.option("--who", metavar="NAME", help="The reviewer.  [default: your user name]")
def label(
    run: str,
    record_id: str,
    output_dir: Path,
    no_loss: str | None,
    over: str | None,
    who: str | None,
    **said: str | None,
) -> None:
    """Write your decision about a conversation of RUN to labels.jsonl.

    ID is the id of the conversation, or its beginning. Recipes, masks, dpo, stats and compare read
    the labels. Of each reviewer the last line counts.
    """
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.engine.control import user_name
    from batch_trajectories.records.scores import append_label, label_change, score_key

    with errors_as_exit_codes():
        if who is not None and not who.strip():
            raise ConfigError("--who: give a name, or leave it out for your user name")
        stored = open_run(run, output_dir, writes=True)
        record = stored.find(record_id)
        given: dict[str, Any] = {
            name: None if text == "none" else text
            for name, text in said.items()
            if text is not None
        }
        if no_loss is not None:
            numbers = [part.strip() for part in no_loss.split(",") if no_loss != "none"]
            if not all(number.isdecimal() for number in numbers):
                raise ConfigError(f"--no_loss: give numbers of turns such as 1,3, not {no_loss!r}")
            given["no_loss"] = [int(number) for number in numbers] or None
            if late := [number for number in numbers if int(number) > len(record.turns)]:
                turns = plural(len(record.turns), "turn")
                raise ConfigError(f"--no_loss: {record.id} has {turns}, and no turn {late[0]}")
        if over is not None:
            others = [
                stored.find(part) for part in dict.fromkeys(over.split(",")) if over != "none"
            ]
            if strange := [one.id for one in others if one.prompt_id != record.prompt_id]:
                raise ConfigError(f"--over: {strange[0]} is no sample of {record.prompt_id}")
            given["over"] = {one.id: score_key(one) for one in others} or None
        try:
            change = label_change(given)
        except ValueError as error:
            raise ConfigError(f"{record.id}: {error}") from error
        append_label(stored.path, score_key(record), record.id, who or user_name(), change)
    show(f"{stored.path / LABELS_FILE}: {record.id}")
