"""The command `look`: what a dataset holds, before anything is run."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import click

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import PlacePath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes

_EXAMINED = 1000


_ROW_CHARS = 1500


_DEFAULT_ROWS = 2


_MAX_LISTED_REASONS = 20


@click.command()
@click.argument("source", type=PlacePath(path_type=Path))
@click.option("--columns", metavar="COLUMN=SOURCE_COLUMN,...", help="As for `run`.")
@click.option(
    "--rows",
    "given",
    multiple=True,
    metavar="KIND|N",
    help="A kind of rows as for `run`, or how many rows to print.  [default: 2]",
)
def look(source: Path, columns: str | None, given: tuple[str, ...]) -> None:
    """Show the first rows of SOURCE, its columns, and how a run would use them.

    SOURCE is what --dataset_file takes: a file, a directory, a URL, or hf:ORG/NAME.
    """
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.config.option_types import parse_columns
    from batch_trajectories.dataset.kept_dataset import (
        ColumnRenamer,
        describe_left_out,
        rows_of_source,
    )
    from batch_trajectories.dataset.rows_file import load_rows_file
    from batch_trajectories.dataset.source import parse_source

    shown, kind = _shown_and_kind(given)
    with errors_as_exit_codes():
        try:
            names = parse_columns(columns or "")
        except ValueError as error:
            raise ConfigError(f"--columns: {error}") from error
        source_kind = parse_source(source)
        if source_kind.tasks and kind is None:
            kind = "harbor"
        renaming = ColumnRenamer(names, None if kind is None else load_rows_file(kind))
        left_out: set[str] = set()
        rows = islice(rows_of_source(source_kind, left_out), _EXAMINED)
        lines = [line for line in map(renaming.line, rows) if line.strip()]
        renaming.check(str(source))
        description = _describe_row(source, lines, shown=shown, columns=columns, kind=kind)
        show(
            "\n".join(
                [description, *([describe_left_out(str(source), left_out)] if left_out else [])]
            )
        )


def _shown_and_kind(given: tuple[str, ...]) -> tuple[int, str | None]:
    """The number of rows to print and the kind of rows; `--rows` takes both."""
    numbers = [int(text) for text in given if text.isdecimal()]
    kinds = [text for text in given if not text.isdecimal()]
    if len(numbers) > 1 or len(kinds) > 1:
        raise click.UsageError("--rows takes one number and one kind of rows")
    return numbers[0] if numbers else _DEFAULT_ROWS, kinds[0] if kinds else None


def _describe_row(
    source: Path, lines: list[bytes], *, shown: int, columns: str | None, kind: str | None
) -> str:
    from agent.options import AgentOptions, SimulatedUser
    from batch_trajectories.basics import exact_json
    from batch_trajectories.basics.text import clip, first_few, plural
    from batch_trajectories.dataset.lines import columns_in
    from batch_trajectories.dataset.row import RowRules
    from batch_trajectories.dataset.row_conversation import (
        USER_COLUMN,
        columns_beside,
        json_type,
        usual_prompt,
    )

    rules = RowRules()
    if kind is not None:
        rules = RowRules(with_setup=True, image="allowed", inside=True, check_in="fresh")
    with_user = replace(rules, options=AgentOptions(simulated_user=SimulatedUser()))
    users = 0
    kinds: dict[str, Counter[str]] = {}
    reasons = Counter[str]()
    first_places: dict[str, str] = {}
    proposed = Counter[str]()
    beside = Counter[tuple[str, str]]()
    repeated = []
    printed = []
    for number, line in enumerate(lines, start=1):
        try:
            row = columns_in(line)
        except ValueError as error:
            reasons[f"row {number}: {error}"] += 1
            continue
        for name, value in row.items():
            kinds.setdefault(name, Counter())[json_type(value)] += 1
        try:
            if row.get(USER_COLUMN) is None:
                rules.read(row)
            else:
                with_user.read(row)
                users += 1
        except ValueError as error:
            place, why = _split_place(str(error))
            reasons[why] += 1
            first_places.setdefault(why, place)
        if (twice := exact_json.repeated_key_path(line)) is not None:
            repeated.append(f"row {number}, `{twice}`")
        usual = "prompt" if "prompt" in row else usual_prompt(row)
        if usual and usual != "prompt":
            proposed[usual] += 1
        if usual and kind is None:
            beside.update((usual, name) for name in columns_beside(row, usual))
        if number <= shown:
            text = exact_json.dumps(row).decode()
            printed.append(f"row {number}: {clip(text, max_chars=_ROW_CHARS)}")
    usable = len(lines) - reasons.total()
    first = "the first " if len(lines) == _EXAMINED else ""
    description = [f"{source}: {usable:,} of {first}{plural(len(lines), 'row')} can be used"]
    width = max(map(len, kinds), default=0)
    for name, uses in kinds.items():
        rows = uses.total()
        share = "" if rows == len(lines) else f" in {plural(rows, 'row')}"
        description.append(
            f"  {name:<{width}}  {' or '.join(uses)}{share}; {_describe_use(name, kinds)}"
        )
    for reason, count in reasons.most_common(_MAX_LISTED_REASONS):
        place = first_places.get(reason, "")
        description.append(f"{plural(count, 'row')}: {reason}{place and f' (the first: {place})'}")
    if repeated:
        places = first_few(repeated, separator="; ")
        description.append(
            f"{plural(len(repeated), 'row')} with a key twice in one object, whose last value "
            f"counts: {places}"
        )
    description += printed
    for (prompt, name), count in beside.items():
        template = f"{{{{{prompt}}}}}\\n\\n{{{{{name}}}}}"
        description.append(
            f"Does `{name}` belong to the prompt? The model does not see it "
            f"({plural(count, 'row')}). A rows file puts both together (--rows=FILE, "
            f'docs/data.md): prompt: "{template}"'
        )
    if proposed and not columns:
        columns = f"prompt={proposed.most_common(1)[0][0]}"
    elif not usable:
        return "\n".join(description)
    options = {
        "--dataset_file": str(source),
        "--rows": kind,
        "--columns": columns,
        "--simulated_user": "{}" if users else None,
    }
    given = (f"{name}={shlex.quote(value)}" for name, value in options.items() if value)
    description.append(f"To run it: {' '.join(given)}")
    return "\n".join(description)


def _split_place(reason: str) -> tuple[str, str]:
    """Where in a task directory a row cannot be used, "" if it is not from one; and why."""
    match = re.match(r"(\S+/task\.toml(?::\d+)?): (.*)", reason, re.DOTALL)
    return (match[1], match[2]) if match else ("", reason)


def _describe_use(name: str, columns: dict[str, Any]) -> str:
    """Describe what a run does with a column, given the columns of the dataset."""
    from batch_trajectories.dataset.columns import column_names
    from batch_trajectories.dataset.row import MODEL_COLUMN
    from batch_trajectories.dataset.row_conversation import (
        CHAT_COLUMNS,
        FORK_COLUMN,
        REPLIES_COLUMN,
        TURNS_COLUMN,
        USER_COLUMN,
    )
    from batch_trajectories.dataset.row_workspace import (
        IMAGE_COLUMNS,
        HistoryColumns,
        InsideColumns,
    )
    from batch_trajectories.dataset.scan import ID_COLUMNS, TELLTALE_COLUMNS
    from batch_trajectories.records.checks import expected_column

    own_id = next((column for column in ID_COLUMNS if column in columns), None)
    if name == "prompt":
        return "the prompt"
    if name in CHAT_COLUMNS and "prompt" not in columns:
        return "the prompt: its system message and first user message"
    if name == own_id:
        return "the id of the row"
    uses = {
        "agent_options": "options of its conversation",
        expected_column(columns): "compared with the answer, with --check_expected",
        REPLIES_COLUMN: "answers of the user, with --awaiting_input",
        TURNS_COLUMN: "further messages of the user",
        USER_COLUMN: "the simulated user's part, with --simulated_user",
        "script": "turns of the scripted model",
        FORK_COLUMN: "the beginning of the conversation, with --forks",
        MODEL_COLUMN: "one of --models",
        **dict.fromkeys(
            column_names(InsideColumns), "how to work in the image, with --workspace=image"
        ),
        **dict.fromkeys(IMAGE_COLUMNS, "the image, with --sandbox=docker"),
        **dict.fromkeys(TELLTALE_COLUMNS, "prepares or judges the workspace, with --row_setup"),
        **dict.fromkeys(
            column_names(HistoryColumns), "the history that stays, with --workspace=image"
        ),
    }
    return uses.get(name, "kept with the record")
