"""The meanings of endpoints' words and phrases, from `endpoint_words.toml`: one table for all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from agent.messages.message import FinishReason

Ending = FinishReason | Literal["cut", "open"]
"""The reason why a reply ended.

`cut`: the server broke the reply off, so it is not whole. `open`: the reply goes on.
"""

_FILE = Path(__file__).with_name("endpoint_words.toml")

_CONTEXT_CHARS = 12
"""Minimum characters around a phrase that are compared with the request, up to whole words."""

_WORD = re.compile(r"\w+")
_ESCAPES = re.compile(r"\\[nrt\"/]")

_BETWEEN = r"\b[^\n]{1,60}?(?<!\w)"
"""The pattern for " * " between two words of a phrase: separators, with other words in between."""


class Words(NamedTuple):
    """The tables of words; all words are in lower case."""

    endings: Mapping[str, Ending]
    """Endings by the word with which an API says why a reply ended."""
    codes: Mapping[str, str]
    """Kinds of errors (see `agent.models.errors.Kind`) by code or type."""
    statuses: Mapping[str, int]
    """HTTP statuses by the code or type of an error."""


@cache
def load_tables() -> Mapping[str, Any]:
    """Read the file: tables of tables, with the source of each word."""
    import tomllib

    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


@cache
def load_words() -> Words:
    """Load the tables for searches; the file is read once in a process."""
    tables = load_tables()
    return Words(
        endings={word: cast(Ending, end) for end, word in _pairs(tables["ends"])},
        codes={code: kind for kind, code in _pairs(tables["codes"])},
        statuses=tables["statuses"],
    )


@cache
def _phrases(kind: str) -> re.Pattern[str]:
    """The pattern that finds the phrases of this kind of error in a message."""
    # Apart from the words, which each reply needs: compiling them takes longer than all else here.
    return re.compile("|".join(map(_pattern, load_tables()["phrases"][kind])))


def find_ending(word: Any) -> Ending | None:
    """The ending that an API's word means; None for a word that the table lacks."""
    if not isinstance(word, str):
        return None
    endings = load_words().endings
    return endings.get(word) or endings.get(re.sub(r"[\s-]+", "_", word.strip().lower()))


_UNPARSED = re.compile(
    r"\b(?:fail(?:ed|ure)|could not|cannot|can't|unable|error)\b[^\n:]{0,20}\bpars(?:e|ing)\b"
    r"|\braw=|\blast read\b|\bfailed_generation\b",
    re.IGNORECASE,
)
"""The beginning of a complaint about the model's output: Ollama, llama.cpp, Groq."""


def own_words(message: str) -> str:
    """The part of an error's message that is the server's own.

    A server that cannot parse what the model wrote quotes it, and it may say anything.
    """
    match = _UNPARSED.search(message)
    return message if match is None else message[: match.start()]


def find_phrase(kind: str, message: str, request: bytes = b"") -> str | None:
    """Find the first phrase of this kind of error in a message, in lower case; None if none.

    A phrase that the error quotes from the `request` does not count: the request has it together
    with the words around it.
    """
    message = message.lower()
    for match in _phrases(kind).finditer(message):
        if not (request and _is_quote(message, match, request)):
            return match[0]
    return None


def _is_quote(message: str, match: re.Match[str], request: bytes) -> bool:
    """Whether the request has the phrase, together with the words before or after it."""
    # In an error's own sentence, other names and numbers stand around the phrase.
    start = message.rfind(" ", 0, max(0, match.start() - _CONTEXT_CHARS)) + 1
    end = message.find(" ", match.end() + _CONTEXT_CHARS)
    before = message[start : match.start()]
    after = message[match.end() : end if end >= 0 else None]
    sent = _plain(request.decode(errors="replace"))
    return any(
        _WORD.search(beside) is not None and _plain(text) in sent
        for beside, text in ((before, before + match[0]), (after, match[0] + after))
    )


def _plain(text: str) -> str:
    """The words of a text or of a JSON document, so that quotes of it can be found."""
    return " ".join(_WORD.findall(_ESCAPES.sub(" ", text.lower())))


def _pairs(table: Mapping[str, Mapping[str, str]]) -> Iterator[tuple[str, str]]:
    return ((meaning, word) for meaning, words in table.items() for word in words)


def _pattern(phrase: str) -> str:
    escaped = re.escape(phrase).replace(r"\ \*\ ", _BETWEEN)
    return escaped.replace(r"\#", r"\(?[\d,.]+\)?")
