"""What of a record not every trainer minds: which rows are refused for it, and how to keep them.

A flaw is found when a record is read, once for all formats. Each format refuses rows for the flaws
that it cannot hold; for others it does so unless the user accepts them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from export.conversation.row_json import Token
from export.conversation.validity import Reason, Rejected

Tokens = Literal["template", "all"]

_TAGS = {Reason.MARKER_IN_TEXT, Reason.MARKER_IN_ARGUMENTS, Reason.MARKER_IN_RESULT}
_NO_OBJECT = {Reason.ARGUMENTS_NOT_JSON, Reason.ARGUMENTS_NOT_OBJECT}
_ANYWHERE = {Reason.CONTROL_TOKEN, Reason.UNKNOWN_TOOL}

HOLDS: Mapping[str, frozenset[Reason]] = {
    # Calls are text there: what is no object is told as a string.
    "hermes": frozenset(_ANYWHERE | _NO_OBJECT),
    "openai": frozenset(_ANYWHERE | _TAGS),
    # Its loader cuts calls and results out of the text by their tags.
    "llamafactory": frozenset(_ANYWHERE),
    "dpo": frozenset(_ANYWHERE | _TAGS),
    "kto": frozenset(_ANYWHERE | _TAGS),
    "atif": frozenset(_ANYWHERE | _TAGS),
}
"""The flaws that each format can hold."""


class Flaw(NamedTuple):
    """One of them, with the words of `Rejected`."""

    reason: Reason
    detail: str
    token: Token | None = None
    """The token that it is about, if it is about one."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which flaws are let pass."""

    accepts: frozenset[Reason] = frozenset()
    tokens: Tokens = "template"
    """`template`: what only chat templates are made of; `all`: also what is markup to most
    tokenizers and structure to some (`<s>`, `[INST]`)."""

    def of(self, format_name: str) -> Tolerance:
        """The same for one format, as far as it can hold the flaws.

        Documents hold all that they can of themselves: nothing tokenizes them.
        """
        held = HOLDS[format_name]
        return replace(self, accepts=held if format_name == "atif" else self.accepts & held)

    def refuses(self, flaw: Flaw) -> bool:
        """Whether a row is refused for a flaw."""
        if flaw.reason in self.accepts:
            return False
        return flaw.token is None or self.minds(flaw.token)

    def minds(self, token: Token) -> bool:
        """Whether a row is refused for a token."""
        if Reason.CONTROL_TOKEN in self.accepts:
            return False
        return self.tokens == "all" or not token.is_markup

    def refuse(self, flaws: Iterable[Flaw]) -> None:
        """Raise Rejected for the first flaw that is not let pass."""
        for flaw in flaws:
            if self.refuses(flaw):
                raise Rejected(flaw.reason, flaw.detail)


STRICT = Tolerance()
"""Only what any format holds."""


def refuse_everywhere(flaws: Sequence[Flaw], tolerances: Iterable[Tolerance]) -> None:
    """Raise Rejected, as the first of several formats does, where none of them takes the flaws."""
    refused: Rejected | None = None
    for tolerance in tolerances:
        try:
            tolerance.refuse(flaws)
        except Rejected as rejected:
            refused = refused or rejected
        else:
            return
    if refused is not None:
        raise refused


def accepted(names: Iterable[Any]) -> frozenset[Reason]:
    """The reasons with these names."""
    return frozenset(map(Reason, names))


def how_to_keep(reason: str, format_name: str) -> str:
    """How a row that a format refused for this reason can be had, "" where it cannot."""
    if reason in HOLDS.get(format_name, ()):
        return f"--accept_rows={reason} keeps such rows"
    holders = [name for name, held in HOLDS.items() if reason in held]
    if not holders:
        return ""
    return (
        f"{format_name} cannot hold this; export --format={holders[0]} --accept_rows={reason} can"
    )
