"""Workers as processes of this machine, connected by pipes.

The command line forks its workers before it plans: they share what this process has imported, and
none of what it opens or loads later (the user's tools, the lock, the records). Workers that replace
others, those of a program that calls `run()`, and all where forking is unsafe (other threads,
macOS) are new interpreters.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType

from batch_trajectories.basics.process import STOPPING, die_with_parent
from batch_trajectories.engine.executor import Inbox, WorkerHandle
from batch_trajectories.engine.messages import WorkerSetup
from batch_trajectories.engine.worker.worker import run_worker, worker_main
from batch_trajectories.records.files import list_directory

_TRACKER_NEEDS = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH")


@contextmanager
def limited_environment(names: Collection[str]) -> Iterator[dict[str, str]]:
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
    with limited_environment(_TRACKER_NEEDS):
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


_forked: deque[tuple[BaseProcess, Connection]] = deque()
"""Forked processes that wait for a `WorkerSetup`, each with its pipe."""


def fork_workers(count: int) -> None:
    """Fork up to `count` workers, which wait until a `LocalExecutor` of this process needs them.

    Call it before anything is open or loaded that workers must not share. Where this process has
    other threads, whose locks a fork could leave locked for good, it does nothing.
    """
    threads = Path("/proc/self/task")
    if sys.platform != "linux" or threading.active_count() > 1 or len(list_directory(threads)) > 1:
        return
    gc.freeze()  # what is shared now stays shared: the collector does not write to it
    context = multiprocessing.get_context("fork")
    for _ in range(count):
        ours, theirs = context.Pipe()
        others = [ours, *(connection for _, connection in _forked)]
        process = context.Process(
            target=_wait_for_setup, args=(theirs, os.getpid(), others), daemon=True
        )
        # A signal to all processes must not run a handler of this one in the new one.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        _forked.append((process, ours))


def _wait_for_setup(connection: Connection, parent: int, others: Sequence[Connection]) -> None:
    """Entry point of a forked worker. `others` are the parent's ends of pipes."""
    die_with_parent(parent)
    for number in STOPPING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    for other in others:
        other.close()
    try:
        setup = pickle.loads(connection.recv_bytes())
    except EOFError:
        return
    multiprocessing.current_process().name = worker_name(setup)
    run_worker(connection, setup)


def worker_name(setup: WorkerSetup) -> str:
    """The name of a worker in logs and messages."""
    return f"worker-{setup.number}"


class LocalExecutor:
    """Starts workers as processes of this machine."""

    def start(self, setup: WorkerSetup, inbox: Inbox) -> WorkerHandle:
        """See `Executor`."""
        process, ours = self._take_forked(setup) or self._spawn(setup)
        return WorkerProcess(
            setup.number, worker_name(setup), inbox, process=process, connection=ours
        )

    def _take_forked(self, setup: WorkerSetup) -> tuple[BaseProcess, Connection] | None:
        while _forked:
            process, ours = _forked.popleft()
            try:
                ours.send_bytes(pickle.dumps(setup))
            except OSError:  # it has died since
                _end(process, ours)
                continue
            return process, ours
        return None

    def _spawn(self, setup: WorkerSetup) -> tuple[BaseProcess, Connection]:
        start_tracker_without_secrets()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=worker_main, args=(theirs, setup), name=worker_name(setup), daemon=True
        )
        start_without_main(process)
        theirs.close()
        return process, ours

    def close(self) -> None:
        """See `Executor`."""
        while _forked:
            _end(*_forked.popleft())


def _end(process: BaseProcess, connection: Connection) -> None:
    process.kill()
    process.join()
    connection.close()


@dataclass(eq=False, kw_only=True)
class WorkerProcess(WorkerHandle):
    """A worker that is a child process."""

    process: BaseProcess
    connection: Connection

    def __post_init__(self) -> None:
        """Start sending and receiving; if that fails, end the process."""
        try:
            self._move_bytes(self.connection)
        except BaseException:
            self.kill()
            self.reap()
            raise

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
