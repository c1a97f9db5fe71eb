"""Workers as processes of this machine, each behind a pipe."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import ModuleType

from runs.executors.base import Inbox, WorkerHandle
from runs.protocol.worker_setup import WorkerSetup
from runs.worker.worker import worker_main

_TRACKER_NEEDS = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")


@contextmanager
def environment_of(names: Collection[str]) -> Iterator[dict[str, str]]:
    """Only these variables, for processes that are started meanwhile; gives the whole of it.

    They inherit the environment of whoever starts them, and unlike ours it can be read by every
    process of this user.
    """
    environment = dict(os.environ)
    try:
        for name in environment.keys() - set(names):
            del os.environ[name]
        yield environment
    finally:
        os.environ.update(environment)


def start_tracker_without_secrets() -> None:
    """Start the helper process of `multiprocessing` with an environment that holds no keys."""
    with environment_of(_TRACKER_NEEDS):
        resource_tracker.ensure_running()


def start_without_main(process: BaseProcess) -> None:
    """Start a process that does not import the main module of this one again.

    It needs nothing of it, and a script that starts a run outside of an
    `if __name__ == "__main__"` would start it once more in each process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # one that comes from no file
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main


class LocalExecutor:
    """Starts workers as processes of this machine."""

    def start(self, setup: WorkerSetup, inbox: Inbox) -> WorkerHandle:
        """See `Executor`."""
        start_tracker_without_secrets()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        name = f"worker-{setup.number}"
        process = context.Process(target=worker_main, args=(theirs, setup), name=name, daemon=True)
        start_without_main(process)
        theirs.close()
        worker = WorkerProcess(setup.number, name, inbox, process=process, connection=ours)
        worker.begin()
        return worker

    def close(self) -> None:
        """See `Executor`."""


@dataclass(eq=False, kw_only=True)
class WorkerProcess(WorkerHandle):
    """A worker that is a child process."""

    process: BaseProcess
    connection: Connection

    def begin(self) -> None:
        """Listen and talk to it."""
        self._move_bytes(self.connection)

    def is_alive(self) -> bool:
        """See `WorkerHandle`."""
        return self.process.is_alive()

    def kill(self) -> None:
        """See `WorkerHandle`."""
        self.process.kill()

    def reap(self) -> None:
        """See `WorkerHandle`."""
        self._outbox.put(None)
        self.process.join()
        for thread in self._threads:
            thread.join()
        self.connection.close()
