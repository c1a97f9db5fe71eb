"""The tasks that still need work, in the order in which they are dealt, and who is suspected.

All tasks that a worker held when it died are suspects: each may have been the cause. A task that
was held at two deaths, over all starts of the run, is only dealt alone, after all others. If a
worker dies holding nothing else, the task is convicted: it fails, and its neighbours go free.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from runs.tasks import Task

DEATHS_ALONE = 2
"""A task that was held at this many worker deaths is dealt with no other task beside it."""


class TaskQueue:
    """Tasks to deal: first those that came back, then the dataset's, then suspects one by one."""

    def __init__(self, remaining: Iterator[Task], deaths: Mapping[bytes, int]) -> None:
        """`remaining` streams the dataset; `deaths` counts worker deaths by key, and is live."""
        self._remaining = remaining
        self._deaths = deaths
        self._again: deque[Task] = deque()
        self._suspects: deque[Task] = deque()

    def next(self) -> Task | None:
        """The next task that may run beside others."""
        if self._again:
            return self._again.popleft()
        for task in self._remaining:
            if not self._is_suspect(task):
                return task
            self._suspects.append(task)
        return None

    def next_suspect(self) -> Task | None:
        """The next task that must be dealt alone."""
        return self._suspects.popleft() if self._suspects else None

    def put_back(self, task: Task) -> None:
        """Take a task back whose worker died; its death is counted already."""
        (self._suspects if self._is_suspect(task) else self._again).append(task)

    def is_empty(self) -> bool:
        """Whether nothing is left to deal."""
        if not self._again and not self._suspects and (task := self.next()) is not None:
            self._again.append(task)
        return not self._again and not self._suspects

    def _is_suspect(self, task: Task) -> bool:
        return self._deaths.get(task.key, 0) >= DEATHS_ALONE
