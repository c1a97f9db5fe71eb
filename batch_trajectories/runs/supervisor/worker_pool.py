"""The parts of one start, and its workers: start them, choose one with room, watch them, shut them
down."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from batch_trajectories.runs.config.models import Setups
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.directory.run_dir import RunDir
from batch_trajectories.runs.executors.base import Executor, Inbox, WorkerHandle
from batch_trajectories.runs.protocol.messages import WorkerSetup, pack
from batch_trajectories.runs.store.failures import FailureFile
from batch_trajectories.runs.store.journal import Inflight
from batch_trajectories.runs.store.records import RecordFile
from batch_trajectories.runs.supervisor.budget import RunBudget
from batch_trajectories.runs.supervisor.limits import RunLimits
from batch_trajectories.runs.supervisor.progress import Progress
from batch_trajectories.runs.supervisor.refusals import Refusals
from batch_trajectories.runs.supervisor.task_queue import TaskQueue

if TYPE_CHECKING:
    from batch_trajectories.runs.batch_api.service import BatchService
    from batch_trajectories.runs.supervisor.key_service import KeyService

log = logging.getLogger(__name__)

KILL_AFTER_GRACE_S = 5.0
_START_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
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
    held: dict[bytes, dict[str, list[Any]]]
    """Amounts that earlier starts reserved for calls in batches, by task and call."""
    batches: BatchService | None
    keys: KeyService | None
    refusals: Refusals


class WorkerPool:
    """The live workers of one start."""

    def __init__(self, executor: Executor, config: RunConfig, *, first_number: int) -> None:
        self._executor = executor
        self._config = config
        self._numbers = itertools.count(first_number)
        self._checked_at = time.monotonic()
        self.inbox: Inbox = queue.SimpleQueue()
        self.workers: list[WorkerHandle] = []

    @property
    def held(self) -> int:
        """Number of tasks assigned to all workers."""
        return sum(len(worker.held) for worker in self.workers)

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

    def with_room(self, left: int) -> WorkerHandle | None:
        """The worker with the most room while `left` tasks have not ended, None if all are full."""
        # Near the end each worker gets only its share, so no worker idles beside a full one.
        share = -(-left // self._config.num_workers)
        limit = min(self._config.agents_per_worker, max(1, share))
        able = [w for w in self.workers if w.ready and not w.isolated and len(w.held) < limit]
        return min(able, key=lambda worker: len(worker.held), default=None)

    def idle(self) -> list[WorkerHandle]:
        """Live workers without tasks. A suspect assigned to a dead one would be blamed for its
        death."""
        return [w for w in self.workers if w.ready and not w.held and w.is_alive()]

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
                log.warning("%s is silent and will be replaced", worker.name)
                worker.heard_at = now
                worker.kill()

    def broadcast(self, message: bytes) -> None:
        """Send a message to all workers."""
        for worker in self.workers:
            worker.send(message)

    def shut_down(self, *, is_done: bool) -> Iterator[tuple[WorkerHandle, bytes]]:
        """Have all workers exit; yields their last messages.

        `is_done`: no later start needs their files.
        """
        self.broadcast(pack("exit", done=is_done))
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
            worker.held.clear()
            worker.reap()
        self.workers = []
