"""The results of checks, and their sums.

A record is *checked* if the `check` of its row judged it, its answer was compared with the row's
`expected` (`check_expected`), or a function or a judge scored it. It then has a *reward*, and
*passed* or not if it was checked in one of the first two ways. Where a check timed out, could not
run or said nothing, its `error` is why (`CHECK_FAILED`): the record has neither, and its answer
is not compared.

`scores` in a record are results of functions and judges, oldest first. Each has the keys `source`
(MODULE:FUNCTION or judge:MODEL), `version` (a digest of the code or the prompt), `rewards` (by
name; null if it failed), `error` (null, or why it failed), and `turn_rewards` if it gave any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runs.store.rewards import BY_TURN, MAIN, Rewards
from toolsets.text import plural

CHECK_FAILED = "check_failed"
"""Stands in counts for a check that itself failed."""

_WRONG_ANSWER = "not the expected"
"""The reason of a conversation that ended with a wrong answer begins with this."""


class Judgement(NamedTuple):
    """The result of a check."""

    passed: bool | None
    """None if there was no check, or it gave only a reward."""
    reward: float | None
    """None if there was no check."""
    error: str | None = None
    """Why the check gave no result, where nothing else gave a reward of its name."""

    def is_good(self, threshold: float) -> bool | None:
        """Whether it passed; if unknown, whether its reward reaches `threshold`."""
        if self.passed is not None or self.reward is None:
            return self.passed
        return self.reward >= threshold


_UNCHECKED = Judgement(None, None)


def judgement_of(record: Mapping[str, Any], name: str | None = None) -> Judgement:
    """The result of a record's check; without a check, whether its answer was as expected.

    The reward is the one with this name. Without a name it is `reward`, the number that the check
    gave, else 1.0 or 0.0; if nothing gave a `reward`, it is the first in `rewards_of`. A
    conversation that reached a limit before its answer was compared has neither.
    """
    if name is None and not record.get("scores"):
        if not record.get("check") and not (record.get("options") or {}).get("check_expected"):
            return _UNCHECKED
        return _checked(record)
    named = rewards_of(record).named
    if name is not None:
        return Judgement(None, named.get(name))
    passed, _, error = _checked(record)
    # Where the check should have given it, a reward of another name does not stand for it.
    reward = named.get(MAIN, None if error is not None else next(iter(named.values()), None))
    return Judgement(passed, reward, error if reward is None else None)


def rewards_of(record: Mapping[str, Any]) -> Rewards:
    """All rewards of a record by name: those of the check, then those of its scores.

    Of several with one name the last counts.
    """
    named: dict[str, float] = {}
    by_turn: dict[str, Sequence[float | None]] = {}
    if (reward := _checked(record).reward) is not None:
        named[MAIN] = reward
    check = record.get("check")
    for given in ([check] if isinstance(check, dict) else []) + list(record.get("scores") or ()):
        named |= given.get("rewards") or {}
        by_turn |= given.get(BY_TURN) or {}
    return Rewards(named, by_turn)


def _checked(record: Mapping[str, Any]) -> Judgement:
    check = record.get("check")
    if isinstance(check, dict):
        if (error := check.get("error")) is not None:
            return Judgement(None, None, str(error))
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

    Like a completed conversation it is whole: the model answered, but wrongly.
    """
    reason = record.get("status_reason") or ""
    return record["status"] == "errors" and reason.startswith(_WRONG_ANSWER)


def _finite(number: Any) -> float | None:
    try:
        return float(number) if isinstance(number, int | float) and math.isfinite(number) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _by_expected_answer(record: Mapping[str, Any]) -> Judgement:
    options = record.get("options") or {}
    if not options.get("check_expected") or record["row"].get("expected") is None:
        return _UNCHECKED
    if record["status"] == "completed":
        return Judgement(passed=True, reward=1.0)
    was_wrong = any(note.get("reason") == "expected" for note in record.get("notes") or ())
    if record["status"] == "errors" and (was_wrong or ended_by_wrong_answer(record)):
        return Judgement(passed=False, reward=0.0)
    return _UNCHECKED


@dataclass(frozen=True, slots=True)
class Checks:
    """Sums over the checks of many records."""

    checked: int
    """Records with a check."""
    passed: int
    failed: int
    """Records that did not pass."""
    pass_rate: float | None
    """Percentage of passed among passed and failed; None if there are none."""
    mean_reward: float | None
    """Over all checked records, to six digits."""
    check_failed: int = 0
    """Records whose check gave no result; they do not count as checked."""


class CheckSums:
    """Adds up judgements."""

    def __init__(self) -> None:
        self._rewards = 0.0
        self._check_failed = 0
        self._passed: dict[bool | None, int] = {None: 0, True: 0, False: 0}

    def add(self, passed: bool | None, reward: float | None, *, check_failed: bool = False) -> None:
        """Count a record; `reward` is None if it was not checked."""
        if reward is None:
            self._check_failed += check_failed
            return
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
            # The index has rewards in four bytes; further digits would be wrong.
            float(f"{self._rewards / checked:.6g}") if checked else None,
            self._check_failed,
        )


def describe(checks: Checks) -> str:
    """The sums in one line for a person; "" if nothing was checked."""
    failed = checks.check_failed
    without = f"{plural(failed, 'check')} failed and gave no reward (see `check.error`)"
    if not checks.checked:
        return without if failed else ""
    line = f"checked {checks.checked:,}"
    if checks.pass_rate is not None:
        line += f": passed {checks.passed:,} ({checks.pass_rate:.1f}%)"
        line += f", did not pass {checks.failed:,}"
        if unjudged := checks.checked - checks.passed - checks.failed:
            line += f", only a reward {unjudged:,}"
    line += f"; mean reward {checks.mean_reward:g}"
    return f"{line}; {without}" if failed else line
