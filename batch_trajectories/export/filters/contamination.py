"""Overlap of conversations with questions of benchmarks, by runs of words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import orjson

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.export.conversation.texts import strings_in, texts_of, words_of
from batch_trajectories.runs.store.record_types import Record

_ESCAPE = re.compile(r"\\[bfnrt]")
"""An escape in arguments and results that are JSON; its letter is not part of the next word."""

_FEWEST_WORDS = 5
"""Words of shorter questions occur together by chance."""


class Questions:
    """Word sequences of benchmark questions, which conversations must not contain.

    A question shorter than a run counts as a whole, if it has five words or more.
    """

    def __init__(self, questions: Iterable[tuple[str, str]], *, words: int) -> None:
        """`questions` are the places and texts; `words` is the length of a run."""
        self._places: dict[int, str] = {}
        self._lengths: set[int] = set()
        for place, text in questions:
            tokens = _words(text)
            length = min(words, len(tokens))
            if length < _FEWEST_WORDS:
                continue
            self._lengths.add(length)
            for run in _runs(tokens, length):
                self._places.setdefault(run, place)

    def overlap(self, record: Record) -> str | None:
        """Where a record overlaps with which question, None if it does not."""
        for where, text in texts_of(record):
            tokens = _words(text)
            for length in self._lengths:
                for run in _runs(tokens, length):
                    if run in self._places:
                        return f"{where}: {length} words of {self._places[run]}"
        return None


def load_questions(files: Sequence[Path], *, words: int) -> Questions:
    """Read files of questions. Raises `ConfigError` where one cannot be read or holds none."""
    return Questions((pair for file in files for pair in _read(file)), words=words)


def _read(path: Path) -> Iterator[tuple[str, str]]:
    count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place = f"{path.name}:{number}"
                for text in _texts(path, number, line):
                    count += len(_words(text)) >= _FEWEST_WORDS
                    yield place, text
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot read these evaluation questions: {error.strerror or error}"
        ) from error
    if not count:
        raise ConfigError(
            f"{path}: no question of {_FEWEST_WORDS} words or more; nothing could overlap with it"
        )


def _texts(path: Path, number: int, line: bytes) -> Iterable[str]:
    try:
        if path.suffix != ".jsonl":
            return [line.decode()]
        return strings_in(orjson.loads(line)) if line.strip() else ()
    except ValueError as error:
        kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
        raise ConfigError(
            f"{path}:{number}: not {kind}, so it is not a question; fix or remove that line"
        ) from error


def _words(text: str) -> list[str]:
    return words_of(_ESCAPE.sub(" ", text))


def _runs(words: Sequence[str], length: int) -> Iterator[int]:
    return (hash(tuple(words[n : n + length])) for n in range(len(words) - length + 1))
