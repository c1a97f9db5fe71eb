"""A process that a sandbox's server has started: sends it requests and reads its output."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from toolsets.sandbox.inside.outputs import HeadTail
from toolsets.sandbox.inside.processes import check_descriptor, close_descriptors, set_dumpable

Program = list[str] | Callable[[], object]
"""A command, or a function that is called in a fork of this process."""

_CHUNK_BYTES = 1 << 16
_DRAIN_BYTES = 1 << 20
"""Maximum bytes of output read after a call has ended, in case its writer never pauses."""
_STATUS_BYTES = 4 << 20


class Watcher(Protocol):
    """Calls a job when there is something to read or room to write."""

    output_bytes: int

    def watch(self, fd: int, events: int, handler: Callable[[], object]) -> None:
        """Call `handler` whenever `fd` is ready."""

    def forget(self, fd: int) -> None:
        """Stop watching `fd`, and close it."""


class Job:
    """A process, and its pipes: a shell, an interpreter, or a single command."""

    def __init__(
        self,
        server: Watcher,
        program: Program,
        control_at: int = 0,
        stdin: int = -1,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables` are added to those of this process; only for commands."""
        self.control = -1
        self.unsent = b""
        self.status: bytes | None = None
        self.exit_code: int | None = None
        self.outputs = {1: HeadTail(server.output_bytes), 2: HeadTail(server.output_bytes)}
        self.pipes: dict[int, int] = {}
        self._server = server
        self._partial = b""
        check_descriptor(control_at + 2)  # a shell keeps its outputs beside `control_at`
        self._answer, self._printed = select.poll(), select.poll()
        theirs = {0: os.open("/dev/null", os.O_RDONLY) if stdin < 0 else stdin}
        for fd in (1, 2):
            self.pipes[fd], theirs[fd] = os.pipe()
        if control_at:
            ours, end = socket.socketpair()
            self.control, theirs[control_at] = ours.detach(), end.detach()
        try:
            if callable(program):
                self.pid = _fork(program, theirs)
            else:
                self.pid = _spawn(program, theirs, variables or {})
        except OSError:
            self.close()
            raise
        finally:
            for end_fd in theirs.values():
                os.close(end_fd)
        for fd, pipe in self.pipes.items():
            os.set_blocking(pipe, False)
            self._printed.register(pipe, select.POLLIN)
            server.watch(pipe, select.POLLIN, partial(self.read_output, fd))
        if control_at:
            os.set_blocking(self.control, False)
            self._answer.register(self.control, select.POLLIN)
            server.watch(self.control, select.POLLIN, self._talk)

    def send(self, request: bytes) -> None:
        """Begin to send code to the process."""
        self.status = None
        was_waiting = bool(self.unsent)
        self.unsent += request
        self._send_more()
        if self.unsent or was_waiting:
            self._await_room()

    def await_answer(self, timeout_s: float) -> None:
        """Wait for the answer, at most `timeout_s` seconds, without reading output."""
        if self.control >= 0 and not self.unsent and self._answer.poll(timeout_s * 1000):
            self._talk()

    def read_output(self, fd: int) -> int:
        """Read a piece from an output pipe; return its number of bytes."""
        if fd not in self.pipes:
            return 0
        try:
            chunk = os.read(self.pipes[fd], _CHUNK_BYTES)
        except BlockingIOError:
            return 0
        self.outputs[fd].feed(chunk)
        if not chunk:
            self._printed.unregister(self.pipes[fd])
            self._server.forget(self.pipes.pop(fd))
        return len(chunk)

    def take_output(self) -> dict[int, HeadTail]:
        """Return the streams that were printed to since the last call; do not wait for more."""
        readable = {pipe for pipe, _ in self._printed.poll(0)}
        for fd in [fd for fd, pipe in self.pipes.items() if pipe in readable]:
            left = _DRAIN_BYTES
            while left > 0 and (count := self.read_output(fd)):
                # A read that returns less than it may has emptied the pipe.
                left = left - count if count == _CHUNK_BYTES else 0
        taken = {fd: output for fd, output in self.outputs.items() if output.total}
        for fd in taken:
            self.outputs[fd] = HeadTail(self._server.output_bytes)
        return taken

    def close(self) -> None:
        """Close the pipes."""
        for pipe in [*self.pipes.values(), *([self.control] if self.control >= 0 else [])]:
            self._server.forget(pipe)
        self.pipes = {}
        self.control = -1

    def _send_more(self) -> None:
        if self.control < 0:  # the process ended after its last call; the caller will notice
            self.unsent = b""
            return
        with contextlib.suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
            self.unsent = self.unsent[os.write(self.control, self.unsent[:_CHUNK_BYTES]) :]

    def _await_room(self) -> None:
        """Watch for room to write, but only while something is unsent."""
        if self.control >= 0:
            events = select.POLLIN | (select.POLLOUT if self.unsent else 0)
            self._server.watch(self.control, events, self._talk)

    def _talk(self) -> None:
        if self.unsent:
            self._send_more()
            if not self.unsent:
                self._await_room()
        try:
            chunk = os.read(self.control, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except ConnectionResetError:
            chunk = b""
        self._partial += chunk
        if not chunk or len(self._partial) > _STATUS_BYTES:
            # The process ends or has become another program, or the message is not our loop's.
            self._server.forget(self.control)
            self.control = -1
        elif self._partial.endswith(b"\n"):
            self.status, self._partial = self._partial, b""


def _spawn(argv: list[str], descriptors: dict[int, int], variables: Mapping[str, str]) -> int:
    return os.posix_spawnp(
        argv[0],
        argv,
        {**os.environ, **variables} if variables else os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, at) for at, fd in descriptors.items()],
        setpgroup=0,
        # Else the children would ignore the signals that Python ignores.
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT],
    )


def _fork(program: Callable[[], object], descriptors: dict[int, int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for at, fd in descriptors.items():
            os.dup2(fd, at)
        close_descriptors(kept=set(descriptors))  # above all the socket to the host
        set_dumpable(True)
        program()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
