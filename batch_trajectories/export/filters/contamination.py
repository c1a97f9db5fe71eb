"""Finds conversations that overlap with benchmarks, or that repeat earlier conversations."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import orjson

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import ConfigError, DatasetError, missing_extra
from batch_trajectories.dataset.arrow_rows import Omissions
from batch_trajectories.dataset.kept_dataset import rows_of_source
from batch_trajectories.dataset.lines import TOO_LONG
from batch_trajectories.dataset.source import HUB_PREFIX, DataSource, is_row_file, parse_source
from batch_trajectories.export.conversation.texts import (
    conversation_texts,
    split_words,
    strings_in,
    user_texts,
)
from batch_trajectories.export.conversation.validity import Rejection
from batch_trajectories.export.rows.filter_options import Filters
from batch_trajectories.records.record_types import Record

# The questions of benchmarks, from datasets and from plain text.

OPTION = "filters.evaluation_files"


class Benchmark:
    """The rows of one benchmark."""

    def __init__(self, name: str) -> None:
        """`name` is a path or `hf:...`. Raises `ConfigError`, or `EnvironmentStop` for a hub."""
        self.path = Path(name)
        self.name = name if name.startswith(HUB_PREFIX) else PurePath(name).name
        self.revision: str | None = None
        """The commit of a dataset of the hub; None for other benchmarks."""
        self._source: DataSource | None = None
        if name.startswith(HUB_PREFIX) or self.path.is_dir() or is_row_file(self.path.name):
            self._source = _naming_option(lambda: parse_source(Path(name)))
            if self._source.hub is not None:
                from batch_trajectories.dataset.source import fetch_revision

                hub = self._source.hub
                self.revision = _naming_option(lambda: fetch_revision(hub))

    def rows(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Number and columns of each row; lines of text have the column `text`.

        Raises as the constructor does.
        """
        with LongWork(f"reading {self.name}", unit="rows") as work:
            try:
                for number, row in self._read():
                    work.advance()
                    yield number, row
            except DatasetError as error:
                raise ConfigError(f"{OPTION}: {error}") from error
            except OSError as error:
                raise ConfigError(
                    f"{OPTION}: {error.filename or self.path}: cannot read these evaluation "
                    f"questions: {error.strerror or error}"
                ) from error

    def _read(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        source = self._source
        if source is None:
            with self.path.open("rb") as file:
                for number, line in enumerate(file, start=1):
                    yield number, {"text": self._decode(line, number)}
            return
        if source.tasks:
            # Tasks that could not run here are read, too.
            for number, task in enumerate(source.tasks, start=1):
                instruction = task.path / "instruction.md"
                text = ""
                if instruction.is_file():
                    text = self._decode(instruction.read_bytes(), number)
                yield number, {"id": task.id, "instruction": text}
            return
        for number, row in enumerate(rows_of_source(source, Omissions(), self.revision), start=1):
            if isinstance(row, bytes):
                row = self._parse(row, number)
            yield number, row if isinstance(row, dict) else {"text": row}

    def _decode(self, text: bytes, number: int) -> str:
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise self._unusable_line("UTF-8", number) from error

    def _parse(self, line: bytes, number: int) -> Any:
        if line == TOO_LONG:
            raise self._unusable_line("short enough", number)
        try:
            return orjson.loads(line) if line.strip() else {}
        except orjson.JSONDecodeError as error:
            raise self._unusable_line("JSON", number) from error

    def _unusable_line(self, kind: str, number: int) -> ConfigError:
        return ConfigError(
            f"{OPTION}: {self.path}:{number}: not {kind}, so it is not a question; fix or remove "
            "that line"
        )


def texts_in(row: Mapping[str, Any], columns: Iterable[str] | None) -> Iterator[str]:
    """Texts of a row; `columns` are the columns to read, None: all."""
    for name in row if columns is None else columns:
        yield from strings_in(row.get(name))


def _naming_option(read: Any) -> Any:
    try:
        return read()
    except DatasetError as error:
        raise ConfigError(f"{OPTION}: {error}") from error


_ESCAPE = re.compile(r"\\[bfnrt]")
"""An escape in arguments and results that are JSON; its letter is not part of the next word."""

_FEWEST_WORDS = 5
"""Minimum words of a question: fewer words occur together by chance."""

_MAX_WORD_RUNS = 20_000_000
"""Maximum number of runs of words. Each takes 12 bytes in a table that is at least a third full."""

_REPOSITORIES = ("repo", "repo_name", "repository")
"""Columns with the name of a repository."""

_MIRROR = re.compile(r"swesmith/(?P<owner>[\w.-]+?)__(?P<name>[\w.-]+)\.[0-9a-f]{6,40}")
"""A repository of SWE-smith: a copy of `owner/name` at a commit."""


class _ShortQuestion(NamedTuple):
    """A question with fewer words than a run."""

    length: int
    """The number of words of the question."""
    hashed: int
    """A hash of all words of the question."""
    question: int
    """The number of the question."""


class Contamination:
    """The benchmarks of a recipe, whose questions conversations must not contain.

    A question that is shorter than a run must occur as a whole; questions of fewer than five words
    do not count.
    """

    def __init__(self, filters: Filters) -> None:
        """Read the benchmarks. Raises `ConfigError`, or `EnvironmentStop` if a hub fails."""
        self._run_length = filters.evaluation_words
        self._search = filters.evaluation_search
        self._columns = filters.evaluation_columns
        if not self._search and not self._columns:
            raise ConfigError("filters.evaluation_search: is empty; then set evaluation_columns")
        self._text_columns = filters.evaluation_text
        self._runs = _RunTable()
        self._short: dict[int, list[_ShortQuestion]] = {}
        """Short questions by a hash of their first words."""
        self._rows = array("I")
        """The number of the row of each question."""
        self._ends: list[int] = []
        """The number of questions up to the end of each set."""
        self._values: dict[str, dict[str, int]] = {name: {} for name in self._columns}
        """The values of each column, each with the number of its set."""
        self._found: list[Counter[str]] = []
        self._sets = [Benchmark(name) for name in filters.evaluation_files]
        missing = {*self._columns, *(self._text_columns or ())}
        for number, one in enumerate(self._sets):
            missing -= self._read(one, number)
        if missing:
            option = "columns" if min(missing) in self._columns else "text"
            raise ConfigError(
                f"filters.evaluation_{option}: no set of evaluation_files has a column "
                f"{min(missing)!r}"
            )

    def overlap(self, record: Record) -> Rejection | None:
        """The reason why a benchmark leaves a record out; None if it overlaps with no question.

        The reason is the name of the filter, the detail says where the overlap is.
        """
        for column in self._columns:
            value = text_value(record.row, column)
            if value is not None and (number := self._values[column].get(value)) is not None:
                self._found[number][column] += 1
                name = self._sets[number].name
                return Rejection("evaluation_columns", f"{column} {value!r} is in {name}")
        seen: set[str] = set()
        for where, text in self._texts(record):
            if text in seen:
                continue
            seen.add(text)
            if (hit := self._find_in_text(text)) is not None:
                question, length = hit
                number = next(n for n, end in enumerate(self._ends) if question < end)
                self._found[number]["words"] += 1
                name = f"{self._sets[number].name}:{self._rows[question]}"
                return Rejection("evaluation_files", f"{where}: {length} words of {name}")
        return None

    def counts(self) -> list[dict[str, Any]]:
        """The sets for the manifest: `name`, `revision`, `questions`, `left_out` by filter."""
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

    def _read(self, one: Benchmark, number: int) -> set[str]:
        """Read the rows of a set; returns the names of their columns."""
        columns: set[str] = set()
        values = 0
        before = len(self._rows)
        for row_number, row in one.rows():
            columns |= row.keys()
            for column in self._columns:
                if (value := text_value(row, column)) is not None:
                    self._values[column].setdefault(value, number)
                    columns.add(column)
                    values += 1
            for text in texts_in(row, self._text_columns):
                self._add(text, row_number)
            if len(self._runs) > _MAX_WORD_RUNS:
                raise ConfigError(
                    f"{OPTION}: {one.name}: more than {_MAX_WORD_RUNS:,} runs of words; name the "
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
        tokens = _words_in(text)
        if len(tokens) < _FEWEST_WORDS:
            return
        question = len(self._rows)
        self._rows.append(row)
        if len(tokens) < self._run_length:
            (start,) = _runs(tokens[:_FEWEST_WORDS], _FEWEST_WORDS)
            short = _ShortQuestion(len(tokens), hash(tuple(tokens)), question)
            self._short.setdefault(start, []).append(short)
            return
        for run in _runs(tokens, self._run_length):
            self._runs.add(run, question)

    def _texts(self, record: Record) -> Iterator[tuple[str, str]]:
        if "all" in self._search:
            yield from conversation_texts(record)
            return
        if "prompts" in self._search:
            yield from (("user", text) for text in user_texts(record))
            yield from (("prompt", text) for text in texts_in(record.row, ("prompt",)))
        if "tool_results" in self._search:
            for number, message in enumerate(record.messages, start=1):
                if message.role == "tool":
                    yield f"message {number} (tool)", message.content

    def _find_in_text(self, text: str) -> tuple[int, int] | None:
        """The number of the first question in a text, and the number of common words; else None."""
        tokens = _words_in(text)
        if (question := self._runs.find(_runs(tokens, self._run_length))) is not None:
            return question, self._run_length
        if self._short:
            for index, start in enumerate(_runs(tokens, _FEWEST_WORDS)):
                for short in self._short.get(start, ()):
                    if hash(tuple(tokens[index : index + short.length])) == short.hashed:
                        return short.question, short.length
        return None


class _RunTable:
    """A hash table of runs of words, each with the first question that contains it."""

    def __init__(self) -> None:
        self._count = 0
        self._make(1 << 16)

    def __len__(self) -> int:
        return self._count

    def _make(self, slots: int) -> None:
        self._hashes = array("q", bytes(8 * slots))
        """Hashes of runs; 0 marks a free slot."""
        self._questions = array("I", bytes(4 * slots))
        self._mask = slots - 1

    def add(self, run: int, question: int) -> None:
        """Add a run, unless the table has it."""
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
        """The question of the first of the runs that is in the table; None if there is none."""
        hashes, mask = self._hashes, self._mask
        for run in runs:
            slot = run & mask
            while found := hashes[slot]:
                if found == run:
                    return self._questions[slot]
                slot = (slot + 1) & mask
        return None


def text_value(row: Mapping[str, Any], column: str) -> str | None:
    """The value of a column, normalized for comparison with benchmarks; None without one."""
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


def _words_in(text: str) -> list[str]:
    return split_words(_ESCAPE.sub(" ", text))


def _runs(words: Sequence[str], length: int) -> Iterator[int]:
    return map(hash, zip(*(islice(words, n, None) for n in range(length)), strict=False))


# Exact and near duplicates of earlier conversations.

_PERMUTATIONS = 128
_SEED = 1


def content_key(record: Record) -> tuple[str, ...]:
    """The texts of a conversation, without ids and times, and the turns that its source masks.

    Conversations with equal keys are exact duplicates.
    """
    masked = None if record.imported is None else record.imported.get("no_loss")
    # If only one of two copies is masked, the other one is still learnt.
    return (*_message_texts(record, with_results=True), *map(str, masked or ()))


class NearDuplicates:
    """Finds conversations with nearly the same words as an earlier one.

    Triples of words of user and model texts are compared, without tool results. Takes about a
    kilobyte per conversation.
    """

    def __init__(self, threshold: float) -> None:
        """`threshold` is the minimum Jaccard similarity. Raises `ConfigError` without rensa."""
        try:
            import rensa
        except ImportError as error:
            raise missing_extra("filters.near_duplicates", "quality") from error
        self._rensa = rensa
        self._threshold = threshold
        # The index proposes candidates, from well below the threshold on.
        bands = next(
            (b for b in (8, 16, 32, 64) if (1 / b) ** (b / _PERMUTATIONS) <= threshold - 0.1), 64
        )
        self._index = rensa.RMinHashLSH(threshold, _PERMUTATIONS, bands)
        self._kept: list[tuple[Any, str]] = []
        """The sketch and the id of each remembered record."""

    def find_or_add(self, record: Record) -> str | None:
        """The id of an earlier near duplicate; None without one, and the record is remembered."""
        words = split_words(" ".join(_message_texts(record, with_results=False)))
        triples = {" ".join(words[n : n + 3]) for n in range(max(1, len(words) - 2))}
        sketch = self._rensa.RMinHash(_PERMUTATIONS, _SEED)
        sketch.update(sorted(triples))
        proposed: list[int] = sorted(self._index.query(sketch))
        for key in proposed:
            other, name = self._kept[key]
            if sketch.jaccard(other) >= self._threshold:
                return name
        self._index.insert(len(self._kept), sketch)
        self._kept.append((sketch, record.id))
        return None


def _message_texts(record: Record, *, with_results: bool) -> list[str]:
    texts: list[str] = []
    for message in record.messages:
        role = message.role
        if role == "system" or (role == "tool" and not with_results):
            continue
        texts += (role, message.content, message.reasoning or "")
        for call in message.tool_calls:
            texts += (call.function.name, call.function.arguments)
    return texts
