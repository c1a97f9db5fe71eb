"""Starts an MCP server with no more than the environment it may have, bound to its caller's life.

A script, run as: PARENT_PID NAME,NAME,... COMMAND ARGUMENT... in a session of its own. First a line
with its process id goes to the standard error, since the SDK tells nobody. On Linux the server is
a child of this process, which waits for it: once the server has ended, or the parent is dead, it
kills what is left of both, and waits for that too. Elsewhere the server takes its place, and is
only told by the end of its input.
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
    """Become the server."""
    parent, names, *command = sys.argv[1:]
    os.write(2, b"%d\n" % os.getpid())
    if sys.platform == "linux":
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        _fork_server(int(parent))
    environment = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    # Python ignores these two, and what is ignored stays ignored in the server.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}")


def _fork_server(parent: int) -> None:
    """Go on in a child, and end with it."""
    # Those to the group are for the server, which may need its time to end.
    signals = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    keeper = os.getpid()
    server = os.fork()
    if server == 0:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:  # it died before the kernel was asked
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
    """Return once the server has ended, or the parent."""
    while (number := signal.sigwait(signals)) != signal.SIGUSR1:
        if number == signal.SIGCHLD:
            # What the server left without a parent is waited for here as well.
            while (ended := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                if ended == server:
                    return


def _kill_the_rest() -> None:
    """Kill all that is left beneath this process, whose children they become one by one."""
    own = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(ChildProcessError):
        while True:
            try:
                left = own.read_text().split()
            except FileNotFoundError:  # this system does not tell
                os.killpg(0, signal.SIGKILL)
            for pid in left:
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


if __name__ == "__main__":
    main()
