"""The results of checks and scores: rewards, whether a conversation passed, and the sums of both.

Rewards are numbers for a whole conversation, and for each turn of the run's model. A check prints
them, a function returns them and a judge writes them in one form:

    0.5                                     one reward
    {"reward": 0.5, "format": 1}            rewards by name
    {"format": [0, 1, null]}                a reward per turn, null where there is none
    {"reward": 0.5, "turn_rewards": [0, 1]} both; the list has the name `reward`
    {"turn_rewards": {"format": [0, 1]}}    per turn, by name

A record is *checked* if the `check` of its row judged it, or its answer was compared with the
row's `expected` or `target` (`check_expected`): it then has a verdict and a reward. It is *scored*
if a function, a judge or a check gave it a reward. It can be both, or neither. `has_passed` is the
one rule for all counts, filters and exports. Where a check timed out, could not run or said
nothing, its `error` is why (`CHECK_FAILED`): it gave neither, and the answer is not compared.

`scores` in a record are results of functions and judges, oldest first. Each has the keys `source`
(MODULE:FUNCTION or judge:MODEL), `version` (a digest of the code or the prompt), `rewards` (by
name; null if it failed), `error` (null, or why it failed), and `turn_rewards` if it gave any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

from batch_trajectories.basics.text import clip, plural
from batch_trajectories.records.record_types import CheckResult, Record, Score

MAIN = "reward"
"""The name of the reward that counts where no name is given."""
BY_TURN = "turn_rewards"

MAX_REWARDS = 100
_NAME_CHARS = 100


class Rewards(NamedTuple):
    """Rewards by name."""

    by_name: Mapping[str, float]
    """Rewards of the whole conversation."""
    by_turn: Mapping[str, Sequence[float | None]]
    """A reward for each turn of the run's model; None for a turn without one."""

    def to_json(self) -> dict[str, Any]:
        """The rewards in the form of records and scores.jsonl."""
        by_turn = {BY_TURN: dict(self.by_turn)} if self.by_turn else {}
        return {"rewards": dict(self.by_name), **by_turn}


def parse_rewards(value: Any, *, name: str, turns: int | None) -> Rewards:
    """Read rewards in a form that this module describes; those without a name get `name`.

    True and False are 1 and 0; numbers and arrays of numpy and the like count as plain ones. A list
    must have `turns` items, unless that is None. Raises `ValueError` with what is wrong.
    """
    value = _as_plain(value)
    if not isinstance(value, Mapping):
        value = {name: value}
    elif not value:
        raise ValueError("is an empty object; give a number, or an object of named numbers")
    by_name: dict[str, float] = {}
    by_turn: dict[str, Sequence[float | None]] = {}
    for key, given in value.items():
        item = _as_plain(given)
        if key == BY_TURN:
            lists = item if isinstance(item, Mapping) else {MAIN: item}
            by_turn |= {
                _reward_name(one): _turn_rewards(one, items, turns) for one, items in lists.items()
            }
        elif isinstance(item, list | tuple):
            by_turn[_reward_name(key)] = _turn_rewards(key, item, turns)
        else:
            by_name[_reward_name(key)] = _read_reward(item)
    if len(by_name) + len(by_turn) > MAX_REWARDS:
        raise ValueError(f"holds {len(by_name) + len(by_turn)} rewards; the limit is {MAX_REWARDS}")
    return Rewards(by_name, by_turn)


def printed_rewards(value: Any, *, turns: int | None) -> Rewards | None:
    """Rewards in an object that a program printed, which may hold other things as well.

    Only numbers and `turn_rewards` count; among more than `MAX_REWARDS` numbers only `reward`.
    None if there are no rewards. Raises `ValueError` for wrong `turn_rewards`, and for a `reward`
    that is not finite.
    """
    if not isinstance(value, Mapping):
        return None
    if isinstance(main := value.get(MAIN), float):
        finite_number(main)
    numbers = {key: item for key, item in value.items() if _is_reward(key, item)}
    if len(numbers) > MAX_REWARDS:
        numbers = {MAIN: numbers[MAIN]} if MAIN in numbers else {}
    rewards = {**numbers, **({BY_TURN: value[BY_TURN]} if BY_TURN in value else {})}
    return parse_rewards(rewards, name=MAIN, turns=turns) if rewards else None


def read_number(value: Any) -> float:
    """A finite number. Raises `ValueError` with what it is instead."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"holds {_excerpt(value)}, which is not a number")
    return finite_number(value)


def _read_reward(value: Any) -> float:
    """A reward from what a function returned or a model wrote. Raises as `read_number`."""
    plain = _as_plain(value)
    return finite_number(plain) if isinstance(plain, Real | Decimal) else read_number(plain)


def _as_plain(value: Any) -> Any:
    """A number or an array of numpy, PyTorch or the like, as Python has it; else the value."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value


def finite_number(value: Any) -> float:
    """A finite number, also from text. Raises as `read_number`."""
    try:
        number = float(value)
    except (ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"holds {_excerpt(value)}, which is not a finite number")
    return number


def _is_reward(name: Any, value: Any) -> bool:
    try:
        _reward_name(name)
        read_number(value)
    except ValueError:
        return False
    return True


def _reward_name(name: Any) -> str:
    if isinstance(name, str) and name.strip() and len(name) <= _NAME_CHARS:
        return name
    raise ValueError(
        f"names a reward {_excerpt(name)}; give a text of 1 to {_NAME_CHARS} characters"
    )


def _turn_rewards(name: Any, items: Any, turns: int | None) -> list[float | None]:
    items = _as_plain(items)
    if not isinstance(items, list | tuple):
        raise ValueError(
            f"holds {_excerpt(items)} as {name!r}, which is not a list with a reward for each turn"
        )
    if turns is not None and len(items) != turns:
        raise ValueError(
            f"holds {plural(len(items), 'reward')} as {name!r}, and the conversation has "
            f"{plural(turns, 'turn')}"
        )
    return [None if item is None else _read_reward(item) for item in items]


def _excerpt(value: Any) -> str:
    return clip(repr(value), max_chars=100)


THRESHOLD = 0.5
"""The lowest reward that passes, if no check judged the conversation."""

CHECK_FAILED = "check_failed"
"""Stands in counts for a check that itself failed."""

EXPECTED = "expected"
"""The column with the expected answer."""

_SAY_NOTHING = frozenset({"failed", "cancelled", "user_context_exceeded"})
"""Endings that the model is not the reason of: without an answer they say nothing about it."""

_WRONG_ANSWER = "not the expected"
"""The reason of a conversation that ended with a wrong answer begins with this."""


def expected_column(row: Mapping[str, Any]) -> str:
    """`expected`, or `target` (its name in inspect_ai) if a row has only that."""
    return "target" if row.get(EXPECTED) is None and row.get("target") is not None else EXPECTED


def expected_text(row: Mapping[str, Any]) -> str | None:
    """The expected answer as text; None if it is neither text nor a number."""
    expected = row.get(expected_column(row))
    if isinstance(expected, bool) or not isinstance(expected, str | int | float):
        return None
    return str(expected)


def has_passed(
    verdict: bool | None, reward: float | None, threshold: float = THRESHOLD
) -> bool | None:
    """Whether a conversation passed: as its check says, else whether its reward is high enough.

    None if it was neither checked nor scored.
    """
    if verdict is not None or reward is None:
        return verdict
    return reward >= threshold


class Judgement(NamedTuple):
    """The result of the check and the scores of a record."""

    verdict: bool | None
    """The check's; None if there was no check, or it gave only a reward."""
    reward: float | None
    """The reward; None if the record was neither checked nor scored."""
    error: str | None = None
    """The reason why the check gave no result; None if it did, or a score gave the reward."""

    @property
    def passed(self) -> bool | None:
        """Whether the conversation passed; see `has_passed`."""
        return has_passed(self.verdict, self.reward)

    def is_good(self, threshold: float) -> bool | None:
        """Whether the conversation passed by another threshold."""
        return has_passed(self.verdict, self.reward, threshold)


UNCHECKED = Judgement(None, None)
"""The judgement of a record that was neither checked nor scored."""


def judge_record(record: Record, name: str | None = None) -> Judgement:
    """The result of a record's check and scores; without a check, of comparing its answer.

    The reward is the one with this name. Without a name it is `reward`, the number that the check
    gave, else 1.0 or 0.0; if nothing gave a `reward`, it is the first in `record_rewards`. Where
    answers are compared, a conversation that ended without one has not passed.
    """
    if name is None and not record.scores:
        if record.check is None and not (record.options or {}).get("check_expected"):
            return UNCHECKED
        return _judge_by_check(record)
    by_name = record_rewards(record).by_name
    if name is not None:
        return Judgement(None, by_name.get(name))
    verdict, _, error = _judge_by_check(record)
    reward = by_name.get(MAIN)
    # Where the check should have given it, a reward of another name does not stand for it.
    if reward is None and error is None:
        reward = _first_reward(record, by_name)
    return Judgement(verdict, reward, error if reward is None else None)


def _first_reward(record: Record, by_name: Mapping[str, float]) -> float | None:
    """The first reward of the check, else of the first score that gives any.

    None if a score before has failed: another function's reward may have another scale.
    """
    if record.check is not None and record.check.rewards:
        return next(iter(by_name.values()))
    latest = {score.source: score for score in record.scores or ()}  # in order of first attempts
    for score in latest.values():
        if score.error is not None:
            return None
        for name in score.rewards or ():
            return by_name[name]
    return None


def record_rewards(record: Record) -> Rewards:
    """All rewards of a record by name: those of the check, then those of its scores.

    If several have the same name, the last counts.
    """
    by_name: dict[str, float] = {}
    by_turn: dict[str, Sequence[float | None]] = {}
    if record.check is None and not record.scores and not record.options:
        return Rewards(by_name, by_turn)
    if (reward := _judge_by_check(record).reward) is not None:
        by_name[MAIN] = reward
    given: list[CheckResult | Score] = [] if record.check is None else [record.check]
    for one in [*given, *(record.scores or ())]:
        by_name |= one.rewards or {}
        by_turn |= one.turn_rewards or {}
    return Rewards(by_name, by_turn)


def _judge_by_check(record: Record) -> Judgement:
    if (check := record.check) is not None:
        if check.error is not None:
            return Judgement(None, None, check.error)
        verdict = check.passed if isinstance(check.passed, bool) else None
        reward = _finite(check.reward)
        if reward is None and verdict is not None:
            reward = float(verdict)
        if reward is not None:
            return Judgement(verdict, reward)
    return _judge_by_answer(record)


def find_question(record: Record) -> str:
    """Return the first message of the user, which is the task; "" if there is none."""
    return next((message.content for message in record.messages if message.role == "user"), "")


def ended_by_wrong_answer(record: Record) -> bool:
    """Whether a conversation ended because its answer was not the expected one.

    Like a completed conversation it is whole: the model answered, but wrongly.
    """
    if record.status == "wrong_answer":
        return True
    # As earlier versions wrote it.
    reason = record.status_reason or ""
    return record.status == "errors" and reason.startswith(_WRONG_ANSWER)


def has_passed_later_check(record: Record) -> bool:
    """Whether a conversation ended by a wrong answer that a later check found right."""
    return ended_by_wrong_answer(record) and _judge_by_check(record).verdict is True


def _finite(number: Any) -> float | None:
    try:
        return float(number) if isinstance(number, int | float) and math.isfinite(number) else None
    except OverflowError:  # an integer beyond the range of floats
        return None


def _judge_by_answer(record: Record) -> Judgement:
    options = record.options or {}
    if not options.get("check_expected") or record.row.get(expected_column(record.row)) is None:
        return UNCHECKED
    if record.status in _SAY_NOTHING:
        return UNCHECKED
    is_right = record.status == "completed"
    return Judgement(verdict=is_right, reward=float(is_right))


@dataclass(frozen=True, slots=True)
class Checks:
    """Sums over the checks and scores of many records."""

    checked: int
    """Records that a check judged."""
    scored: int
    """Other records with a reward."""
    passed: int
    """Records of both kinds that passed; see `has_passed`."""
    failed: int
    """Records that did not pass."""
    pass_rate: float | None
    """Percentage of passed among passed and failed; None if there are none."""
    mean_reward: float | None
    """The mean over all records with a reward, to six digits; None without any."""
    check_failed: int = 0
    """Records whose check gave no result; they do not count as checked."""


class CheckSums:
    """Adds up judgements."""

    def __init__(self) -> None:
        self._rewards = 0.0
        self._check_failed = self._checked = self._scored = self._passed = 0

    def add(
        self, verdict: bool | None, reward: float | None, *, check_failed: bool = False
    ) -> None:
        """Count a record; `reward` is None if it was neither checked nor scored."""
        if reward is None:
            self._check_failed += check_failed
            return
        if verdict is None:
            self._scored += 1
        else:
            self._checked += 1
        self._passed += has_passed(verdict, reward) is True
        self._rewards += reward

    def merge(self, other: CheckSums) -> None:
        """Add the judgements of `other`."""
        self._rewards += other._rewards
        self._check_failed += other._check_failed
        self._checked += other._checked
        self._scored += other._scored
        self._passed += other._passed

    def sums(self) -> Checks:
        """The sums so far."""
        known = self._checked + self._scored
        return Checks(
            checked=self._checked,
            scored=self._scored,
            passed=self._passed,
            failed=known - self._passed,
            pass_rate=round(100 * self._passed / known, 2) if known else None,
            # The index has rewards in four bytes; further digits would be wrong.
            mean_reward=float(f"{self._rewards / known:.6g}") if known else None,
            check_failed=self._check_failed,
        )


def describe(checks: Checks) -> str:
    """The sums in one line for a person; "" if nothing was checked or scored."""
    failed = checks.check_failed
    without = f"{plural(failed, 'check')} gave no result (`check.error` says why)"
    if checks.pass_rate is None:
        return without if failed else ""
    kinds = {"checked": checks.checked, "scored": checks.scored}
    counted = ", ".join(f"{kind} {number:,}" for kind, number in kinds.items() if number)
    line = f"{counted}: passed {checks.passed:,} ({checks.pass_rate:.1f}%), "
    line += f"did not pass {checks.failed:,}; mean reward {checks.mean_reward:g}"
    if checks.scored:
        line += f"; a conversation without a check passes if its reward is {THRESHOLD:g} or more"
    return f"{line}; {without}" if failed else line
