"""Run as process 1, as in a container without an init.

Processes that lose their parent become children of process 1. If it does not wait for them, dead
processes accumulate until no new process can start.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

# Signals by faults of this process itself must reach it at once.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


def leave_first_place() -> None:
    """If this is process 1, continue in a child, while process 1 waits for all children.

    Call it before anything is open or running. Waiting for any child would take away exit statuses
    from code that has started children itself, so this needs a process of its own.
    """
    if os.getpid() != 1:
        return
    waited = signal.valid_signals() - _FAULTS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    _wait_for_all(child, waited)


def _wait_for_all(child: int, waited: set[signal.Signals]) -> NoReturn:
    """Pass signals on to `child`, reap all processes that end, and exit like `child`."""
    while True:
        info = signal.sigwaitinfo(waited)
        if info.si_signo == signal.SIGCHLD:
            _collect(child)
        elif info.si_code <= 0:  # sent by a process; those of a terminal reach the child, too
            os.kill(child, info.si_signo)


def _collect(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # never fails: `child` exists
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
