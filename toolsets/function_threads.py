"""Threads for the functions of users, which may block, compute, or never return.

Nothing here outlives the process: functions that still run when it ends are cut off.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from batch_trajectories.basics.errors import HostError

_FEW_THREADS = 8
_MEASURE_EVERY_S = 0.05

T = TypeVar("T")


class _Call(Generic[T]):
    """A function that waits for a thread, runs in one, or has returned."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.context = copy_context()
        self.future: Future[T] = Future()
        self.began_at: float | None = None
        self.has_ended = False


class FunctionThreads:
    """Threads that call functions: up to 8, and more only while these do not compute.

    More threads that compute would be no faster and would slow down the event loop. If the machine
    refuses a thread, calls wait for the others.
    """

    def __init__(self) -> None:
        self._waiting: SimpleQueue[_Call[Any]] = SimpleQueue()
        self._lock = threading.Lock()
        self._thread_count = 0
        self._open_count = 0
        """Calls that wait or run."""
        self._late: set[_Call[Any]] = set()
        self._measured_at = self._computed_s = 0.0
        self._are_computing = False

    @property
    def late_count(self) -> int:
        """The number of running calls that were given up; each holds a thread until it returns."""
        return len(self._late)

    def are_all_late(self) -> bool:
        """Whether calls that were given up hold all threads, so no call can begin."""
        return len(self._late) >= self._thread_count

    def submit(self, function: Callable[[], T]) -> _Call[T]:
        """Call `function` in a thread, in the context variables of the caller.

        Raises `RuntimeError` if the machine refuses the first thread.
        """
        call = _Call(function)
        with self._lock:
            if self._thread_count <= self._open_count:
                if self._thread_count < _FEW_THREADS:
                    self._start_thread()
                else:
                    self._measure()
            self._open_count += 1
        self._waiting.put(call)
        return call

    def add_thread(self) -> None:
        """Start a thread for a call that waits, unless one is idle or the others compute."""
        with self._lock:
            self._measure()
            if self._thread_count < self._open_count and not self._are_computing:
                self._start_thread()

    def give_up(self, call: _Call[Any]) -> None:
        """Count `call` as late until it returns; nobody waits for its result any more."""
        with self._lock:
            if not call.has_ended:
                self._late.add(call)

    def _measure(self) -> None:
        now = time.monotonic()
        if (passed_s := now - self._measured_at) < _MEASURE_EVERY_S:
            return
        computed_s = time.process_time() - time.thread_time()
        self._are_computing = computed_s - self._computed_s > passed_s / 2
        self._measured_at, self._computed_s = now, computed_s

    def _start_thread(self) -> None:
        # A function that never returns must not keep the process from ending: a daemon.
        thread = threading.Thread(target=self._run_calls, name="function", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._thread_count:  # no thread will ever make the call
                raise
        else:
            self._thread_count += 1

    def _run_calls(self) -> None:
        while True:
            self._run(self._waiting.get())

    def _run(self, call: _Call[Any]) -> None:
        if not call.future.set_running_or_notify_cancel():
            self._end(call)
            return
        call.began_at = time.monotonic()
        try:
            result = call.context.run(call.function)
        except BaseException as error:
            self._end(call)
            call.future.set_exception(error)
        else:
            self._end(call)
            call.future.set_result(result)

    def _end(self, call: _Call[Any]) -> None:
        """Count the thread as idle: before the caller knows the result, as it may call again."""
        with self._lock:
            self._open_count -= 1
            call.has_ended = True
            self._late.discard(call)


_THREADS = FunctionThreads()
"""The threads of this process, apart from those of the event loop, which functions could block."""


def _renew_threads() -> None:
    global _THREADS
    _THREADS = FunctionThreads()


os.register_at_fork(after_in_child=_renew_threads)  # a fork has none of the threads


class LateCall(TimeoutError):
    """A call exceeded its time limit and still runs; `future` is done once it returns."""

    def __init__(self, future: Future[Any]) -> None:
        super().__init__()
        self.future = future


async def call_in_thread(function: Callable[[], T], *, timeout_s: float | None = None) -> T:
    """Call a function in a thread; return what it returns, raise what it raises.

    Raises `LateCall` after it has run for `timeout_s` seconds (None: no limit); waiting for a
    thread does not count. Raises `HostError` if functions that exceed their time limit hold all
    threads.
    """
    threads = _THREADS
    call = threads.submit(function)
    running = asyncio.wrap_future(call.future)
    wait_s: float | None = _MEASURE_EVERY_S
    try:
        while not (await asyncio.wait([running], timeout=wait_s))[0]:
            if call.began_at is not None:
                wait_s = timeout_s and call.began_at + timeout_s - time.monotonic()
                if wait_s is not None and wait_s <= 0:
                    raise LateCall(call.future)
                continue
            threads.add_thread()
            if threads.are_all_late():
                raise HostError(
                    f"no thread is free for a tool: all are held by {threads.late_count} calls of "
                    "functions that exceeded --tool_timeout_s and have not returned"
                )
    except BaseException:
        if not call.future.cancel():  # it runs on
            threads.give_up(call)
        running.cancel()
        raise
    return running.result()
