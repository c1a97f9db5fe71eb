"""A worker's side of its keeper: starts it with the first machine, and asks it.

Each process has a keeper of its own, which ends with it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from batch_trajectories.basics.errors import HostError, SandboxLost
from batch_trajectories_e2b.service import Service
from toolsets.sandbox.base import SandboxError

STUB = """\
import socket, sys
with socket.socket(socket.AF_UNIX) as s:
    s.connect(sys.argv[1])
    socket.send_fds(s, [sys.argv[2].encode() + b"\\n"], [0, 2])
    code = s.recv(1)
sys.exit(code[0] if code else 1)
"""
"""The program whose streams the keeper connects with a machine: it waits for the end."""
_START_S = 60.0


class KeeperClient:
    """The keeper of this process, which is started when it is first asked."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._pid = 0
        self._directory: Path | None = None
        self._errors: IO[str] | None = None

    @property
    def path(self) -> str:
        """The path of the keeper's socket."""
        if self._directory is None:
            raise HostError("sandbox e2b: its keeper was never started")
        return str(self._directory / "socket")

    async def ask(self, do: str, box: str, **facts: Any) -> dict[str, Any]:
        """Ask the keeper; return its answer.

        Raises `SandboxLost` if the machine is lost, `SandboxError` if what ran on it damaged it,
        and `HostError` if the service refuses or does not answer.
        """
        await asyncio.to_thread(self._start)
        answer: Mapping[str, Any]
        try:
            reader, writer = await asyncio.open_unix_connection(self.path)
            try:
                writer.write(json.dumps({"do": do, "box": box, **facts}).encode() + b"\n")
                answer = json.loads(await reader.readline())
            finally:
                writer.close()
        except (OSError, ValueError) as error:
            raise SandboxLost(f"sandbox e2b: its keeper has ended: {self._last_words()}") from error
        message = f"sandbox e2b: {answer.get('message')}"
        match answer.get("error"):
            case None:
                return dict(answer)
            case "lost":
                raise SandboxLost(message)
            case "broken":
                raise SandboxError(message)
            case "refused" if answer["status"] in (401, 403):
                raise HostError(f"{message}; set E2B_API_KEY to a key that may make machines")
            case "unreachable" if " 429: " in message:
                raise HostError(
                    f"{message}; run fewer conversations at a time (--batch_size, --num_workers)"
                )
            case _:
                raise HostError(message)

    def _start(self) -> None:
        """Start the keeper, unless this process has one that lives."""
        with self._lock:
            if self._pid == os.getpid() and self._process is not None:
                if self._process.poll() is None:
                    return
                self._forget()
            # The private directory is the only protection of the socket.
            self._directory = Path(tempfile.mkdtemp(prefix="bt-e2b-"))
            self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `_forget` closes it
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "batch_trajectories_e2b.keeper"),
                    *(self.path, str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,  # a signal to the run is not for it
            )
            self._pid = os.getpid()
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            try:
                # Not an argument: others see those.
                self._process.stdin.write(json.dumps(self._service.to_json()) + "\n")
                self._process.stdin.flush()
                is_ready = self._process.stdout.readline() == "ready\n"
            except OSError:
                is_ready = False
            if not is_ready:
                self._process.wait(_START_S)
                message = self._last_words()
                self._forget()
                raise HostError(f"sandbox e2b: its keeper did not start: {message}")

    def _last_words(self) -> str:
        if self._errors is None:
            return "it said nothing"
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return self._service.without_secrets(lines[-1][:300]) if lines else "it said nothing"

    def _forget(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.close()
            process.stdout.close()
        if self._errors is not None:
            self._errors.close()
            self._errors = None
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Let the keeper end all machines, and wait for its end."""
        with self._lock:
            process = self._process
            if process is None or self._pid != os.getpid():
                return
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
            self._forget()
