"""Starts a command whose model calls leave the sandbox through a socket of the worker.

It reads two frames on standard input: its own source (see `boot`), and JSON with `argv`, `env`,
`cwd`, `stdin` (text), `files` (path: text), `socket` (path of a Unix socket, or null), `port`,
`inherits` (whether the sandbox's own variables are added to `env`), and `acp` (null, or the task of
an agent that takes it by the Agent Client Protocol: see `acp`).
Connections to that port of the loopback address are connected to the socket. The exit code is that
of the command, or 128 + N for a command ended by signal N.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
from typing import Any, NoReturn

from toolsets.sandbox.inside.acp import run_task
from toolsets.sandbox.inside.boot import LENGTH

_CHUNK_BYTES = 1 << 16
_END_S = 3.0
"""Seconds for an agent to end after its task is done, and again after it is asked to end."""


def main() -> NoReturn:
    """Start the command, forward its connections, and end with it."""
    terms = json.loads(_frame())
    try:
        for path, text in terms["files"].items():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        if terms["socket"] is not None:
            # Listen before the command starts, as it may connect at once.
            server = socket.create_server(("127.0.0.1", terms["port"]), backlog=128)
            os.set_inheritable(server.fileno(), False)
            threading.Thread(target=_accept, args=(server, terms["socket"]), daemon=True).start()
        with contextlib.suppress(OSError):  # if it was removed, stay in the workspace
            os.chdir(terms["cwd"])
        if terms["acp"] is not None:
            os._exit(_run_agent(terms))
        reading = _standard_input(terms["stdin"])
        pid = _start(terms, reading)
    except OSError as error:
        sys.stderr.write(f"cannot start {terms['argv'][0]}: {error}\n")
        sys.stderr.flush()
        os._exit(126)
    os._exit(_exit_code(os.waitpid(pid, 0)[1]))


def _exit_code(status: int) -> int:
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _run_agent(terms: dict[str, Any]) -> int:
    """Start an agent, give it its task and end it; return an exit code, 0 if the task is done."""
    reading, to_agent = os.pipe()
    from_agent, writing = os.pipe()
    pid = _start(terms, reading, writing)
    os.close(writing)
    task = os.fdopen(to_agent, "wb", buffering=0)
    output = os.fdopen(from_agent, encoding="utf-8", errors="replace")
    with task, output:
        is_done = run_task(task, output, terms["acp"], terms["cwd"])
    # Many agents end when their input ends; the others are signalled.
    for ending in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + _END_S
        while time.monotonic() < until:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return 0 if is_done else _exit_code(status) or 1
            time.sleep(0.02)
        os.kill(pid, ending)
    os.waitpid(pid, 0)
    return 0 if is_done else 1


def _frame() -> bytes:
    size = LENGTH.unpack(_read(LENGTH.size))[0]
    return _read(size)


def _read(size: int) -> bytes:
    content = b""
    while len(content) < size:
        content += os.read(0, size - len(content)) or sys.exit("standard input ended too early")
    return content


def _standard_input(text: str) -> int:
    """Return a descriptor from which a command reads a text."""
    if not text:
        # No empty pipe: some commands read a pipe as a part of their task.
        return os.open(os.devnull, os.O_RDONLY)
    reading, writing = os.pipe()
    threading.Thread(target=_feed, args=(writing, text.encode()), daemon=True).start()
    return reading


def _start(terms: dict[str, Any], reading: int, writing: int = 1) -> int:
    """Start the command with these descriptors as its standard input and output."""
    try:
        return os.posix_spawnp(
            terms["argv"][0],
            terms["argv"],
            {**os.environ, **terms["env"]} if terms["inherits"] else terms["env"],
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reading, 0),
                (os.POSIX_SPAWN_DUP2, writing, 1),
            ],
            # Else the command would ignore the signals that Python ignores.
            setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
        )
    finally:
        os.close(reading)


def _feed(fd: int, text: bytes) -> None:
    with contextlib.suppress(BrokenPipeError), os.fdopen(fd, "wb") as pipe:
        pipe.write(text)


def _accept(server: socket.socket, path: str) -> None:
    while True:
        client, _ = server.accept()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        worker = socket.socket(socket.AF_UNIX)
        try:
            worker.connect(path)
        except OSError:
            # The worker is gone, and with it soon this sandbox.
            worker.close()
            client.close()
            continue
        threading.Thread(target=_connect, args=(client, worker), daemon=True).start()


def _connect(client: socket.socket, worker: socket.socket) -> None:
    with client, worker:
        requests = threading.Thread(target=_copy, args=(client, worker), daemon=True)
        requests.start()
        _copy(worker, client)
        requests.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            target.sendall(chunk)
    for end, how in ((target, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            end.shutdown(how)
