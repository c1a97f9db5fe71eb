"""Which tokens carry loss: all of the turns that are learnt, and none of anybody else.

The texts of a row are found among its tokens in their order. A text that many others hold cannot be
found so: short ones are left out.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

IGNORED = -100
"""The label of a token without loss."""

_SHORTEST = 8
"""Characters of a text; shorter ones may stand in roles, tags and names."""


class Tokenizer(Protocol):
    """A byte-level tokenizer, such as those of transformers."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """The tokens as their vocabulary writes them."""


class _Found(NamedTuple):
    """Where a text stands, in bytes."""

    begin: int
    end: int


class Labels:
    """Checks rows in the format openai, and counts their tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.rows = self.turns = self.masked_turns = 0
        self.tokens = self.trained = 0
        self.own = self.masked = self.others = 0
        """Tokens in the texts of turns with loss, of turns without, and of all others."""
        self.left_out = 0
        """Texts of turns without loss that are not shown."""

    def add(self, row: Mapping[str, Any], ids: Iterable[int], marks: Iterable[bool]) -> None:
        """Check one row; `marks` say which tokens carry loss."""
        tokens = _Tokens(self._tokenizer, [*ids], [*map(bool, marks)])
        self.rows += 1
        self.tokens += len(tokens.marks)
        self.trained += sum(tokens.marks)
        messages, at = row["messages"], 0
        is_placed = False  # whether it is known where the message before ends
        for number, message in enumerate(messages):
            place = f"{row['id']}, message {number}"
            begin, end = at, tokens.begin_of(messages[number + 1 :], at)
            if message["role"] != "assistant":
                found = tokens.find(message["content"], at)
                if found is None:
                    assert len(message["content"].strip()) < _SHORTEST, f"{place}: not shown"
                    is_placed = False
                    continue
                is_placed = True
                self.others += tokens.check(found, place, is_learnt=False)
                at = found.end
            elif message.get("weight") != 0:
                self.turns += 1
                for text in _texts(message, with_names=is_placed):
                    found = tokens.find(text, begin, end)
                    assert found is not None, f"{place}: not shown: {text[:80]!r}"
                    self.own += tokens.check(found, place, is_learnt=True)
                    at = max(at, found.end)
            else:
                self.masked_turns += 1
                for text in _texts(message, with_names=is_placed):
                    found = tokens.find(text, begin, end)
                    if found is None:
                        self.left_out += 1
                        continue
                    self.masked += tokens.check(found, place, is_learnt=False)
                    at = max(at, found.end)
                if is_placed and messages[number - 1]["role"] != "assistant":
                    tokens.check(_Found(begin, end or at), place, is_learnt=False)

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.trained:,} of {self.tokens:,} tokens carry loss: all "
            f"{self.own:,} of the texts of {self.turns} turns, none of the {self.masked:,} of "
            f"{self.masked_turns} masked turns ({self.left_out} of their texts are not shown), "
            f"none of the {self.others:,} of others"
        )


class _Tokens:
    """The tokens of a row and their text."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int], marks: list[bool]) -> None:
        assert len(ids) == len(marks), f"{len(ids)} tokens, {len(marks)} labels"
        pieces = [_bytes_of(token) for token in tokenizer.convert_ids_to_tokens(ids)]
        self.marks = marks
        self._text = b"".join(pieces)
        self._ends = [*itertools.accumulate(map(len, pieces))]

    def find(self, text: str, begin: int, end: int | None = None) -> _Found | None:
        """Where a text is first, as it is or escaped in JSON; None for short ones."""
        text = text.strip()
        if len(text) < _SHORTEST:
            return None
        found = []
        for form in (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1]):
            sought = form.encode()
            place = self._text.find(sought, begin, len(self._text) if end is None else end)
            if place >= 0:
                found.append(_Found(place, place + len(sought)))
        return min(found, default=None)

    def begin_of(self, messages: Sequence[Mapping[str, Any]], at: int) -> int | None:
        """Where the first message is that no assistant wrote; None: at no known place."""
        for message in messages:
            if message["role"] != "assistant":
                found = self.find(message["content"], at)
                return None if found is None else found.begin
        return None

    def check(self, found: _Found, place: str, *, is_learnt: bool) -> int:
        """Assert that all tokens wholly inside carry loss, or that none does; gives their count."""
        first = bisect.bisect_left(self._ends, found.begin) + 1 if found.begin else 0
        last = bisect.bisect_right(self._ends, found.end)
        wrong = [n for n in range(first, last) if self.marks[n] != is_learnt]
        if wrong:
            text = self._text[found.begin : found.end].decode(errors="replace")
            told = "have no loss" if is_learnt else "carry loss"
            raise AssertionError(
                f"{place}: {len(wrong)} of {last - first} tokens {told}: {text[:80]!r}"
            )
        return max(0, last - first)


def _texts(message: Mapping[str, Any], *, with_names: bool) -> Iterator[str]:
    """All that the model wrote in a turn that is long enough.

    Names of tools stand in the list of tools, too.
    """
    texts = [message.get("reasoning_content", ""), message["content"]]
    for call in message.get("tool_calls", ()):
        if with_names:
            texts.append(call["function"]["name"])
        texts += _texts_of_arguments(call["function"]["arguments"])
    return (text for text in texts if len(text.strip()) >= _SHORTEST)


def _texts_of_arguments(arguments: Any) -> list[str]:
    """Those of an object, or of its JSON; what is no JSON object is one text."""
    found = arguments
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments)
        except ValueError:
            found = None
    if not isinstance(found, dict):
        return [arguments]
    return [value for value in found.values() if isinstance(value, str)]


def _byte_table() -> dict[str, int]:
    """The byte that each character of a byte-level token stands for."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table


_BYTES = _byte_table()


def _bytes_of(token: str) -> bytes:
    return b"".join(bytes([_BYTES[char]]) if char in _BYTES else char.encode() for char in token)
