"""The rule by which a prompt gets samples until enough of them have passed.

What runs depends only on how samples ended, never on when. A sample is opened only if it is needed
however those in flight end: while 2 more must pass, 2 samples can be in flight. So the samples that
a prompt has in the end are those that it would have had one after the other: the shortest series
from its first sample on that holds as many as are asked for.
"""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from math import comb
from pathlib import Path
from typing import NamedTuple

import msgspec

from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan, make_sample_task, tasks
from batch_trajectories.records.failures import is_settled
from batch_trajectories.records.index import Index
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.records.records import read_lines
from batch_trajectories.records.scores import apply_later_checks
from batch_trajectories.records.tasks import Task

UNKNOWN, RUNNING, PASSED, NOT_PASSED, UNJUDGED = range(5)
"""Outcomes of a sample: not begun; begun, or failed and to be tried again; the others have ended,
`UNJUDGED` by an error or without a verdict."""

_OPEN = bytes((UNKNOWN, RUNNING))


class StoppingRule(NamedTuple):
    """Number of samples of a prompt that must pass, and the model that each sample gets."""

    passed: int
    """Samples that must pass."""
    failed: int = 0
    """Samples that must not pass, beside them."""
    models: tuple[str, ...] = ()
    """The models of a cascade, the first one first; empty without one."""
    escalate_after: int = 0
    """Samples that a model of the cascade may fail before the next one gets the prompt."""

    def samples_to_run(self, outcomes: bytes | bytearray) -> list[int]:
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

    def sample_model(self, outcomes: bytes | bytearray, sample: int) -> str | None:
        """The model of a sample in `samples_to_run`; None without a cascade."""
        if not self.models:
            return None
        return self.models[self._level(_count_missed(outcomes, sample))]

    def is_met(self, outcomes: bytes | bytearray) -> bool:
        """Whether as many samples as are asked for have passed, and have not."""
        counts = outcomes.count(PASSED), outcomes.count(NOT_PASSED)
        return counts[0] >= self.passed and counts[1] >= self.failed

    def describe(self) -> str:
        """Text for a dry run, after the number of samples."""
        also = f" and {self.failed} have not" if self.failed else ""
        after = plural(self.escalate_after, "failure")
        models = f"; the next model after {after}" if self.models else ""
        return f" at most: until {self.passed} have passed{also}{models}"

    def _knows_model(self, outcomes: bytes | bytearray, sample: int, unended: int) -> bool:
        """Whether the model of a sample is the same however the `unended` ones before it end."""
        missed = _count_missed(outcomes, sample)
        return self._level(missed) == self._level(missed + unended)

    def _level(self, missed: int) -> int:
        return min(missed // self.escalate_after, len(self.models) - 1) if self.models else 0


def _count_missed(outcomes: bytes | bytearray, sample: int) -> int:
    """Number of samples before this one that have ended without passing."""
    return outcomes.count(NOT_PASSED, 0, sample) + outcomes.count(UNJUDGED, 0, sample)


def sample_outcome(passed: bool | None) -> int:
    """The outcome of a sample that has ended; `passed` as `has_passed` says."""
    return UNJUDGED if passed is None else PASSED if passed else NOT_PASSED


def stopping_rule(config: RunConfig) -> StoppingRule:
    """The rule of a run with this config. A fixed number of samples means that all must pass."""
    is_cascade = config.escalate_after is not None
    models = tuple(config.model_weights()) if is_cascade else ()
    passed = config.until_passed or config.num_samples
    return StoppingRule(passed, config.also_failed, models, config.escalate_after or 0)


# What the conversations of each model of a cascade may cost: `--model_budgets`.
#
# A limit on what begins, not on calls: conversations in flight end, as with `--max_cost_usd`. One
# whose cost is unknown counts as the dearest known one.


class _Paid(msgspec.Struct, gc=False):
    model: str | None = None
    cost_usd: float | None = None


class ModelBudgets:
    """The budgets of some models, and what their conversations have cost."""

    def __init__(self, budgets: Mapping[str, float], run_dir: Path) -> None:
        """`budgets` are in dollars; the records of `run_dir` count, replaced ones, too."""
        self._budgets = budgets
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._dearest: dict[str, float] = {}
        """The most that a conversation of a model is known to have cost."""
        self._unknown: Counter[str] = Counter()
        """Conversations of unknown cost."""
        self._waiting: dict[str, set[int]] = {}
        for paid in _read_costs(run_dir) if budgets else ():
            self.add(paid.model, paid.cost_usd)

    def add(self, model: str | None, usd: float | None) -> None:
        """A conversation of a model has ended."""
        if model is None or model not in self._budgets:
            return
        if usd is None:
            self._unknown[model] += 1
        else:
            self._spent[model] += usd
            self._dearest[model] = max(usd, self._dearest.get(model, 0.0))

    def allows(self, model: str | None, number: int) -> bool:
        """Whether a sample may begin; one that may not waits for another start."""
        if model is None or model not in self._budgets:
            return True
        if self._estimated_usd(model) < self._budgets[model]:
            return True
        self._waiting.setdefault(model, set()).add(number)
        return False

    def problem(self) -> str | None:
        """The budgets that are used up, and the tasks that wait for them; None if nothing waits."""
        said = [
            f"{model} has cost ${self._spent[model]:.4f}{self._besides(model)} of "
            f"${self._budgets[model]:g} (model_budgets), and {plural(len(numbers), 'prompt')} "
            "would need it"
            for model, numbers in self._waiting.items()
        ]
        return "; ".join(said) or None

    def _estimated_usd(self, model: str) -> float:
        """Dollars, with one of unknown cost as the dearest known one, else as the whole budget."""
        each = self._dearest.get(model) or self._budgets[model]
        return self._spent[model] + self._unknown[model] * each

    def _besides(self, model: str) -> str:
        unknown = self._unknown[model]
        return f" and {plural(unknown, 'conversation')} of unknown cost" if unknown else ""


def _read_costs(run_dir: Path) -> Iterator[_Paid]:
    decode = msgspec.json.Decoder(_Paid).decode
    return (decode(line) for _, line in read_lines(run_dir / RECORDS_FILE, 0))


# Opens samples of prompts while a run works, as far as they are needed.


class Opening:
    """The samples of a start: the first ones, and further ones that are needed once others have
    ended.

    Holds a byte per sample, and only the tasks that have begun and not ended.
    """

    def __init__(
        self,
        rule: StoppingRule,
        scan: Scan,
        outcomes: bytearray,
        *,
        only: Container[bytes] | None,
        budgets: ModelBudgets | None = None,
    ) -> None:
        """`outcomes` come from earlier starts; `only` limits the work to these task keys, and
        `budgets` to what the conversations of a model may cost."""
        self._rule = rule
        self._scan = scan
        self._outcomes = outcomes
        self._only = only
        self._budgets = budgets
        self._begun: dict[bytes, tuple[int, Task]] = {}

    def begin(self, numbers: Sequence[int]) -> Iterator[Task]:
        """Stream the tasks with these numbers of `samples_to_run`. Raises `DatasetChanged`."""
        had_begun = {number for number in numbers if self._outcomes[number] == RUNNING}
        for number in numbers:
            self._outcomes[number] = RUNNING
        for number, task in zip(numbers, tasks(self._scan, numbers), strict=True):
            task = self._choose_model(number, task)
            if number in had_begun or self._may_begin(number, task):
                yield self._begin(number, task)
            else:
                self._outcomes[number] = UNKNOWN

    def end(self, key: bytes, passed: bool | None, cost_usd: float | None) -> list[Task]:
        """A task has its record; the samples that its prompt needs now and has not begun."""
        number, task = self._begun.pop(key)
        if self._budgets is not None:
            self._budgets.add(task.model, cost_usd)
        self._outcomes[number] = sample_outcome(passed)
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        opened = []
        for sample in self._rule.samples_to_run(of_prompt):
            if of_prompt[sample] == UNKNOWN:
                new = self._choose_model(first + sample, make_sample_task(task, sample))
                is_asked_for = self._only is None or new.key in self._only
                if is_asked_for and self._may_begin(first + sample, new):
                    self._outcomes[first + sample] = RUNNING
                    opened.append(self._begin(first + sample, new))
        return opened

    def problem(self) -> str | None:
        """The reason why samples that are needed do not begin in this start; None if all do."""
        return None if self._budgets is None else self._budgets.problem()

    def _may_begin(self, number: int, task: Task) -> bool:
        return self._budgets is None or self._budgets.allows(task.model, number)

    def _choose_model(self, number: int, task: Task) -> Task:
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        return task._replace(model=self._rule.sample_model(of_prompt, task.sample))

    def _begin(self, number: int, task: Task) -> Task:
        self._begun[task.key] = number, task
        return task


# The outcomes of a run's samples, from its index and journals: a byte per sample.

NOT_NEEDED, ENDED, TO_RUN = range(3)
"""States of a sample: not needed (so far), with a record that stays, or still to run."""


class Samples(NamedTuple):
    """The samples of a run by task number."""

    outcomes: bytearray
    """See `engine.stopping`."""
    states: bytearray
    """`NOT_NEEDED`, `ENDED` or `TO_RUN`."""
    met: int
    """Prompts that have as many as are asked for."""
    used_up: int
    """Other prompts whose samples have all ended."""

    @property
    def not_needed(self) -> int:
        """Number of samples that are no tasks."""
        return self.states.count(NOT_NEEDED)

    def is_task(self, number: int) -> bool:
        """Whether a sample has a record or must run."""
        return self.states[number] != NOT_NEEDED

    def must_run(self, number: int) -> bool:
        """Whether a sample must run, or run again."""
        return self.states[number] == TO_RUN


def read_samples(
    run_dir: Path,
    config: RunConfig,
    scan: Scan,
    index: Index,
    rows: array[int],
    *,
    begun: Container[bytes],
) -> Samples:
    """The samples of a run with their states, given the records in these rows.

    `begun` are the tasks with journaled events. If there are several verdicts, the last one counts,
    even if `check` gave it later.
    """
    rule = stopping_rule(config)
    index = apply_later_checks(run_dir, index)
    outcomes, states = bytearray(len(rows)), bytearray(len(rows))
    endings = zip(index.endings(rows), index.passed(rows), strict=True)
    for number, (ending, passed) in enumerate(endings):
        if ending is not None:
            states[number] = ENDED
        if ending is not None and ending.status != "failed":
            outcomes[number] = sample_outcome(passed)
        elif ending is not None and is_settled(index.entry(rows[number]), config.max_attempts):
            outcomes[number] = UNJUDGED
        elif scan.key(number) in begun:
            outcomes[number] = RUNNING
    met = used_up = 0
    for first in range(0, len(rows), scan.num_samples):
        of_prompt = outcomes[first : first + scan.num_samples]
        for sample in rule.samples_to_run(of_prompt):
            states[first + sample] = TO_RUN
        if rule.is_met(of_prompt):
            met += 1
        else:
            used_up += UNKNOWN not in of_prompt and RUNNING not in of_prompt
    return Samples(outcomes, states, met, used_up)


# pass@k of prompts that got samples until enough of them had passed.
#
# Where sampling stops at a pass, the share of passes is biased: a prompt that passed at once has
# 100 %. The estimate without bias counts the orders in which the samples of a prompt can have
# ended (Girshick, Mosteller and Savage, 1946): the share of those that begin with k failures
# estimates the chance that k samples all fail.


def chance_where_stopped(count: int, passed: int, k: int, rule: StoppingRule) -> float | None:
    """The chance that one of `k` samples passes, of a prompt with `passed` of `count` judged ones.

    Unbiased for all k up to the maximum of samples. None if `rule` did not stop this prompt: its
    number of samples was fixed.
    """
    failed = count - passed
    if passed < rule.passed or failed < rule.failed:
        return None
    if not (orders := _orders(passed, failed, rule)):
        return None  # it has more than the rule asks for: from a start with another one
    return 1 - _orders(passed, failed - k, rule, before=k) / orders


def _orders(passed: int, failed: int, rule: StoppingRule, *, before: int = 0) -> int:
    """The orders of `passed` passes and `failed` failures that stop at the last sample."""
    if failed < 0:
        return 0
    orders = 0
    if passed == rule.passed:  # the last one passed
        orders += comb(passed - 1 + failed, failed)
    if rule.failed and failed + before == rule.failed and failed:  # the last one failed
        orders += comb(passed + failed - 1, passed)
    return orders
