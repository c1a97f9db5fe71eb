"""The steps of an audit by the number of the sample: more repetitions only add samples."""

from __future__ import annotations

from typing import Literal, NamedTuple

Name = Literal["untouched", "reference", "leak", "tamper"]

WAYS = ("conftest", "startup", "path")
"""How an agent forges a result: a plugin of pytest, code that each Python runs at its start, and
programs with the names of those that a check calls or that it runs from the workspace."""


class AuditStep(NamedTuple):
    """What one sample of a row does."""

    name: Name
    repetition: int = 1
    way: str = ""
    """Of `tamper`: one of `WAYS`."""


_ONCE = (
    AuditStep("untouched"),
    AuditStep("reference"),
    AuditStep("leak"),
    *(AuditStep("tamper", 1, w) for w in WAYS),
)
_REPEATED: tuple[Name, ...] = ("untouched", "reference")


def step_of(sample: int) -> AuditStep:
    """The step of a sample, from 0."""
    if sample < len(_ONCE):
        return _ONCE[sample]
    repetition, which = divmod(sample - len(_ONCE), len(_REPEATED))
    return AuditStep(_REPEATED[which], repetition + 2)


def samples_of(repeats: int) -> int:
    """Samples per row, if its check runs this often with and without the solution."""
    return len(_ONCE) + len(_REPEATED) * (repeats - 1)
