"""Starts an MCP server with a given part of the environment; it does not outlive the caller.

A script, run in a new session as: PARENT_PID NAME,NAME,... COMMAND ARGUMENT... It first writes its
process id to standard error, since the SDK does not report it. On Linux the server is a child of
this process, which waits for it: once the server has ended or the parent is dead, this process
kills and reaps all processes that are left. On other systems the server replaces this process; the
end of its input is the only sign that the caller died.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main() -> None:
    """Become the server, or its parent."""
    parent, names, *command = sys.argv[1:]
    os.write(2, b"%d\n" % os.getpid())
    if sys.platform == "linux":
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        _fork_server(int(parent))
    environment = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    # Python ignores these two signals, and the server would inherit that.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}")


def _fork_server(parent: int) -> None:
    """Return in a child process only; the parent process waits for the child and exits."""
    # Signals to the group are for the server, which may need time to end.
    signals = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    launcher = os.getpid()
    server = os.fork()
    if server == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before prctl
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    for descriptor in range(3):
        os.close(descriptor)
    prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == parent:
        _wait_for(server, signals)
    _kill_the_rest()
    os._exit(0)


def _wait_for(server: int, signals: set[signal.Signals]) -> None:
    """Return once the server has ended or the parent is dead."""
    while (number := signal.sigwait(signals)) != signal.SIGUSR1:
        if number == signal.SIGCHLD:
            # Reaps orphans of the server, too.
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if ended == server:
                    return


def _kill_the_rest() -> None:
    """Kill and reap all descendants. As a subreaper, this process adopts each of them."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            try:
                left = own.read_text().split()
            except FileNotFoundError:  # this kernel has no such file
                os.killpg(0, signal.SIGKILL)
            for pid in left:
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
