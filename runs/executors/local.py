"""Workers as processes of this machine, connected by pipes."""

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
    """Reduce the environment to these variables inside a `with` block; yields the whole of it.

    Processes started there inherit it, and every process of this user can read theirs.
    """
    environment = dict(os.environ)
    try:
        for name in environment.keys() - set(names):
            del os.environ[name]
        yield environment
    finally:
        os.environ.update(environment)


def start_tracker_without_secrets() -> None:
    """Start the resource tracker of `multiprocessing` with an environment without keys."""
    with environment_of(_TRACKER_NEEDS):
        resource_tracker.ensure_running()


def start_without_main(process: BaseProcess) -> None:
    """Start a process that does not import the main module of this one.

    It does not need it, and a script without `if __name__ == "__main__"` would start its run again
    in each process.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")  # a module without a file is not imported
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
        return WorkerProcess(setup.number, name, inbox, process=process, connection=ours)

    def close(self) -> None:
        """See `Executor`."""


@dataclass(eq=False, kw_only=True)
class WorkerProcess(WorkerHandle):
    """A worker that is a child process."""

    process: BaseProcess
    connection: Connection

    def __post_init__(self) -> None:
        """Start sending and receiving."""
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
