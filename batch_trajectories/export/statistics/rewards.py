"""Computes statistics of rewards: by name, in the samples of a prompt, and pass@k.

A group has all samples of one prompt. Group-relative trainers subtract its mean and divide by its
standard deviation, so a group whose samples all have the same reward teaches them nothing. Takes
about a hundred bytes per prompt.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from batch_trajectories.export.statistics import by_model
from batch_trajectories.export.statistics.by_model import ByModel
from batch_trajectories.records.checks import judge_record, record_rewards
from batch_trajectories.records.record_types import Record

if TYPE_CHECKING:
    from batch_trajectories.engine.stopping import StoppingRule

MAX_NAMES = 100
"""Maximum number of names of rewards; further names are not counted."""


class _Numbers:
    """Count, mean and squared differences from the mean of many series of numbers.

    Computed by Welford's method, which is exact for large numbers that are close together.
    """

    def __init__(self) -> None:
        self._counts = array("Q")
        self._means = array("d")
        self._squares = array("d")

    def add(self, series: int, number: float) -> None:
        self._make_room(series)
        self._counts[series] += 1
        before = number - self._means[series]
        self._means[series] += before / self._counts[series]
        self._squares[series] += before * (number - self._means[series])

    def merge(self, other: _Numbers, series: Sequence[int]) -> None:
        """Add the numbers of `other`; `series` has the number here of each of its series.

        Computed by the method of Chan, Golub and LeVeque.
        """
        for theirs, (count, mean, square) in enumerate(
            zip(other._counts, other._means, other._squares, strict=True)
        ):
            if not count:
                continue
            number = series[theirs]
            self._make_room(number)
            before = self._counts[number]
            between = mean - self._means[number]
            self._counts[number] += count
            self._means[number] += between * count / (before + count)
            self._squares[number] += square + between * between * before * count / (before + count)

    def _make_room(self, series: int) -> None:
        if (missing := series + 1 - len(self._counts)) > 0:
            self._counts.extend([0] * missing)
            self._means.extend([0.0] * missing)
            self._squares.extend([0.0] * missing)

    def summaries(self) -> Iterator[tuple[int, float, float | None]]:
        """Count, mean and standard deviation of each series that has numbers.

        The deviation is computed with n - 1; None for a single number.
        """
        for count, mean, square in zip(self._counts, self._means, self._squares, strict=True):
            if count:
                yield count, mean, math.sqrt(square / (count - 1)) if count > 1 else None


class RewardStatistics:
    """The statistics of rewards of the records added so far."""

    def __init__(self, samples: int, rule: StoppingRule | None = None) -> None:
        """`samples` is the number of conversations per prompt; 1: there are no groups.

        With a `rule` of `--until_passed`, `samples` is the maximum.
        """
        self._has_groups = samples > 1
        self._samples, self._rule = samples, rule
        self._by_model = ByModel()
        self._prompts: dict[int, int] = {}
        """The number of each prompt, by a hash of its id."""
        self._all: dict[str, _Numbers] = {}
        self._groups: dict[str, _Numbers] = {}
        self._by_turn: dict[str, _Numbers] = {}
        self._judged = array("I")
        self._passed = array("I")

    def add(self, record: Record) -> None:
        """Count one record."""
        is_good = judge_record(record).passed
        self._by_model.add(record, is_good)
        named, by_turn = record_rewards(record)
        for name, rewards in by_turn.items():
            for reward in rewards:
                if reward is not None:
                    _add(self._by_turn, name, 0, reward)
        if not named:
            return
        prompt = self._prompt_number(record.prompt_id) if self._has_groups else 0
        for name, reward in named.items():
            _add(self._all, name, 0, reward)
            if self._has_groups:
                _add(self._groups, name, prompt, reward)
        if self._has_groups and is_good is not None:
            self._count_outcomes(prompt, 1, is_good)

    def merge(self, other: RewardStatistics) -> None:
        """Add the records of `other`, which come later."""
        self._by_model.merge(other._by_model)
        prompts = [self._prompts.setdefault(key, len(self._prompts)) for key in other._prompts]
        for ours, theirs, series in (
            (self._all, other._all, [0]),
            (self._by_turn, other._by_turn, [0]),
            (self._groups, other._groups, prompts),
        ):
            for name, numbers in theirs.items():
                if name in ours or len(ours) < MAX_NAMES:
                    ours.setdefault(name, _Numbers()).merge(numbers, series)
        outcomes = zip(prompts, other._judged, other._passed, strict=False)
        for prompt, judged, passed in outcomes:
            self._count_outcomes(prompt, judged, passed)

    def _count_outcomes(self, prompt: int, judged: int, passed: int) -> None:
        if (missing := prompt + 1 - len(self._judged)) > 0:
            self._judged.extend([0] * missing)
            self._passed.extend([0] * missing)
        self._judged[prompt] += judged
        self._passed[prompt] += passed

    def to_json(self) -> dict[str, Any]:
        """The value of `rewards` in `stats --json`.

        - `by_name`: records, mean, std; and of prompts with at least two samples the number of
          groups, the mean of their standard deviations, and the number with equal rewards
        - `turns`: turns, mean, std of rewards of single turns
        - `pass_at`: percent by k
        - `stopped_at`: only with `--until_passed`
        - `models`: only with several models; see `ByModel`
        """
        rule = self._rule
        models = self._by_model.to_json(() if rule is None else rule.models)
        return {
            "by_name": {name: self._figures(name) for name in self._all},
            "turns": {
                name: _describe_spread(numbers, "turns") for name, numbers in self._by_turn.items()
            },
            "pass_at": self._pass_rates(),
            **({} if rule is None else {"stopped_at": [rule.passed, rule.failed]}),
            **({"models": models} if models else {}),
        }

    def _prompt_number(self, prompt_id: str) -> int:
        return self._prompts.setdefault(hash(prompt_id), len(self._prompts))

    def _figures(self, name: str) -> dict[str, Any]:
        figures = _describe_spread(self._all[name], "records")
        if not self._has_groups:
            return figures
        stds = [std for _, _, std in self._groups[name].summaries() if std is not None]
        return {
            **figures,
            "groups": len(stds),
            "mean_group_std": _round_number(math.fsum(stds) / len(stds)) if stds else None,
            "equal_groups": sum(std == 0.0 for std in stds),
        }

    def _pass_rates(self) -> dict[str, float]:
        """pass@k in percent by k: the mean over all prompts with at least k judged samples.

        For one prompt it is the chance that k of its samples, drawn at random, include one that
        passed. If a prompt was stopped because enough samples had passed, the estimate is corrected
        for this.
        """
        rule = self._rule
        if rule is not None and rule.models and rule.passed > 1:
            return {}  # samples of several models are no draws of one kind
        rates: dict[str, float] = {}
        max_samples = max(self._judged, default=0)
        if max_samples and rule is not None:
            max_samples = self._samples
        ks = [1 << bit for bit in range(max_samples.bit_length())]
        for k in dict.fromkeys([*ks, max_samples]) if max_samples else ():
            numbers = zip(self._judged, self._passed, strict=True)
            chances = [
                chance
                for count, passed in numbers
                if count and (chance := pass_chance(count, passed, k, rule)) is not None
            ]
            if chances:
                rates[str(k)] = round(100 * math.fsum(chances) / len(chances), 2)
        return rates


def as_text(figures: Mapping[str, Any]) -> Iterator[str]:
    """Format the statistics as lines; none without rewards."""
    if by_name := figures["by_name"]:
        grouped = any("groups" in one for one in by_name.values())
        more = f"{'groups':>10}{'std in group':>14}{'all equal':>11}" if grouped else ""
        yield f"{'reward':<24}{'tasks':>10}{'mean':>12}{'std':>12}{more}"
        for name, one in by_name.items():
            more = (
                f"{one['groups']:>10,}{_number(one['mean_group_std']):>14}"
                f"{one['equal_groups']:>11,}"
                if grouped
                else ""
            )
            yield (
                f"{name:<24}{one['records']:>10,}{_number(one['mean']):>12}"
                f"{_number(one['std']):>12}{more}"
            )
    if turns := figures["turns"]:
        yield f"{'reward per turn':<24}{'turns':>10}{'mean':>12}{'std':>12}"
        for name, one in turns.items():
            yield (
                f"{name:<24}{one['turns']:>10,}{_number(one['mean']):>12}{_number(one['std']):>12}"
            )
    if figures["pass_at"]:
        rates = ", ".join(f"pass@{k} {percent:g}%" for k, percent in figures["pass_at"].items())
        passed, failed = figures.get("stopped_at", (0, 0))
        also = f" and {failed} not passed" if failed else ""
        yield rates + (f" (corrected: samples stopped at {passed} passed{also})" if passed else "")
    yield from by_model.as_text(figures.get("models", ()))


def pass_chance(count: int, passed: int, k: int, rule: StoppingRule | None) -> float | None:
    """The chance that `k` samples of a prompt include one that passed; None if unknown.

    `count` samples were judged, `passed` of them passed. If `rule` may have stopped the prompt, the
    estimate is corrected for this.
    """
    if rule is not None:
        from batch_trajectories.engine.stopping import chance_where_stopped

        if (chance := chance_where_stopped(count, passed, k, rule)) is not None:
            return chance
    if k > count:
        return None
    failed = count - passed
    return 1 - math.prod((failed - drawn) / (count - drawn) for drawn in range(min(k, failed + 1)))


def _add(numbers: dict[str, _Numbers], name: str, series: int, number: float) -> None:
    if name in numbers or len(numbers) < MAX_NAMES:
        numbers.setdefault(name, _Numbers()).add(series, number)


def _describe_spread(numbers: _Numbers, unit: str) -> dict[str, Any]:
    ((count, mean, std),) = numbers.summaries()
    return {
        unit: count,
        "mean": _round_number(mean),
        "std": None if std is None else _round_number(std),
    }


def _round_number(number: float) -> float:
    return float(f"{number:.6g}")


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.4g}"
