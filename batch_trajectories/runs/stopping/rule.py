"""The rule by which a prompt gets samples until enough of them have passed.

What runs depends only on how samples ended, never on when. A sample is opened only if it is needed
however those in flight end: while 2 more must pass, 2 samples can be in flight. So the samples that
a prompt has in the end are those that it would have had one after the other: the shortest series
from its first sample on that holds as many as are asked for.
"""

from __future__ import annotations

from typing import NamedTuple

from batch_trajectories.basics.text import plural
from batch_trajectories.runs.config.run_config import RunConfig

UNKNOWN, RUNNING, PASSED, NOT_PASSED, UNJUDGED = range(5)
"""Outcomes of a sample: not begun; begun, or failed and to be tried again; the others have ended,
`UNJUDGED` by an error or without a verdict."""

_OPEN = bytes((UNKNOWN, RUNNING))


class StoppingRule(NamedTuple):
    """How many samples of a prompt must pass, and which model each one gets."""

    passed: int
    """Samples that must pass."""
    failed: int = 0
    """Samples that must not pass, beside them."""
    models: tuple[str, ...] = ()
    """The models of a cascade, the first one first; empty without one."""
    escalate_after: int = 0
    """Samples that a model of the cascade may fail before the next one gets the prompt."""

    def to_run(self, outcomes: bytes | bytearray) -> list[int]:
        """The samples of a prompt that must run now or are running, given all its outcomes.

        Those that are still needed; those that have begun; and those before one that has ended,
        which were needed once, so their record has been lost.
        """
        left = max(0, self.passed - outcomes.count(PASSED))
        left += max(0, self.failed - outcomes.count(NOT_PASSED))
        begun = max(map(outcomes.rfind, (RUNNING, PASSED, NOT_PASSED, UNJUDGED)))
        chosen: list[int] = []
        before = 0
        for sample, outcome in enumerate(outcomes):
            if before >= left and sample > begun:
                break
            if outcome not in _OPEN:
                continue
            is_needed = before < left or sample < begun
            if outcome == RUNNING or (is_needed and self._knows_model(outcomes, sample, before)):
                chosen.append(sample)
            before += 1
        return chosen

    def model_of(self, outcomes: bytes | bytearray, sample: int) -> str | None:
        """The model of a sample in `to_run`; None without a cascade."""
        if not self.models:
            return None
        return self.models[self._level(_missed(outcomes, sample))]

    def is_met(self, outcomes: bytes | bytearray) -> bool:
        """Whether as many samples as are asked for have passed, and have not."""
        counts = outcomes.count(PASSED), outcomes.count(NOT_PASSED)
        return counts[0] >= self.passed and counts[1] >= self.failed

    def describe(self) -> str:
        """For a dry run, after the number of samples."""
        also = f" and {self.failed} have not" if self.failed else ""
        after = plural(self.escalate_after, "failure")
        models = f"; the next model after {after}" if self.models else ""
        return f" at most: until {self.passed} have passed{also}{models}"

    def _knows_model(self, outcomes: bytes | bytearray, sample: int, unended: int) -> bool:
        """Whether the model of a sample is the same however the `unended` ones before it end."""
        missed = _missed(outcomes, sample)
        return self._level(missed) == self._level(missed + unended)

    def _level(self, missed: int) -> int:
        return min(missed // self.escalate_after, len(self.models) - 1) if self.models else 0


def _missed(outcomes: bytes | bytearray, sample: int) -> int:
    """How many samples before this one have ended without passing."""
    return outcomes.count(NOT_PASSED, 0, sample) + outcomes.count(UNJUDGED, 0, sample)


def outcome_of(passed: bool | None) -> int:
    """The outcome of a sample that has ended; `passed` as `has_passed` says."""
    return UNJUDGED if passed is None else PASSED if passed else NOT_PASSED


def rule_of(config: RunConfig) -> StoppingRule:
    """The rule of a run with this config. A fixed number of samples means that all must pass."""
    is_cascade = config.escalate_after is not None
    models = tuple(config.model_weights()) if is_cascade else ()
    passed = config.until_passed or config.num_samples
    return StoppingRule(passed, config.also_failed, models, config.escalate_after or 0)
