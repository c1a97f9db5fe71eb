"""A worker process as its parent sees it: its pipe, what it holds, when it was last heard."""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from batch.prompts import Task
from batch.worker import worker_main
from batch.worker_setup import WorkerSetup

Inbox = queue.SimpleQueue[tuple["WorkerProcess | None", bytes | None]]
"""What workers say, in order: (worker, message), (worker, None) once it is gone."""


_TRACKER_NEEDS = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")


def start_tracker_without_secrets() -> None:
    """Start the helper process of `multiprocessing` with an environment that holds no keys.

    It inherits the environment of whoever starts it, and unlike ours it can be read by every
    process of this user.
    """
    environment = dict(os.environ)
    try:
        for name in environment.keys() - set(_TRACKER_NEEDS):
            del os.environ[name]
        resource_tracker.ensure_running()
    finally:
        os.environ.update(environment)


@dataclass(eq=False)
class WorkerProcess:
    """One worker. Two threads move its bytes, so that a worker that is stopped in mid-message
    holds up nobody else."""

    number: int
    process: BaseProcess
    connection: Connection
    inbox: Inbox
    ready: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    held: dict[bytes, tuple[Task, int]] = field(default_factory=dict)
    """The tasks that it was dealt and has not ended, by key, each with its attempt."""
    alone: bool = False
    """It holds one suspect and is dealt nothing else."""
    _outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def start(cls, setup: WorkerSetup, inbox: Inbox) -> WorkerProcess:
        """Start a process for `setup`; what it says goes to `inbox`."""
        start_tracker_without_secrets()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker_main, args=(theirs, setup), name=f"worker-{setup.number}", daemon=True
        )
        process.start()
        theirs.close()
        worker = cls(setup.number, process, ours, inbox)
        for target in (worker._listen, worker._talk):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            worker._threads.append(thread)
        return worker

    def send(self, message: bytes) -> None:
        """Hand over a message; never blocks."""
        self._outbox.put(message)

    def bury(self) -> None:
        """Release what a dead process leaves; its threads end by themselves once it is gone."""
        self._outbox.put(None)
        self.process.join()
        for thread in self._threads:
            thread.join()
        self.connection.close()

    def _listen(self) -> None:
        try:
            while True:
                self.inbox.put((self, self.connection.recv_bytes()))
        except (EOFError, OSError):
            self.inbox.put((self, None))

    def _talk(self) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                self.connection.send_bytes(message)
        except OSError:
            return  # its death is noticed by the listening thread
