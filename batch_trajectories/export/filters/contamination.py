"""Overlap of conversations with benchmarks, by runs of words and by columns."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.texts import texts_of, user_texts, words_of
from batch_trajectories.export.filters.evaluation_sets import OPTION, EvaluationSet, texts_in
from batch_trajectories.export.rows.filter_options import Filters
from batch_trajectories.runs.store.record_types import Record

_ESCAPE = re.compile(r"\\[bfnrt]")
"""An escape in arguments and results that are JSON; its letter is not part of the next word."""

_FEWEST_WORDS = 5
"""The words of shorter questions occur together by chance."""

_MOST_RUNS = 20_000_000
"""Maximum number of runs of words; each takes 12 bytes of a table at least a third full."""

_REPOSITORIES = ("repo", "repo_name", "repository")
"""Columns with the name of a repository."""

_MIRROR = re.compile(r"swesmith/(?P<owner>[\w.-]+?)__(?P<name>[\w.-]+)\.[0-9a-f]{6,40}")
"""A repository of SWE-smith, which is a copy of `owner/name` at a commit."""


class Contamination:
    """The benchmarks of a recipe, which conversations must not contain.

    A question shorter than a run counts as a whole, if it has five words or more.
    """

    def __init__(self, filters: Filters) -> None:
        """Read them. Raises `ConfigError`, or `EnvironmentStop` where a hub cannot be reached."""
        self._words = filters.evaluation_words
        self._search = filters.evaluation_search
        self._columns = filters.evaluation_columns
        if not self._search and not self._columns:
            raise ConfigError("filters.evaluation_search: is empty; then set evaluation_columns")
        self._text_columns = filters.evaluation_text
        self._runs = _Runs()
        self._short: dict[int, list[tuple[int, int, int]]] = {}
        self._rows = array("I")
        """The number of the row of each question."""
        self._ends: list[int] = []
        """The number of questions up to each set."""
        self._values: dict[str, dict[str, int]] = {name: {} for name in self._columns}
        """For each column its values, with the number of the set."""
        self._found: list[Counter[str]] = []
        self._sets = [EvaluationSet(name) for name in filters.evaluation_files]
        missing = {*self._columns, *(self._text_columns or ())}
        for number, one in enumerate(self._sets):
            missing -= self._read(one, number)
        if missing:
            option = "columns" if min(missing) in self._columns else "text"
            raise ConfigError(
                f"filters.evaluation_{option}: no set of evaluation_files has a column "
                f"{min(missing)!r}"
            )

    def overlap(self, record: Record) -> tuple[str, str] | None:
        """The filter that leaves a record out, and where it overlaps with which question."""
        for column in self._columns:
            value = value_of(record.row, column)
            if value is not None and (number := self._values[column].get(value)) is not None:
                self._found[number][column] += 1
                return "evaluation_columns", f"{column} {value!r} is in {self._sets[number].name}"
        seen: set[str] = set()
        for where, text in self._texts(record):
            if text in seen:
                continue
            seen.add(text)
            if (hit := self._in_text(text)) is not None:
                question, length = hit
                number = next(n for n, end in enumerate(self._ends) if question < end)
                self._found[number]["words"] += 1
                name = f"{self._sets[number].name}:{self._rows[question]}"
                return "evaluation_files", f"{where}: {length} words of {name}"
        return None

    def counts(self) -> list[dict[str, Any]]:
        """For the manifest: each set, how much there is of it, and what was left out by it."""
        return [
            {
                "name": one.name,
                "revision": one.revision,
                "questions": end - start,
                "left_out": dict(sorted(found.items())),
            }
            for one, start, end, found in zip(
                self._sets, [0, *self._ends], self._ends, self._found, strict=False
            )
        ]

    def _read(self, one: EvaluationSet, number: int) -> set[str]:
        """Take the rows of a set; returns their columns."""
        columns: set[str] = set()
        values = 0
        before = len(self._rows)
        for row_number, row in one.rows():
            columns |= row.keys()
            for column in self._columns:
                if (value := value_of(row, column)) is not None:
                    self._values[column].setdefault(value, number)
                    columns.add(column)
                    values += 1
            for text in texts_in(row, self._text_columns):
                self._add(text, row_number)
            if len(self._runs) > _MOST_RUNS:
                raise ConfigError(
                    f"{OPTION}: {one.name}: more than {_MOST_RUNS:,} runs of words; name the "
                    "columns with questions by evaluation_text, or leave sets out"
                )
        if len(self._rows) == before and not values:
            raise ConfigError(
                f"{OPTION}: {one.path}: no question of {_FEWEST_WORDS} words or more; nothing "
                "could overlap with it"
            )
        self._ends.append(len(self._rows))
        self._found.append(Counter())
        return columns

    def _add(self, text: str, row: int) -> None:
        tokens = _words(text)
        if len(tokens) < _FEWEST_WORDS:
            return
        question = len(self._rows)
        self._rows.append(row)
        if len(tokens) < self._words:
            (start,) = _runs(tokens[:_FEWEST_WORDS], _FEWEST_WORDS)
            known = (len(tokens), hash(tuple(tokens)), question)
            self._short.setdefault(start, []).append(known)
            return
        for run in _runs(tokens, self._words):
            self._runs.add(run, question)

    def _texts(self, record: Record) -> Iterator[tuple[str, str]]:
        if "all" in self._search:
            yield from texts_of(record)
            return
        if "prompts" in self._search:
            yield from (("user", text) for text in user_texts(record))
            yield from (("prompt", text) for text in texts_in(record.row, ("prompt",)))
        if "tool_results" in self._search:
            for number, message in enumerate(record.messages, start=1):
                if message.role == "tool":
                    yield f"message {number} (tool)", message.content

    def _in_text(self, text: str) -> tuple[int, int] | None:
        """The first question that a text has in common, and the length of its run."""
        tokens = _words(text)
        if (question := self._runs.find(_runs(tokens, self._words))) is not None:
            return question, self._words
        if self._short:
            for place, start in enumerate(_runs(tokens, _FEWEST_WORDS)):
                for length, run, question in self._short.get(start, ()):
                    if hash(tuple(tokens[place : place + length])) == run:
                        return question, length
        return None


class _Runs:
    """Hashes of runs, each with the first question that has it, in an open table."""

    def __init__(self) -> None:
        self._count = 0
        self._make(1 << 16)

    def __len__(self) -> int:
        return self._count

    def _make(self, slots: int) -> None:
        self._hashes = array("q", bytes(8 * slots))
        """0: a free slot."""
        self._questions = array("I", bytes(4 * slots))
        self._mask = slots - 1

    def add(self, run: int, question: int) -> None:
        """Add a run, unless it is there."""
        slot = run & self._mask
        while found := self._hashes[slot]:
            if found == run:
                return
            slot = (slot + 1) & self._mask
        self._hashes[slot], self._questions[slot] = run, question
        self._count += 1
        if 3 * self._count > 2 * len(self._hashes):
            known = zip(self._hashes, self._questions, strict=True)
            self._count = 0
            self._make(2 * len(self._hashes))
            for run, question in known:
                if run:
                    self.add(run, question)

    def find(self, runs: Iterable[int]) -> int | None:
        """The question of the first run that is there."""
        hashes, mask = self._hashes, self._mask
        for run in runs:
            slot = run & mask
            while found := hashes[slot]:
                if found == run:
                    return self._questions[slot]
                slot = (slot + 1) & mask
        return None


def value_of(row: Mapping[str, Any], column: str) -> str | None:
    """The value of a column as benchmarks are compared; None without one."""
    names = _REPOSITORIES if column in _REPOSITORIES else (column,)
    value = next((row[name] for name in names if row.get(name) is not None), None)
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    text = str(value).strip().lower()
    if column in _REPOSITORIES:
        if mirror := _MIRROR.fullmatch(text):
            return f"{mirror['owner']}/{mirror['name']}"
        parts = text.removesuffix("/").removesuffix(".git").replace(":", "/").split("/")
        return "/".join(parts[-2:]) or None
    return text or None


def _words(text: str) -> list[str]:
    return words_of(_ESCAPE.sub(" ", text))


def _runs(words: Sequence[str], length: int) -> Iterator[int]:
    return map(hash, zip(*(islice(words, n, None) for n in range(length)), strict=False))
