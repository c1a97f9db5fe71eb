"""Forks sandboxes: Python is started and its modules are imported once, not in each sandbox.

Its standard input is a socket. A request there is a frame like those of `server`, with the
descriptors of a sandbox: its socket, its standard error, and files of control groups to enter. For
`bwrap` it runs inside bubblewrap, for `local` as a plain process. It runs no commands itself.
"""

from __future__ import annotations

import array
import contextlib
import gc
import json
import os
import signal
import socket
from typing import Any, NoReturn

from toolsets.sandbox.inside.boot import LENGTH, make_frame
from toolsets.sandbox.inside.kernel import run_cells
from toolsets.sandbox.inside.namespaces import enter, enter_image, fork_as_first
from toolsets.sandbox.inside.processes import close_descriptors, set_dumpable
from toolsets.sandbox.inside.server import main as serve

__all__ = ["main", "run_cells"]  # `run_cells` is imported once here, for all sandboxes

_MAX_DESCRIPTORS = 16
_OWN_NAMESPACE = "/proc/self/ns/pid"


class ForkServer:
    """Handles one request after the other; each sandbox that it makes sends the answer."""

    def __init__(self) -> None:
        self._requests = socket.socket(fileno=os.dup(0))
        set_dumpable(False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        begin, _ = self._next_request()
        self._is_confining = begin["is_confined"]
        # Keep the namespace open: while it forks, this process sets another one for its children.
        self._namespace = os.open(_OWN_NAMESPACE, os.O_RDONLY) if self._is_confining else -1
        trial = begin["trial"]
        self._reply({"id": 0, "refused": None if trial is None else self._try_sandbox(trial)})

    def serve(self) -> NoReturn:
        """Fork until the other end is closed."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # then no child has to be waited for
        gc.freeze()  # memory that no collection visits stays shared with the children
        while True:
            request, descriptors = self._next_request()
            try:
                pid = self._fork()
            except OSError as error:
                os.write(descriptors[1], f"fork: {error.strerror}\n".encode())
                pid = -1
            if pid == 0:
                self._become(request, descriptors)
            for fd in descriptors:
                os.close(fd)

    def _fork(self) -> int:
        return fork_as_first(self._namespace) if self._is_confining else os.fork()

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> NoReturn:
        try:
            control, errors, *groups = descriptors
            for fd, standard_fd in ((control, 0), (control, 1), (errors, 2)):
                os.dup2(fd, standard_fd)
            for fd in groups:
                with contextlib.suppress(OSError):
                    os.write(fd, b"0")  # 0 stands for the process that writes
            self._requests.detach()
            close_descriptors(kept={0, 1, 2})
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._confine(request)
            os.environ.update(request["env"])
            serve(request["terms"], self._send_handle)
        except BaseException as error:
            os.write(2, f"{error}\n".encode())
        finally:
            os._exit(1)

    def _confine(self, request: dict[str, Any]) -> None:
        if not self._is_confining:
            return
        workspace, image = request["workspace"], request.get("image")
        if image is None:
            enter(workspace, request["tmp_bytes"], request["network"])
        else:
            enter_image(workspace, request["tmp_bytes"], request["network"], image)
            os.environ.clear()

    def _send_handle(self, replies: int) -> None:
        """Send a pidfd of this process: its number means nothing outside of its namespace."""
        handle = os.pidfd_open(os.getpid())
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [handle]))
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, os.dup(replies)) as control:
            control.sendmsg([b"\0"], [rights])
        os.close(handle)

    def _try_sandbox(self, request: dict[str, Any]) -> int | None:
        """Fork a sandbox on trial; return the error number, or None if it works."""
        try:
            pid = self._fork()
        except OSError as error:
            return error.errno
        if pid == 0:
            number = 255
            try:
                os.pidfd_open(os.getpid())
                self._confine(request)
                number = 0
            except OSError as error:
                number = error.errno or number
            finally:
                os._exit(number)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) or None

    def _next_request(self) -> tuple[dict[str, Any], list[int]]:
        # A frame and its descriptors are sent at once, so the descriptors come with the first byte.
        header, descriptors, _, _ = socket.recv_fds(self._requests, LENGTH.size, _MAX_DESCRIPTORS)
        size = LENGTH.unpack(header + self._receive(LENGTH.size - len(header)))[0]
        return json.loads(self._receive(size)), descriptors

    def _receive(self, size: int) -> bytes:
        raw = b""
        while len(raw) < size:
            chunk = self._requests.recv(size - len(raw))
            if not chunk:
                os._exit(0)
            raw += chunk
        return raw

    def _reply(self, reply: dict[str, Any]) -> None:
        self._requests.sendall(make_frame(json.dumps(reply)))


def main() -> NoReturn:
    """Fork sandboxes."""
    ForkServer().serve()
