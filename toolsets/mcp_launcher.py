"""Starts an MCP server with no more than the environment it may have, bound to its caller's life.

A script, run as: PARENT_PID NAME,NAME,... COMMAND ARGUMENT... in a session of its own. The server
takes this process's place; before that, a line with its process id goes to the standard error,
since the SDK tells nobody. On Linux the kernel kills it when the parent dies, however that dies,
and a second process then kills what else is left in the server's process group. Elsewhere a
server is only told by the end of its input.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Become the server."""
    parent, names, *command = sys.argv[1:]
    os.write(2, b"%d\n" % os.getpid())
    if sys.platform == "linux":
        if os.getpgrp() != os.getpid():
            os.setpgid(0, 0)
        _watch_group()
        _die_with_parent(signal.SIGKILL, int(parent))
    environment = {name: os.environ[name] for name in names.split(",") if name in os.environ}
    # Python ignores these two, and what is ignored stays ignored in the server.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        sys.exit(f"cannot start {command[0]!r}: {error.strerror}")


def _watch_group() -> None:
    """Fork a process that kills the group once this one, the server to be, is dead."""
    server = os.getpid()
    if os.fork():
        return
    # Signals to the group are for the server, which may need its time to end.
    signals = {signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    for descriptor in range(3):
        os.close(descriptor)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() == server:
        signal.sigwait({signal.SIGUSR1})
    os.killpg(0, signal.SIGKILL)


def _die_with_parent(number: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it died before the kernel was asked
        sys.exit(1)


if __name__ == "__main__":
    main()
