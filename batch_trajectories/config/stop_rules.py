"""The rules of `--stop_if`: when a run that gives nothing to train on stops by itself."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

Sign = Literal["no_pass", "no_call", "failed", "rejected", "same_ending"]
"""The names of the signs that a run gives nothing to train on."""

MIN_TASKS = 30
"""Minimum number of conversations for a share; with fewer, a share says nothing."""

NEVER = "none"
"""The value that turns off both stopping and warnings."""

_COUNTED: Mapping[str, str] = {
    "no_pass": "conversations were judged and none passed",
    "no_call": "conversations ended and none called a tool",
}
_SHARED: Mapping[str, str] = {
    "failed": "of the conversations failed",
    "rejected": "of the conversations give no row",
    "same_ending": "of the conversations ended for one same reason, and not as completed",
}
_RULE = re.compile(r"(?P<sign>\w+):(?P<number>\d+(?:\.\d+)?)(?P<percent>%?)")


class StopRule(msgspec.Struct, frozen=True):
    """One rule of `--stop_if`; either `count` or `share` is set."""

    sign: Sign
    count: int | None = None
    """Stop after this many conversations, if all of them show the sign."""
    share: float | None = None
    """Stop when at least this share (0 to 1) shows the sign, after `MIN_TASKS` conversations."""


def parse_stop_rules(texts: Sequence[str]) -> tuple[StopRule, ...]:
    """Read rules such as `no_pass:30` and `failed:50%`; none for ("none",).

    Raises `ValueError` that says what a rule may be.
    """
    if tuple(texts) == (NEVER,):
        return ()
    return tuple(map(_parse_rule, texts))


def _parse_rule(text: str) -> StopRule:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no rule; {_explain()}")
    sign, number, is_share = match["sign"], float(match["number"]), bool(match["percent"])
    if sign in _COUNTED:
        if is_share or number < 1 or number != int(number):
            raise ValueError(f"{text!r}: {sign} needs a number of conversations, as {sign}:30")
        return StopRule(sign, count=int(number))  # type: ignore[arg-type] # is in the table
    if sign in _SHARED:
        if not is_share or not 0 < number <= 100:
            raise ValueError(f"{text!r}: {sign} needs a share from 1% to 100%, as {sign}:90%")
        return StopRule(sign, share=number / 100)  # type: ignore[arg-type] # is in the table
    raise ValueError(f"{text!r}: {sign!r} is unknown; {_explain()}")


def _explain() -> str:
    counted = (f"{sign}:N (N {what})" for sign, what in _COUNTED.items())
    shared = (f"{sign}:P% (P% {what})" for sign, what in _SHARED.items())
    return f"give one or more of {', '.join([*counted, *shared])}, or none"


def check_stop_rules(texts: tuple[str, ...]) -> tuple[str, ...]:
    """After-validator of the option: return `texts`. Raises `ValueError` for a wrong rule."""
    parse_stop_rules(texts)
    return texts
