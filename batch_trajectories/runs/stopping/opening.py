"""Opens samples of prompts while a run works, as far as they are needed."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from batch_trajectories.runs.dataset.scan import Scan, sample_of, tasks
from batch_trajectories.runs.stopping.rule import RUNNING, UNKNOWN, StoppingRule, outcome_of
from batch_trajectories.runs.store.tasks import Task


class Opening:
    """The samples of a start: those to run at first, and those that follow from how they end.

    Holds a byte per sample, and of tasks only those that have begun and not ended.
    """

    def __init__(
        self, rule: StoppingRule, scan: Scan, outcomes: bytearray, *, only: Container[bytes] | None
    ) -> None:
        """`outcomes` are those of earlier starts; `only` limits the work to these task keys."""
        self._rule = rule
        self._scan = scan
        self._outcomes = outcomes
        self._only = only
        self._begun: dict[bytes, tuple[int, Task]] = {}

    def begin(self, numbers: Sequence[int]) -> Iterator[Task]:
        """Stream the tasks with these numbers, which `to_run` gave. Raises `DatasetChanged`."""
        for number in numbers:
            self._outcomes[number] = RUNNING
        for number, task in zip(numbers, tasks(self._scan, numbers), strict=True):
            yield self._begin(number, task)

    def end(self, key: bytes, passed: bool | None) -> list[Task]:
        """A task has its record; the samples that its prompt needs now and has not begun."""
        number, task = self._begun.pop(key)
        self._outcomes[number] = outcome_of(passed)
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        opened = []
        for sample in self._rule.to_run(of_prompt):
            if of_prompt[sample] == UNKNOWN:
                new = sample_of(task, sample)
                if self._only is None or new.key in self._only:
                    self._outcomes[first + sample] = RUNNING
                    opened.append(self._begin(first + sample, new))
        return opened

    def _begin(self, number: int, task: Task) -> Task:
        first = number - task.sample
        of_prompt = self._outcomes[first : first + self._scan.num_samples]
        task = task._replace(model=self._rule.model_of(of_prompt, task.sample))
        self._begun[task.key] = number, task
        return task
