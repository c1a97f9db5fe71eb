"""Checks values, and describes those that pydantic rejected for people and models."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, ValidationError

from batch_trajectories.basics.text import clip

_SHOWN_CHARS = 200

UNKNOWN_KEY = "extra_forbidden"
"""The kind of a mistake: no field has that name."""


def _check_pattern(value: str) -> str:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return value


Pattern = Annotated[str, AfterValidator(_check_pattern)]
"""A regular expression that can be compiled."""


class Mistake(NamedTuple):
    """One value that was rejected."""

    keys: tuple[str, ...]
    """Where it is, from the outside in; empty if the value as a whole is wrong."""
    reason: str
    kind: str
    """Pydantic's name for the error."""
    value: Any

    @property
    def key(self) -> str:
        """Where it is, as dotted keys."""
        return ".".join(self.keys)

    def describe(self, place: str = "") -> str:
        """`place.key: reason`, without `place` if it is empty."""
        where = ".".join(filter(None, (place, *self.keys)))
        return f"{where}: {self.reason}" if where else self.reason

    def with_value(self) -> str:
        """The reason and the value that was given; for a missing key that would be all others."""
        if self.kind == "missing":
            return self.reason
        return f"{self.reason} (got {clip(repr(self.value), max_chars=_SHOWN_CHARS)})"


def mistakes_in(error: ValidationError) -> list[Mistake]:
    """All rejected values, in the order of the fields; never empty."""
    mistakes = []
    for mistake in error.errors(include_url=False, include_context=False):
        reason = mistake["msg"].removeprefix("Value error, ")
        mistakes.append(
            Mistake(tuple(map(str, mistake["loc"])), reason, mistake["type"], mistake["input"])
        )
    return mistakes


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Suggest the known name that is most like `name`; "" if none is close."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else ""
