"""The parts of one start, and its workers: start them, choose one with room, watch them, shut them
down."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec.structs import replace

from batch_trajectories.config.endpoints import Cost
from batch_trajectories.config.models import Setups
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import Executor, Inbox, WorkerHandle
from batch_trajectories.engine.messages import (
    CollectCall,
    Exit,
    FromWorker,
    ToWorker,
    WorkerSetup,
)
from batch_trajectories.engine.run_dir import RunDir
from batch_trajectories.engine.supervisor.budget import RunBudget
from batch_trajectories.engine.supervisor.limits import RunLimits
from batch_trajectories.engine.supervisor.progress import Progress
from batch_trajectories.engine.supervisor.refusals import Refusals
from batch_trajectories.records.failures import FailureFile
from batch_trajectories.records.journal import Inflight
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.tasks import SUSPECT_DEATHS, Task

if TYPE_CHECKING:
    from batch_trajectories.engine.stopping import Opening
    from batch_trajectories.engine.supervisor.key_service import KeyService


# The queue of tasks that need work, and of suspects.
#
# When a worker dies, each of its tasks may have been the cause. A task that was in flight at two
# deaths, over all starts of the run, is a suspect: it runs isolated in a worker, after all
# others. If that worker dies, too, the task fails; other tasks are not blamed.


class TaskQueue:
    """The tasks to run: first those that were put back, then the dataset's, then suspects one by
    one."""

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
        """Failure class and model of the tasks that failed in this start, by key. The class is
        "" for tasks that run again. The journals stay for the next start."""
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

    def note_failure(self, key: bytes, failure: str, model: str | None) -> None:
        """Note that an attempt of a task has failed; the task has attempts left."""
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

    def queue_followers(self, key: bytes, passed: bool | None, cost_usd: float | None) -> int:
        """Queue the samples that a prompt needs after the end of a task; return their number."""
        # They come before other prompts, so that few prompts are open at a time.
        opened = [] if self._opening is None else self._opening.end(key, passed, cost_usd)
        self._again.extend(opened)
        return len(opened)

    def problem(self) -> str | None:
        """The reason why needed tasks do not begin in this start; None if all do."""
        return None if self._opening is None else self._opening.problem()

    def is_empty(self) -> bool:
        """Whether no task is left to assign."""
        if not self._again and not self._suspects and (task := self.next()) is not None:
            self._again.append(task)
        return not self._again and not self._suspects

    def _is_suspect(self, task: Task) -> bool:
        return self._deaths.get(task.key, 0) >= SUSPECT_DEATHS


log = logging.getLogger(__name__)

KILL_AFTER_GRACE_S = 5.0
_START_TIMEOUT_S = 120.0


class CallCollector(Protocol):
    """Collects the calls of all workers and has them answered later, as by a Batch API.

    Its methods never wait: the work is done in a thread.
    """

    problem: str | None
    """The reason why the run has to stop; None if it need not."""

    def ask(self, worker: WorkerHandle, call: CollectCall, /) -> None:
        """Take a worker's call; the worker gets the answer."""
        ...

    def leave(self, task: bytes, /) -> None:
        """Note that nobody waits for the calls of a task now: its worker has died."""
        ...

    def forget(self, task: bytes, /) -> None:
        """Drop the calls of a task that has its record."""
        ...

    def tick(
        self, in_flight: int | None, *, ended_share: float, say: Callable[[str], object]
    ) -> None:
        """Do the periodic duties.

        `in_flight` is the number of assigned tasks, None while more are assigned. `ended_share` is
        the share of tasks that have ended; `say` gets messages for the user.
        """
        ...

    def stop(self) -> None:
        """Send nothing more; what was sent continues at the provider."""
        ...

    def describe(self) -> str:
        """Text for the progress line; "" if no call is collected."""
        ...

    def close(self) -> None:
        """End the thread."""
        ...


class Start(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of one start of a run."""

    run_dir: RunDir
    config: RunConfig
    executor: Executor
    setups: Setups
    setup: WorkerSetup
    queue: TaskQueue
    """The tasks that need work."""
    records: RecordFile
    failures: FailureFile
    inflight: Inflight
    progress: Progress
    limits: RunLimits
    budget: RunBudget
    reserved: dict[bytes, dict[str, Cost]]
    """Amounts that earlier starts reserved for calls in batches, by task and call."""
    batches: CallCollector | None
    keys: KeyService | None
    refusals: Refusals


class WorkerPool:
    """The live workers of one start."""

    def __init__(self, executor: Executor, config: RunConfig, *, first_number: int) -> None:
        self._executor = executor
        self._config = config
        self._numbers = itertools.count(first_number)
        self._checked_at = time.monotonic()
        self.conversations_per_worker = config.agents_per_worker
        """Maximum conversations of a worker; people may change it while the run works."""
        self.inbox: Inbox = queue.SimpleQueue()
        self.workers: list[WorkerHandle] = []

    @property
    def assigned(self) -> int:
        """Number of tasks assigned to all workers."""
        return sum(len(worker.assigned) for worker in self.workers)

    @property
    def is_ready(self) -> bool:
        """Whether all workers accept tasks."""
        return all(worker.ready for worker in self.workers)

    def start(self, setup: WorkerSetup) -> None:
        """Start another worker."""
        setup = replace(setup, number=next(self._numbers), parent_pid=os.getpid())
        self.workers.append(self._executor.start(setup, self.inbox))

    def reap(self, worker: WorkerHandle) -> bool:
        """Remove a dead worker; False if it was removed before."""
        if worker not in self.workers:
            return False
        self.workers.remove(worker)
        worker.reap()
        return True

    def find_room(self, left: int) -> WorkerHandle | None:
        """The worker with the most room while `left` tasks have not ended, None if all are full."""
        # Near the end each worker gets only its share, so no worker idles beside a full one.
        share = -(-left // self._config.num_workers)
        limit = min(self.conversations_per_worker, max(1, share))
        able = [w for w in self.workers if w.ready and not w.isolated and len(w.assigned) < limit]
        return min(able, key=lambda worker: len(worker.assigned), default=None)

    def idle(self) -> list[WorkerHandle]:
        """Live workers without tasks. A suspect assigned to a dead one would be blamed for its
        death."""
        return [w for w in self.workers if w.ready and not w.assigned and w.is_alive()]

    def kill_silent(self) -> None:
        """Kill workers that have been silent for too long."""
        now = time.monotonic()
        if now - self._checked_at > self._config.heartbeat_timeout_s / 2:
            # This process itself did not run (it was suspended, or a disk hung), so it could not
            # receive heartbeats.
            for worker in self.workers:
                worker.heard_at = now
        self._checked_at = now
        for worker in self.workers:
            patience_s = self._config.heartbeat_timeout_s
            if not worker.ready:
                patience_s = max(patience_s, _START_TIMEOUT_S)
            if now - worker.heard_at > patience_s and not worker.is_waiting:
                log.warning(
                    "%s does not answer any more; it is ended, and another worker takes its place.",
                    worker.name,
                )
                worker.heard_at = now
                worker.kill()

    def broadcast(self, message: ToWorker) -> None:
        """Send a message to all workers."""
        for worker in self.workers:
            worker.send(message)

    def shut_down(self, *, is_done: bool) -> Iterator[tuple[WorkerHandle, FromWorker]]:
        """Have all workers exit; yields their last messages.

        `is_done`: no later start needs their files.
        """
        self.broadcast(Exit(is_done))
        leaving = {w for w in self.workers if w.is_alive() and not w.is_waiting}
        deadline = time.monotonic() + KILL_AFTER_GRACE_S
        while leaving and (wait_s := deadline - time.monotonic()) > 0:
            try:
                worker, message = self.inbox.get(timeout=wait_s)
            except queue.Empty:
                return
            if worker is None:
                return  # interrupted again
            if message is None:
                leaving.discard(worker)
            else:
                yield worker, message

    def kill(self) -> None:
        """Kill all workers."""
        for worker in self.workers:
            worker.kill()
            worker.assigned.clear()
            worker.reap()
        self.workers = []
