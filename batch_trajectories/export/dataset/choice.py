"""Chooses among the conversations that pass the filters, once all of them are known.

`max_per` and `balance` come first, then the counts and weights of runs. A seed draws conversations
to leave out: one by one, or by prompt if a format needs the samples of a prompt together. The draw
of a conversation depends on seed, run and id alone.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.style import Style, apply_style
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Rejection
from batch_trajectories.export.dataset.splits import JoinedSplits, draw_bits, value_in
from batch_trajectories.export.rows.files import Candidate
from batch_trajectories.export.rows.format import RowFormat, load_format
from batch_trajectories.export.rows.recipe import Recipe, RunShare
from batch_trajectories.export.templates.rendering import (
    EOS,
    Tokens,
    load_chat,
    strip_marks,
    tools_in,
)
from batch_trajectories.export.templates.template_names import TEMPLATES, TOKENIZER
from batch_trajectories.records.record_types import Record

# Lengths of conversations in the tokens of the model that is trained.

OPTION = "filters.tokenizer"


class TokenLengths:
    """Counts tokens of conversations, rendered as rows of `openai` by a chat template."""

    def __init__(self, directory: Path, style: Style) -> None:
        """`directory` holds a tokenizer and its template. Raises `ConfigError`."""
        files = (directory / name for name in TEMPLATES)
        template = next((file for file in files if file.is_file()), None)
        if template is None or not (directory / TOKENIZER).is_file():
            raise ConfigError(
                f"{OPTION}: {directory} must be a directory with {TOKENIZER} and "
                f"{' or '.join(TEMPLATES)}; save the student's tokenizer there"
            )
        self._chat = load_chat(template)
        self._tokens = Tokens(directory / TOKENIZER)
        format = load_format("openai")
        assert isinstance(format, RowFormat)
        self._format = format
        self._style = format.limit(style)

    def count(self, conversation: Conversation) -> int:
        """The number of tokens of a whole conversation.

        Raises `Rejected` if the conversation has no row of `openai`, and `ConfigError` if the
        template refuses the row.
        """
        row = self._format.row_of(apply_style(conversation, self._style), self._style)
        try:
            text, _ = strip_marks(self._chat(row["messages"], tools_in(row)))
        except Exception as error:  # a template can raise anything
            raise ConfigError(
                f"{OPTION}: its chat template refuses {row['id']}: {error}; see what --parity says"
            ) from error
        return self._tokens.count(text.replace(EOS, ""))


def characters_in(record: Record) -> int:
    """The number of characters of all texts and calls of a record."""
    count = 0
    for message in record.messages:
        count += len(message.content) + len(message.reasoning or "")
        count += sum(len(call.function.arguments) for call in message.tool_calls)
    return count


_NO_VALUE = -1
_FEW = 32
"""Number of groups that are written at a time."""


class Selection:
    """Chooses candidates of a dataset and their order; takes 24 to 60 bytes per candidate."""

    def __init__(
        self, recipe: Recipe, splits: JoinedSplits | None, lengths: TokenLengths | None
    ) -> None:
        """`splits` join all candidates. `lengths` measure candidates; None: by characters."""
        self._recipe = recipe
        self._splits = splits
        self._lengths = lengths
        filters = recipe.filters
        columns = [*filters.max_per, *filter(None, [filters.balance])]
        self._numbers = array("Q")
        self._ranks = array("Q")
        self._groups = array("Q")
        """The number of the first candidate of the same prompt, or its own."""
        self._positions = array("d")
        """The sort keys of the candidates."""
        self._runs = array("H")
        self._run_names: dict[str, int] = {}
        self._values = {column: array("q") for column in columns}
        self._ids: dict[str, dict[str, int]] = {column: {} for column in columns}
        """The numbers that stand for the values of each column."""
        self.not_used: dict[int, Rejection] = {}
        """Candidates, by number, that only preferences may use. They count for no limit."""

    def add(
        self, candidates: Iterable[Candidate], rate: float | None, not_used: Mapping[str, Rejection]
    ) -> None:
        """Add the candidates of one prompt; `rate` is the share of its samples that passed."""
        first = None
        for candidate in candidates:
            number = candidate.number
            first = number if first is None else first
            if (rejection := not_used.get(candidate.record.id)) is not None:
                self.not_used[number] = rejection
            self._numbers.append(number)
            self._groups.append(first)
            self._ranks.append(self._rank(candidate))
            self._positions.append(self._sort_position(candidate, rate))
            self._runs.append(self._run_names.setdefault(candidate.run, len(self._run_names)))
            for column, values in self._values.items():
                value = value_in(candidate, column)
                ids = self._ids[column]
                values.append(_NO_VALUE if value is None else ids.setdefault(value, len(ids)))
            if self._splits is not None:
                self._splits.join(candidate)

    def choose(self) -> dict[int, Rejection]:
        """Choose; returns the candidates that are left out by number. Raises `ConfigError`."""
        filters, shares = self._recipe.filters, self._recipe.runs
        for column, ids in self._ids.items():
            if self._numbers and not ids:
                key = f"max_per.{column}" if column in filters.max_per else "balance"
                raise ConfigError(
                    f"filters.{key}: no conversation has a column or metadata {column!r}; name one "
                    "that `show RUN ID --json` has in `row`, or in `metadata` of rows"
                )
        reasons: dict[int, Rejection] = {}
        left = [n for n, number in enumerate(self._numbers) if number not in self.not_used]
        left.sort(key=lambda n: (self._ranks[n], n))
        for column, limit in filters.max_per.items():
            rejection = Rejection("max_per", f"{limit:,} with this {column} are kept")
            limits = dict.fromkeys(self._values[column], limit)
            left = _cap(left, self._values[column], limits, rejection=rejection, reasons=reasons)
        if (balanced := filters.balance) is not None:
            values = self._values[balanced]
            counts = Counter(values[n] for n in left if values[n] != _NO_VALUE)
            fewest = min(counts.values(), default=0)
            rejection = Rejection("balance", f"{fewest:,} of each {balanced} are kept")
            limits = dict.fromkeys(counts, fewest)
            left = _cap(left, values, limits, rejection=rejection, reasons=reasons)
        if shares:
            counts = Counter(self._runs[n] for n in left)
            kept = run_limits(
                shares, {name: counts[self._run_names.get(name, _NO_VALUE)] for name in shares}
            )
            limits = {self._run_names[name]: limit for name, limit in kept.items() if limit}
            rejection = Rejection("runs", "others of its run fill its count or weight")
            _cap(left, self._runs, limits, rejection=rejection, reasons=reasons)
        self._left_out = {self._numbers[n]: reasons[n] for n in sorted(reasons)}
        return self._left_out

    def groups(self) -> Iterator[list[list[int]]]:
        """The chosen candidates by prompt, in the recipe's order, some prompts at a time."""
        groups: list[tuple[float, list[int]]] = []
        for _, members in groupby(range(len(self._numbers)), key=self._groups.__getitem__):
            kept = [n for n in members if self._numbers[n] not in self._left_out]
            if kept:
                position = min(self._positions[n] for n in kept)
                groups.append((position, [self._numbers[n] for n in kept]))
        groups.sort(key=lambda group: group[0])
        for first in range(0, len(groups), _FEW):
            yield [numbers for _, numbers in groups[first : first + _FEW]]

    def _rank(self, candidate: Candidate) -> int:
        record = candidate.record
        drawn = record.prompt_id if self._recipe.keeps_prompts else record.id
        return draw_bits(f"{self._recipe.seed}\n{candidate.run}\n{drawn}".encode())

    def _sort_position(self, candidate: Candidate, rate: float | None) -> float:
        """The sort key of a candidate; infinity if unknown, so that it comes last."""
        by = (self._recipe.sort or "").removeprefix("-")
        if by == "random":
            return float(self._ranks[-1])
        if by == "pass_rate":
            position = None if rate is None else -rate
        elif by == "length" and self._lengths is not None:
            position = self._lengths.count(candidate.parsed)
        elif by == "length":
            position = characters_in(candidate.record)
        else:
            return 0.0
        if position is None:
            return float("inf")
        return -float(position) if self._recipe.sort == f"-{by}" else float(position)


def _cap(
    left: list[int],
    values: array[int],
    limits: Mapping[int, int],
    *,
    rejection: Rejection,
    reasons: dict[int, Rejection],
) -> list[int]:
    """Keep as many candidates of each value as its limit allows; returns the kept ones.

    Candidates without a value, or whose value has no limit, are kept. `reasons` gets the others.
    """
    kept = []
    seen: defaultdict[int, int] = defaultdict(int)
    for n in left:
        value = values[n]
        seen[value] += 1
        if value != _NO_VALUE and value in limits and seen[value] > limits[value]:
            reasons[n] = rejection
        else:
            kept.append(n)
    return kept


def run_limits(shares: Mapping[str, RunShare], available: Mapping[str, int]) -> dict[str, int]:
    """The number of conversations to keep of each run that has a count or a weight.

    Weights are proportions: the run with the fewest conversations for its weight is used
    completely, the others are cut to fit. Raises `ConfigError` if a run with a weight has none.
    """
    weights = {name: share.weight for name, share in shares.items() if share.weight is not None}
    if empty := [name for name in weights if not available[name]]:
        raise ConfigError(
            f"runs.{empty[0]}: no conversation of it is left after the filters, so nothing has its "
            "weight; take it out of the mix, or change the filters"
        )
    scarcest = min((available[name] / weight for name, weight in weights.items()), default=0.0)
    # A product of floats that should be whole can be a little less.
    kept = {name: int(scarcest * weight + 1e-9) for name, weight in weights.items()}
    counts = {name: share.count for name, share in shares.items() if share.count is not None}
    return kept | {name: min(count, available[name]) for name, count in counts.items()}
