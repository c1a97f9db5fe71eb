"""Opens samples of prompts while a run works, as far as they are needed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING

from batch_trajectories.runs.dataset.scan import Scan, sample_of, tasks
from batch_trajectories.runs.stopping.rule import RUNNING, UNKNOWN, StoppingRule, outcome_of
from batch_trajectories.runs.store.tasks import Task

if TYPE_CHECKING:
    from batch_trajectories.runs.stopping.model_budgets import ModelBudgets


class Opening:
    """The samples of a start: those to run at first, and those that follow from how they end.

    Holds a byte per sample, and of tasks only those that have begun and not ended.
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
        """`outcomes` are those of earlier starts; `only` limits the work to these task keys, and
        `budgets` by what the conversations of a model have cost."""
        self._rule = rule
        self._scan = scan
        self._outcomes = outcomes
        self._only = only
        self._budgets = budgets
        self._begun: dict[bytes, tuple[int, Task]] = {}

    def begin(self, numbers: Sequence[int]) -> Iterator[Task]:
        """Stream the tasks with these numbers, which `to_run` gave. Raises `DatasetChanged`."""
        had_begun = {number for number in numbers if self._outcomes[number] == RUNNING}
        for number in numbers:
            self._outcomes[number] = RUNNING
        for number, task in zip(numbers, tasks(self._scan, numbers), strict=True):
            task = self._with_model(number, task)
            if number in had_begun or self._may_begin(number, task):
                yield self._begin(number, task)
            else:
                self._outcomes[number] = UNKNOWN

    def end(self, key: bytes, passed: bool | None, cost_usd: float | None) -> list[Task]:
        """A task has its record; the samples that its prompt needs now and has not begun."""
        number, task = self._begun.pop(key)
        if self._budgets is not None:
            self._budgets.add(task.model, cost_usd)
        self._outcomes[number] = outcome_of(passed)
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        opened = []
        for sample in self._rule.to_run(of_prompt):
            if of_prompt[sample] == UNKNOWN:
                new = self._with_model(first + sample, sample_of(task, sample))
                is_asked_for = self._only is None or new.key in self._only
                if is_asked_for and self._may_begin(first + sample, new):
                    self._outcomes[first + sample] = RUNNING
                    opened.append(self._begin(first + sample, new))
        return opened

    def problem(self) -> str | None:
        """Why samples that are needed do not begin in this start; None if all do."""
        return None if self._budgets is None else self._budgets.problem()

    def _may_begin(self, number: int, task: Task) -> bool:
        return self._budgets is None or self._budgets.allows(task.model, number)

    def _with_model(self, number: int, task: Task) -> Task:
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        return task._replace(model=self._rule.model_of(of_prompt, task.sample))

    def _begin(self, number: int, task: Task) -> Task:
        self._begun[task.key] = number, task
        return task
