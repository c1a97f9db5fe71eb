"""The command `look`: what a dataset holds, before anything is run."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec.structs import replace

from batch_trajectories.basics.console import show
from batch_trajectories.cli.command_line import PlacePath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes

if TYPE_CHECKING:
    from batch_trajectories.dataset.row import RowRules

_EXAMINED = 1000
"""Maximum number of rows that are examined."""
_ROW_CHARS = 1500
"""Maximum characters of a printed row."""
_DEFAULT_ROWS = 2
"""Number of rows to print."""
_MAX_LISTED_REASONS = 20
_KEPT = "kept with the record"
"""The use of a column that has no meaning for a run."""


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
    from batch_trajectories.dataset.arrow_rows import Omissions
    from batch_trajectories.dataset.kept_dataset import (
        ColumnRenamer,
        rows_of_source,
    )
    from batch_trajectories.dataset.rows_file import load_rows_file
    from batch_trajectories.dataset.source import parse_source

    shown, kind = _parse_rows_option(given)
    with errors_as_exit_codes():
        try:
            names = parse_columns(columns or "")
        except ValueError as error:
            raise ConfigError(f"--columns: {error}") from error
        source_kind = parse_source(source)
        if source_kind.tasks and kind is None:
            kind = "harbor"
        renaming = ColumnRenamer(names, None if kind is None else load_rows_file(kind))
        left_out = Omissions()
        rows = islice(rows_of_source(source_kind, left_out), _EXAMINED)
        lines = [line for line in map(renaming.line, rows) if line.strip()]
        renaming.check(str(source))
        description = _describe_rows(source, lines, shown=shown, columns=columns, kind=kind)
        show("\n".join([description, *left_out.describe(str(source))]))


def _parse_rows_option(given: tuple[str, ...]) -> tuple[int, str | None]:
    """The number of rows to print and the kind of rows; `--rows` takes both."""
    numbers = [int(text) for text in given if text.isdecimal()]
    kinds = [text for text in given if not text.isdecimal()]
    if len(numbers) > 1 or len(kinds) > 1:
        raise click.UsageError("--rows takes one number and one kind of rows")
    return numbers[0] if numbers else _DEFAULT_ROWS, kinds[0] if kinds else None


@dataclass
class _Findings:
    """The findings in the first rows of a source."""

    kind: str | None
    """The kind of rows that the user named or the source has; None: plain rows."""
    rows: int = 0
    rows_with_user: int = 0
    """The number of rows that have a simulated user."""
    types: dict[str, Counter[str]] = field(default_factory=dict)
    """The JSON types of the values of each column."""
    reasons: Counter[str] = field(default_factory=Counter)
    """The reasons why rows cannot be used."""
    first_places: dict[str, str] = field(default_factory=dict)
    """The first place in a task directory for each reason."""
    proposed: dict[str, Counter[str]] = field(default_factory=dict)
    """Columns that seem to be the prompt or the expected answer under another name, by the name
    that they should have."""
    beside_prompt: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Pairs of the column of the prompt and one that may belong to it."""
    repeated_keys: list[str] = field(default_factory=list)
    """The rows in which an object has a key twice, with the key."""

    def add(self, line: bytes) -> dict[str, Any] | None:
        """Examine a row; return its columns, None if it has none."""
        from batch_trajectories.basics import exact_json
        from batch_trajectories.dataset.lines import columns_in
        from batch_trajectories.dataset.row_conversation import (
            json_type,
            other_prompt_columns,
            propose_expected,
            propose_prompt,
        )

        self.rows += 1
        try:
            row = columns_in(line)
        except ValueError as error:
            self.reasons[f"row {self.rows}: {error}"] += 1
            return None
        for name, value in row.items():
            self.types.setdefault(name, Counter())[json_type(value)] += 1
        self._try_to_use(row)
        if (key := exact_json.repeated_key_path(line)) is not None:
            self.repeated_keys.append(f"row {self.rows}, `{key}`")
        renaming = propose_prompt(row)
        prompt = "prompt" if "prompt" in row else renaming.get("prompt")
        if self.kind is None:
            renaming |= propose_expected(row)
        for new, old in renaming.items():
            self.proposed.setdefault(new, Counter())[old] += 1
        if prompt and self.kind is None:
            self.beside_prompt.update((prompt, name) for name in other_prompt_columns(row, prompt))
        return row

    def _try_to_use(self, row: dict[str, Any]) -> None:
        """Read a row as a run would, and note why it cannot be used."""
        from batch_trajectories.dataset.row_conversation import USER_COLUMN

        try:
            if row.get(USER_COLUMN) is None:
                self._rules.read(row)
            else:
                self._rules_with_user.read(row)
                self.rows_with_user += 1
        except ValueError as error:
            place, reason = _split_place(str(error))
            self.reasons[reason] += 1
            self.first_places.setdefault(reason, place)

    @cached_property
    def _rules(self) -> RowRules:
        from batch_trajectories.dataset.row import RowRules

        if self.kind is None:
            return RowRules()
        return RowRules(with_setup=True, image="allowed", inside=True, check_in="fresh")

    @cached_property
    def _rules_with_user(self) -> RowRules:
        from agent.options import AgentOptions, SimulatedUser

        return replace(self._rules, options=AgentOptions(simulated_user=SimulatedUser()))

    @property
    def usable(self) -> int:
        """The number of rows that can be used."""
        return self.rows - self.reasons.total()

    def describe_columns(self) -> Iterator[str]:
        """A line for each column: the types of its values, and what a run does with it."""
        from batch_trajectories.basics.text import plural

        width = max(map(len, self.types), default=0)
        for name, types in self.types.items():
            rows = types.total()
            share = "" if rows == self.rows else f" in {plural(rows, 'row')}"
            use = _describe_use(name, self.types)
            plain = name.strip().casefold()
            if plain not in self.types and use == _KEPT != _describe_use(plain, self.types):
                use += f"; named `{plain}`, it would be: {_describe_use(plain, self.types)}"
            yield f"  {name:<{width}}  {' or '.join(types)}{share}; {use}"

    def describe_problems(self) -> Iterator[str]:
        """A line for each reason why rows cannot be used, and one about repeated keys."""
        from batch_trajectories.basics.text import first_few, plural

        for reason, count in self.reasons.most_common(_MAX_LISTED_REASONS):
            place = self.first_places.get(reason, "")
            yield f"{plural(count, 'row')}: {reason}{place and f' (the first: {place})'}"
        if self.repeated_keys:
            yield (
                f"{plural(len(self.repeated_keys), 'row')} with a key twice in one object, whose "
                f"last value counts: {first_few(self.repeated_keys, separator='; ')}"
            )

    def describe_questions(self) -> Iterator[str]:
        """A line for each column that may belong to the prompt or be the expected answer."""
        from batch_trajectories.basics.text import plural
        from batch_trajectories.records.checks import EXPECTED

        for (prompt, name), count in self.beside_prompt.items():
            template = f"{{{{{prompt}}}}}\\n\\n{{{{{name}}}}}"
            yield (
                f"Does `{name}` belong to the prompt? The model does not see it "
                f"({plural(count, 'row')}). A rows file puts both together (--rows=FILE, "
                f'docs/data.md): prompt: "{template}"'
            )
        for name in self.proposed.get(EXPECTED, ()):
            yield (
                f"Is `{name}` the right answer? As the column `{EXPECTED}`, answers are compared "
                "with it (--check_expected)"
            )

    def suggest_command(self, source: Path, columns: str | None) -> Iterator[str]:
        """The options of a run with these rows; none if no row can be used."""
        from batch_trajectories.dataset.row_conversation import CHAT_COLUMNS, columns_option

        has_prompt = self.usable or self.proposed.keys() & {"prompt", *CHAT_COLUMNS}
        if self.proposed and has_prompt and not columns:
            best = {new: old.most_common(1)[0][0] for new, old in self.proposed.items()}
            columns = columns_option(best)
        elif not self.usable:
            return
        options = {
            "--dataset_file": str(source),
            "--rows": self.kind,
            "--columns": columns,
            "--simulated_user": "{}" if self.rows_with_user else None,
        }
        given = (f"{name}={shlex.quote(value)}" for name, value in options.items() if value)
        yield f"To run it: {' '.join(given)}"


def _describe_rows(
    source: Path, lines: list[bytes], *, shown: int, columns: str | None, kind: str | None
) -> str:
    """Describe the first rows of a source, and print `shown` of them."""
    from batch_trajectories.basics import exact_json
    from batch_trajectories.basics.text import clip, plural

    findings = _Findings(kind)
    printed = []
    for number, line in enumerate(lines, start=1):
        row = findings.add(line)
        if row is not None and number <= shown:
            text = exact_json.dumps(row).decode()
            printed.append(f"row {number}: {clip(text, max_chars=_ROW_CHARS)}")
    first = "the first " if len(lines) == _EXAMINED else ""
    description = [
        f"{source}: {findings.usable:,} of {first}{plural(len(lines), 'row')} can be used",
        *findings.describe_columns(),
        *findings.describe_problems(),
        *printed,
        *findings.describe_questions(),
        *findings.suggest_command(source, columns),
    ]
    return "\n".join(description)


def _split_place(reason: str) -> tuple[str, str]:
    """Split a reason into the place in a task directory, "" without one, and the reason itself."""
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
        TOOL_COLUMNS,
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

    own_id = next((column for column in ID_COLUMNS if column in {*columns, name}), None)
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
        MODEL_COLUMN: "one of --models, without which it means nothing",
        **dict.fromkeys(TOOL_COLUMNS, "kept with the record; the model is offered --tools instead"),
        **dict.fromkeys(
            column_names(InsideColumns), "how to work in the image, with --workspace=image"
        ),
        **dict.fromkeys(IMAGE_COLUMNS, "the image, with --sandbox=docker"),
        **dict.fromkeys(TELLTALE_COLUMNS, "prepares or judges the workspace, with --row_setup"),
        **dict.fromkeys(
            column_names(HistoryColumns), "the history that stays, with --workspace=image"
        ),
    }
    return uses.get(name, _KEPT)
