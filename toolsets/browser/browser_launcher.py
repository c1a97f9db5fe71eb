"""Starts Chromium with no network but our proxy; Chromium does not outlive its worker.

A script, run as: SOCKET MEMORY_MB PROFILE CHROMIUM ARGUMENT... It listens on a loopback port (in a
network namespace, loopback is the only network), sends the listening socket to the worker through
the unix socket SOCKET, and becomes Chromium with that port as its proxy. A second process watches
the connection to the worker: when it closes, because the worker ended or died, it kills all
processes. PROFILE, unless empty, replaces the profile directory among the arguments.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys


def main() -> None:
    """Listen for the browser, then become Chromium."""
    path, memory_mb, profile, *command = sys.argv[1:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    worker = socket.socket(socket.AF_UNIX)
    worker.connect(path)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    socket.send_fds(worker, [b"p"], [listener.fileno()])
    port = listener.getsockname()[1]
    listener.close()
    _watch(worker)
    # For each process; a page that needs more crashes. Address space cannot be limited: V8
    # reserves terabytes that it never touches.
    limit = int(memory_mb) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if profile:
        command = [part for part in command if not part.startswith("--user-data-dir=")]
        command.insert(1, f"--user-data-dir={profile}")
    # Options come before the page to open.
    command[1:1] = [
        f"--proxy-server=socks5://127.0.0.1:{port}",
        "--proxy-bypass-list=<-loopback>",
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ]
    os.execvp(command[0], command)


def _watch(worker: socket.socket) -> None:
    """Fork a process that kills all processes of the group when the worker closes its end."""
    if os.fork():
        worker.close()
        return
    descriptor = worker.fileno()
    os.closerange(0, descriptor)
    os.closerange(descriptor + 1, 256)
    while worker.recv(1):
        pass
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
