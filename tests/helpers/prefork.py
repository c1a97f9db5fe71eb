"""Starting batch_runner.py without the CPU time that its imports take.

One server per pytest process imports the program once and forks for each command. The fork is a
process of its own, with its own session, signals, environment and exit code, and runs
batch_runner.py as `python batch_runner.py` does. Run as a script, this file is the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

PROGRAM = Path(__file__).parents[2] / "batch_runner.py"

_IMPORTED = (
    "batch_runner",
    "tqdm",
    "truststore",
    "yaml",
    *(
        f"batch_trajectories.{name}"
        for name in (
            "cli.run",
            "cli.fork",
            *(f"cli.{name}" for name in ("check", "export", "importing", "label", "look", "lists")),
            *(f"cli.{name}" for name in ("report", "show", "status", "steer", "verify", "view")),
            "cli.record",
            "cli.score",
            "api.start",
            "api.stored_run",
            "engine.supervisor.run",
            "engine.plan",
            "engine.supervisor.supervisor",
            "export.training_files",
            "export.dataset.build",
            "export.statistics.run",
            "report.comparison",
            "report.conversation_text",
            "report.page.writer",
            "report.status",
        )
    ),
)
"""What the commands import, at their start or later."""

_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "MALLOC")
"""Beginnings of the variables that only a new interpreter obeys."""

_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_AS, resource.RLIMIT_NOFILE)
"""What tests limit for the processes that they start."""

_environment = dict(os.environ)
_server: socket.socket | None = None
_process: subprocess.Popen[bytes] | None = None


def can_fork(environment: Mapping[str, str]) -> bool:
    """Whether a fork of the server does what a new process with this environment would do."""
    changed = {name for name, _ in environment.items() ^ _environment.items()}
    return hasattr(os, "waitid") and not any(name.startswith(_READ_AT_START) for name in changed)


class Forked:
    """A command that runs, with what the tests need of `subprocess.Popen`."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        """Start batch_runner.py with `args`."""
        self.args = args
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair()
        request = {
            "args": args,
            "cwd": str(cwd),
            "env": dict(env),
            "umask": _umask(),
            "limits": {number: resource.getrlimit(number) for number in _LIMITS},
        }
        data = json.dumps(request).encode()
        server = _started_server()
        with theirs:
            descriptors = [theirs.fileno(), stdout.fileno(), stderr.fileno()]
            try:
                socket.send_fds(server, [len(data).to_bytes(4, "big")], descriptors)
                server.sendall(data)
            except BrokenPipeError as error:
                assert _process is not None
                raise RuntimeError(
                    f"the server that forks commands has died: {_process.wait()}"
                ) from error
        self.pid = self._received()

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, or the negative number of the signal that killed it."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                self.returncode = self._received()
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0) from None
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code, if it has ended."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM, unless it has ended."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _received(self) -> int:
        if not (received := self._status.recv(4)):
            raise RuntimeError("the server that forks commands has died")
        return int.from_bytes(received, "big", signed=True)


def _umask() -> int:
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def _started_server() -> socket.socket:
    global _server, _process
    if _server is None:
        _server, theirs = socket.socketpair()
        with theirs:
            _process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=_environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        atexit.register(_stop, _server, _process)
    return _server


def _stop(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    server.close()
    process.wait()


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns in the forks, with what they have to do."""
    while True:
        header, descriptors, _, _ = socket.recv_fds(requests, 4, 3)
        if not header:
            sys.exit()
        data = b""
        while len(data) < int.from_bytes(header, "big"):
            data += requests.recv(1 << 20)
        if os.fork() == 0:
            requests.close()
            status, *outputs = descriptors
            if (pid := os.fork()) == 0:
                os.setsid()
                os.write(status, os.getpid().to_bytes(4, "big"))  # tests may kill its group now
                os.close(status)
                for number, descriptor in enumerate(outputs, 1):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                loaded: dict[str, Any] = json.loads(data)
                return loaded
            _report(pid, socket.socket(fileno=status))
        for descriptor in descriptors:
            os.close(descriptor)
        _take_ended()


def _report(pid: int, status: socket.socket) -> NoReturn:
    """Send how a process ended; its id stays its own until the test knows."""
    ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert ended is not None
    code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    with contextlib.suppress(BrokenPipeError):  # a test that failed does not wait
        status.sendall(code.to_bytes(4, "big", signed=True))
        status.recv(1)
    os.waitpid(pid, 0)
    os._exit(0)


def _take_ended() -> None:
    """Wait for the processes that have ended, so that their time counts as the tests'."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(request: dict[str, Any]) -> None:
    """Make this process what a new one would be, and run the program."""
    os.umask(request["umask"])
    for number, limits in request["limits"].items():
        resource.setrlimit(int(number), limits)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.argv = request["args"]
    runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(PROGRAM.parent)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # a collection in a fork would copy all that is imported
    _become(_serve(socket.socket(fileno=int(sys.argv[1]))))
