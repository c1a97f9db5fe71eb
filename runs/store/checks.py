"""What judged a conversation and what came of it, and the sums of that.

A record is *checked* where something judged it: the `check` of its row, or the comparison of its
answer with the row's `expected` (`check_expected`). Then it *passed* or not, and has a *reward*.
What a check could not judge, because it could not be run, is a failed task and has neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

_WRONG_ANSWER = "not the expected"
"""How the reason of a conversation begins that ended because its answer was wrong."""


class Judgement(NamedTuple):
    """What judged a record, if anything did."""

    passed: bool | None
    """None where nothing judged it, or only gave a reward."""
    reward: float | None
    """None where nothing judged it."""

    def is_good(self, threshold: float) -> bool | None:
        """Whether it passed; where that is not known, whether its reward reaches `threshold`."""
        if self.passed is not None or self.reward is None:
            return self.passed
        return self.reward >= threshold


_UNCHECKED = Judgement(None, None)


def judgement_of(record: Mapping[str, Any]) -> Judgement:
    """What the check of a record says; without one, whether its answer was the expected one.

    The reward is the number that the check gave, else 1.0 or 0.0. A conversation whose answer was
    to be compared and that ended at a bound before it was has neither: it was not judged.
    """
    check = record.get("check")
    if isinstance(check, dict):
        passed = check.get("passed")
        passed = passed if isinstance(passed, bool) else None
        reward = _finite(check.get("reward"))
        if reward is None and passed is not None:
            reward = float(passed)
        if reward is not None:
            return Judgement(passed, reward)
    return _by_expected_answer(record)


def ended_by_wrong_answer(record: Mapping[str, Any]) -> bool:
    """Whether a conversation ended because its answer was not the expected one.

    It is as whole as one that is completed: its model answered, and was wrong.
    """
    reason = record.get("status_reason") or ""
    return record["status"] == "errors" and reason.startswith(_WRONG_ANSWER)


def _finite(number: Any) -> float | None:
    try:
        return float(number) if isinstance(number, int | float) and math.isfinite(number) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def _by_expected_answer(record: Mapping[str, Any]) -> Judgement:
    options = record.get("options") or {}
    if not options.get("check_expected") or record["row"].get("expected") is None:
        return _UNCHECKED
    if record["status"] == "completed":
        return Judgement(passed=True, reward=1.0)
    told = any(note.get("reason") == "expected" for note in record.get("notes") or ())
    if record["status"] == "errors" and (told or ended_by_wrong_answer(record)):
        return Judgement(passed=False, reward=0.0)
    return _UNCHECKED


@dataclass(frozen=True, slots=True)
class Checks:
    """The judgements of many records, added up."""

    checked: int
    """Records that something judged."""
    passed: int
    failed: int
    """Those of them that did not pass."""
    pass_rate: float | None
    """Percentage of those that passed or failed; None without any."""
    mean_reward: float | None
    """Of all that were checked, to six digits."""


class CheckSums:
    """Adds up judgements."""

    def __init__(self) -> None:
        self._rewards = 0.0
        self._passed: dict[bool | None, int] = {None: 0, True: 0, False: 0}

    def add(self, passed: bool | None, reward: float) -> None:
        """Count a record that was checked."""
        self._passed[passed] += 1
        self._rewards += reward

    def sums(self) -> Checks:
        """The sums so far."""
        passed, failed = self._passed[True], self._passed[False]
        checked = passed + failed + self._passed[None]
        return Checks(
            checked,
            passed,
            failed,
            round(100 * passed / (passed + failed), 2) if passed + failed else None,
            # The index holds rewards in four bytes: more digits would not be those of the records.
            float(f"{self._rewards / checked:.6g}") if checked else None,
        )


def describe(checks: Checks) -> str:
    """The sums in a line for a person; blank where nothing was checked."""
    if not checks.checked:
        return ""
    told = f"checked {checks.checked:,}"
    if checks.pass_rate is not None:
        told += f": passed {checks.passed:,} ({checks.pass_rate:.1f}%)"
        told += f", did not pass {checks.failed:,}"
    return f"{told}; mean reward {checks.mean_reward:g}"
