"""The workers of a run: starting them, choosing one with room, missing them, letting them go."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import time
from collections.abc import Iterator
from dataclasses import replace

from runs.config.run_config import RunConfig
from runs.executors.base import Executor, Inbox, WorkerHandle
from runs.protocol.messages import pack
from runs.protocol.worker_setup import WorkerSetup

log = logging.getLogger(__name__)

KILL_AFTER_GRACE_S = 5.0
_START_TIMEOUT_S = 120.0


class WorkerPool:
    """The living workers of one start."""

    def __init__(self, executor: Executor, config: RunConfig, *, first_number: int) -> None:
        self._executor = executor
        self._config = config
        self._numbers = itertools.count(first_number)
        self._checked_at = time.monotonic()
        self.inbox: Inbox = queue.SimpleQueue()
        self.workers: list[WorkerHandle] = []

    @property
    def held(self) -> int:
        """How many tasks they hold."""
        return sum(len(worker.held) for worker in self.workers)

    @property
    def is_ready(self) -> bool:
        """All can be dealt tasks."""
        return all(worker.ready for worker in self.workers)

    def start(self, setup: WorkerSetup) -> None:
        """Start one more."""
        setup = replace(setup, number=next(self._numbers), parent_pid=os.getpid())
        self.workers.append(self._executor.start(setup, self.inbox))

    def reap(self, worker: WorkerHandle) -> bool:
        """Strike out one that is gone; False where that was done before."""
        if worker not in self.workers:
            return False
        self.workers.remove(worker)
        worker.reap()
        return True

    def with_room(self, left: int) -> WorkerHandle | None:
        """The one with the most room, while `left` tasks have not ended."""
        # Near the end every worker gets its share, so that none idles beside a full one.
        share = -(-left // self._config.num_workers)
        most = min(self._config.agents_per_worker, max(1, share))
        able = [w for w in self.workers if w.ready and not w.isolated and len(w.held) < most]
        return min(able, key=lambda worker: len(worker.held), default=None)

    def idle(self) -> list[WorkerHandle]:
        """Those that hold nothing, and live: one that died idle must not make a convict of a
        task that it never saw."""
        return [w for w in self.workers if w.ready and not w.held and w.is_alive()]

    def kill_silent(self) -> None:
        """Kill those that have not been heard for too long."""
        now = time.monotonic()
        if now - self._checked_at > self._config.heartbeat_timeout_s / 2:
            # This process itself stood still (suspended, or a disk that hung): nobody could
            # be heard, so nobody was silent.
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

    def tell(self, message: bytes) -> None:
        """Send to all."""
        for worker in self.workers:
            worker.send(message)

    def shut_down(self, *, is_done: bool) -> Iterator[tuple[WorkerHandle, bytes]]:
        """Let them close what they have open; gives what they say last.

        `is_done` tells that no next start needs what they keep.
        """
        self.tell(pack("exit", done=is_done))
        leaving = {w for w in self.workers if w.is_alive() and not w.is_waiting}
        deadline = time.monotonic() + KILL_AFTER_GRACE_S
        while leaving and (wait_s := deadline - time.monotonic()) > 0:
            try:
                leaver, message = self.inbox.get(timeout=wait_s)
            except queue.Empty:
                return
            if leaver is None:
                return  # interrupted once more
            if message is None:
                leaving.discard(leaver)
            else:
                yield leaver, message

    def kill(self) -> None:
        """End all at once."""
        for worker in self.workers:
            worker.kill()
            worker.held.clear()
            worker.reap()
        self.workers = []
