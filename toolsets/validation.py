"""What pydantic found wrong with values, for the messages that people and models read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError

from toolsets.text import clip

_SHOWN_CHARS = 200


UNKNOWN_KEY = "extra_forbidden"
"""The kind of a mistake where there is nothing of that name."""


class Mistake(NamedTuple):
    """One value that was rejected."""

    keys: tuple[str, ...]
    """Where it is, from the outside in; empty where the value as a whole is wrong."""
    reason: str
    kind: str
    """Pydantic's name for the error."""
    value: Any

    @property
    def key(self) -> str:
        """Where it is, as one word."""
        return ".".join(self.keys)

    def describe(self, place: str = "") -> str:
        """`place.key: reason`; the key alone where there is no place."""
        where = ".".join(filter(None, (place, *self.keys)))
        return f"{where}: {self.reason}" if where else self.reason

    def with_value(self) -> str:
        """The reason and the value that was given."""
        return f"{self.reason} (got {clip(repr(self.value), max_chars=_SHOWN_CHARS)})"


def mistakes_in(error: ValidationError) -> list[Mistake]:
    """All that was rejected, in the order of the fields; never empty."""
    found = []
    for one in error.errors(include_url=False, include_context=False):
        reason = one["msg"].removeprefix("Value error, ")
        found.append(Mistake(tuple(map(str, one["loc"])), reason, one["type"], one["input"]))
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name most like `name`; "" if none is."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
