"""The wire to the server inside a sandbox; see `toolsets.sandbox.inside.server`.

Nothing that comes out of a sandbox is trusted: replies are bounded and checked before use.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from toolsets import exact_json
from toolsets.errors import HostError, machine_failure, machine_failure_in
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.cgroup import Group
from toolsets.sandbox.inside.boot import LENGTH, framed
from toolsets.sandbox.inside.processes import descendants

_CHUNK_BYTES = 1 << 18
_SPARE_BYTES = 1 << 20
_STOP_GRACE_S = 3.0
_LAST_WAIT_S = 0.5
_KILL_ROUNDS = 100
_MAX_SAID = 300

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Gone(Exception):
    """The sandbox is gone, or not to be used any more; the message continues "the sandbox"."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start a process that serves on its standard input and output."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    pass_fds: Sequence[int] = ()


class Reply(BaseModel):
    """What the server says of a call. Commands could have said it in its place."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Number
    refused: Number | None = None
    """The error number with which a process could not be started."""
    processes: Number = 0
    """How many there were then."""
    stopped: Literal["time", "space", "memory"] | None = None
    ended: bool = False
    exit_code: Number | None = None
    value: str | None = None
    plots: Annotated[list[Annotated[str, Field(max_length=_MAX_SAID)]], Field(max_length=100)] = []
    last_pid: Number | None = None
    full_mb: Number | None = None
    stdout: tuple[bytes, bytes, Number] = (b"", b"", 0)
    stderr: tuple[bytes, bytes, Number] = (b"", b"", 0)


class Channel:
    """A process of ours at the other end of a socket."""

    def __init__(self, launch: Launch, group: Group | None, *, output_bytes: int) -> None:
        # The head and the tail of two streams, in base64, and a value that JSON may make longer.
        self._max_bytes = 12 * output_bytes + _SPARE_BYTES
        self.group = group
        self._socket, theirs = socket.socketpair()
        # A pipe, so that whoever got hold of the other end has nothing to fill.
        self._errors, errors = os.pipe()  # the first closed by `begin`
        os.set_blocking(self._errors, False)
        try:
            # In this thread: a sandbox may be told to die with the thread that made it.
            self._process = subprocess.Popen(
                list(launch.argv) if group is None else group.joined(launch.argv),
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=errors,
                env=dict(launch.env),
                cwd=launch.cwd,
                pass_fds=tuple(launch.pass_fds),
                start_new_session=True,
            )
        except OSError as error:
            self._socket.close()
            os.close(self._errors)
            if (words := machine_failure(error)) is not None:
                raise HostError(f"cannot start a sandbox: {words}") from error
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            theirs.close()
            os.close(errors)
        self._socket.setblocking(False)

    async def begin(self, program: str, terms: Mapping[str, Any], timeout_s: float) -> None:
        """Hand over the server and tell it what it needs; raises `SandboxError` if it fails.

        Raises `HostError` where what failed says that the machine is out of something.
        """
        try:
            # It fits into the socket as a whole, or nearly, so this waits for nobody for long.
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(self._socket, framed(program))
            await self.ask({**terms, "id": 0}, timeout_s)
        except (Gone, TimeoutError) as error:
            await self.close(grace_s=0)
            said = b""
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._errors, 1 << 16)
            lines = said.decode(errors="replace").strip().splitlines()
            why = lines[-1][:_MAX_SAID] if lines else str(error) or "it did not answer in time"
            if (words := machine_failure_in(why)) is not None:
                raise HostError(f"a sandbox did not start: {words}") from error
            raise SandboxError(f"the sandbox did not start: {why}") from error
        finally:
            os.close(self._errors)

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make a request and return the reply; raises `Gone` and `TimeoutError`.

        After any exception, cancellation too, the channel is good for nothing but closing.
        """
        async with asyncio.timeout(timeout_s):
            raw = exact_json.dumps(request)
            try:
                send = asyncio.get_running_loop().sock_sendall
                await send(self._socket, LENGTH.pack(len(raw)) + raw)
                size = LENGTH.unpack(await self._read(LENGTH.size))[0]
                if size > self._max_bytes:
                    raise Gone("said more than it may and was ended")
                answer = await self._read(size)
            except ConnectionError as error:
                raise Gone("ended") from error
        try:
            reply = Reply.model_validate_json(answer)
        except ValidationError as error:
            raise Gone("said what it may not and was ended") from error
        if reply.id != request["id"]:
            raise Gone("answered what it was not asked and was ended")
        return reply

    async def close(self, *, grace_s: float = _STOP_GRACE_S) -> None:
        """End the process and all that it started; after `grace_s` by force."""
        # The server ends when the socket does, and then what it started has ended before it.
        self._socket.close()
        try:
            give_up = time.monotonic() + grace_s
            while self._process.poll() is None and time.monotonic() < give_up:
                await asyncio.sleep(0.002)
        finally:
            if self._process.poll() is None:
                _end_by_force(self._process)
        if self.group is not None:
            await self.group.close()

    async def _read(self, size: int) -> bytes:
        raw = bytearray()
        receive = asyncio.get_running_loop().sock_recv
        while len(raw) < size:
            chunk = await receive(self._socket, min(_CHUNK_BYTES, size - len(raw)))
            if not chunk:
                raise Gone("ended")
            raw += chunk
        return bytes(raw)


def _end_by_force(process: subprocess.Popen[bytes]) -> None:
    """Kill a process with all beneath it, from below, so that each is still waited for."""
    for _ in range(_KILL_ROUNDS):
        found = [pid for pid, _ in descendants(process.pid)]
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            break
    # One that a command has stopped cannot wait for its own.
    os.kill(process.pid, signal.SIGCONT)
    try:
        process.wait(_LAST_WAIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def decoded(kept: tuple[bytes, bytes, int], max_bytes: int) -> tuple[bytes, bytes, int]:
    """The head, the tail and the length of a stream; raises `Gone` where they cannot be that."""
    try:
        head, tail = (base64.b64decode(part, validate=True) for part in kept[:2])
    except ValueError as error:
        raise Gone("said what it may not and was ended") from error
    if len(head) + len(tail) > max_bytes or kept[2] < len(head) + len(tail):
        raise Gone("said what it may not and was ended")
    return head, tail, kept[2]
