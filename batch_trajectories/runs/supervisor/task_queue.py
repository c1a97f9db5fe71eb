"""The queue of tasks that need work, and of suspects.

When a worker dies, each of its tasks may have been the cause. A task that was in flight at two
deaths, over all starts of the run, is a suspect: it runs isolated in a worker, after all others.
If that worker dies, too, the task fails; other tasks are not blamed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING

from batch_trajectories.runs.store.tasks import DEATHS_OF_A_SUSPECT, Task

if TYPE_CHECKING:
    from batch_trajectories.runs.stopping.opening import Opening


class TaskQueue:
    """First tasks that were put back, then those of the dataset, then suspects one by one."""

    def __init__(
        self,
        remaining: Iterator[Task],
        deaths: Mapping[bytes, int],
        *,
        find: Callable[[Container[bytes]], Iterator[Task]],
        opening: Opening | None = None,
    ) -> None:
        """`remaining` streams the dataset; `deaths` counts worker deaths by task key and may grow
        during the run. `find` reads the tasks with these keys. `opening` gives samples that are
        needed only once others have ended."""
        self._remaining = remaining
        self._deaths = deaths
        self._find = find
        self._opening = opening
        self.failed_now: dict[bytes, tuple[str, str | None]] = {}
        """The failure class of tasks that failed in this start ("" for those that run again), and
        their models; their journals stay for the next start."""
        self._again: deque[Task] = deque()
        self._suspects: deque[Task] = deque()

    def next(self) -> Task | None:
        """The next task that may run beside others, None if there is none now."""
        if self._again:
            return self._again.popleft()
        for task in self._remaining:
            if not self._is_suspect(task):
                return task
            self._suspects.append(task)
        return None

    def next_suspect(self) -> Task | None:
        """The next task that must run isolated."""
        return self._suspects.popleft() if self._suspects else None

    def put_back(self, task: Task) -> None:
        """Queue a task again whose worker has died; `deaths` includes this death."""
        (self._suspects if self._is_suspect(task) else self._again).append(task)

    def failed(self, key: bytes, failure: str, model: str | None) -> None:
        """An attempt of a task has failed, with this failure class; it has attempts left."""
        self.failed_now[key] = failure, model

    def retry(self) -> dict[bytes, str]:
        """Queue the tasks that failed in this start again; return their failure classes by key.

        Raises `DatasetChanged`.
        """
        failed = {key: failure for key, (failure, _) in self.failed_now.items() if failure}
        for task in [*self._find(failed)]:
            model = self.failed_now[task.key][1]
            self.put_back(task._replace(model=model))
            self.failed_now[task.key] = "", model
        return failed

    def ended(self, key: bytes, passed: bool | None, cost_usd: float | None) -> int:
        """A task has its record; queue the samples that its prompt needs now, return their number.

        They come before other prompts, so that few are open at a time.
        """
        opened = [] if self._opening is None else self._opening.end(key, passed, cost_usd)
        self._again.extend(opened)
        return len(opened)

    def problem(self) -> str | None:
        """Why tasks that are needed do not begin in this start; None if all do."""
        return None if self._opening is None else self._opening.problem()

    def is_empty(self) -> bool:
        """Whether no task is left to assign."""
        if not self._again and not self._suspects and (task := self.next()) is not None:
            self._again.append(task)
        return not self._again and not self._suspects

    def _is_suspect(self, task: Task) -> bool:
        return self._deaths.get(task.key, 0) >= DEATHS_OF_A_SUSPECT
