"""Running as process 1, as in a container without an init.

Processes that lose their parent become children of process 1. One that does not wait for them
collects the dead until the machine, or the container, has no room for another process.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn

# Those that a process raises by a fault of its own must reach it at once.
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


def leave_first_place() -> None:
    """Where this is process 1, go on in a child, while process 1 waits for whoever ends.

    Call it before anything is open or running. A child of our own is known only to whoever started
    it, so one process cannot both start children and wait for those of others.
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
    """Pass signals on to `child` and wait for all that end; end as it ends."""
    while True:
        info = signal.sigwaitinfo(waited)
        if info.si_signo == signal.SIGCHLD:
            _collect(child)
        elif info.si_code <= 0:  # sent by a process; a terminal's reach the child too
            os.kill(child, info.si_signo)


def _collect(child: int) -> None:
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # `child` is there to be waited for
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)
