"""Divides long work among processes of this machine."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, TypeVar

from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.basics.process import rare_garbage_collection

_MAX_PROCESSES = 8
_REPORT_EVERY = 256

R = TypeVar("R")
T = TypeVar("T")

Advance = Callable[[int], object]
"""Reports how many more items are done."""


def run_in_processes(
    items: Sequence[T],
    do: Callable[[Sequence[T], Advance], R],
    *,
    doing: str,
    enough: int,
    amount: int | None = None,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[R]:
    """Call `do` for each part of `items`; return the results in order. Shows progress as `doing`.

    Each part has a forked process and at least `enough` of the `amount` of work, which is the
    number of items unless it is given, for example their bytes. There are at most as many parts as
    processors. If the work is too little, or other threads run so that a fork is unsafe, this
    process does all of it. Results are pickled. `meanwhile` is called in this process, which
    otherwise waits. Raises the errors of both functions, and `EnvironmentStop` if a process dies.
    """
    amount = len(items) if amount is None else amount
    parts = min(len(os.sched_getaffinity(0)), _MAX_PROCESSES, len(items), amount // enough)
    with LongWork(doing, total=len(items)) as work, rare_garbage_collection():
        if parts < 2 or threading.active_count() > 1 or not hasattr(os, "fork"):
            meanwhile()
            return [do(items, work.advance)]
        size = -(-len(items) // parts)
        children = [_Child(do, items[first : first + size]) for first in range(0, len(items), size)]
        try:
            meanwhile()
            return _collect_results(children, work)
        finally:
            for child in children:
                child.end()


class _Child:
    """A forked process that does one part."""

    def __init__(self, do: Callable[[Sequence[T], Advance], R], items: Sequence[T]) -> None:
        self.pipe, theirs = Pipe(duplex=False)
        self.result: list[Any] = []
        self._pid = os.fork()
        if not self._pid:
            self.pipe.close()
            _run_child(do, items, theirs)
        theirs.close()

    def end(self) -> None:
        """Wait for the process; one whose pipe is closed ends at its next report."""
        self.pipe.close()
        os.waitpid(self._pid, 0)


def _run_child(
    do: Callable[[Sequence[T], Advance], R], items: Sequence[T], pipe: Connection
) -> NoReturn:
    """Do a part in the child, send the result or the error, and end without clean-up."""
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        while done >= _REPORT_EVERY:
            done -= _REPORT_EVERY
            pipe.send_bytes(b"")

    try:
        try:
            answer = pickle.dumps((True, do(items, advance)))
        except Exception as error:
            answer = pickle.dumps((False, error))
        pipe.send_bytes(answer)
        os._exit(0)
    finally:  # even if the answer cannot be sent: no code of the parent may run here
        os._exit(1)


def _collect_results(children: list[_Child], work: LongWork) -> list[Any]:
    open_pipes = {child.pipe: child for child in children}
    while open_pipes:
        for pipe in wait(list(open_pipes)):
            assert isinstance(pipe, Connection)
            try:
                answer = pipe.recv_bytes()
            except EOFError:
                raise EnvironmentStop(
                    "a process that did a part of the work has ended, perhaps for lack of memory; "
                    "free some, or limit the processors (`taskset -c 0`), and try again"
                ) from None
            if not answer:
                work.advance(_REPORT_EVERY)
                continue
            has_worked, result = pickle.loads(answer)  # of our own child
            if not has_worked:
                raise result
            open_pipes.pop(pipe).result.append(result)
    return [child.result[0] for child in children]
