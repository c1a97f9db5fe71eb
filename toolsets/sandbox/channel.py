"""The connection to the server inside a sandbox; see `toolsets.sandbox.inside.server`.

Replies are not trusted: they are limited in size and checked before use. A crash of this process
closes the socket, which ends the sandbox.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import HostError, machine_failure, machine_failure_in
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.cgroup import Group
from toolsets.sandbox.first_process import (
    FirstProcess,
    ForkedProcess,
    LaunchedProcess,
    wait_until_ready,
)
from toolsets.sandbox.inside.boot import LENGTH, make_frame

_MIN_CHUNK_BYTES, _CHUNK_BYTES = 1 << 14, 1 << 18
_SPARE_BYTES = 1 << 20
_START_TIMEOUT_S = 60.0
_STOP_GRACE_S = 3.0
_MAX_TEXT_CHARS = 300

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
FilePath = Annotated[str, Field(max_length=8192)]


class Gone(Exception):
    """The sandbox has ended or must not be used again; the message continues "the sandbox"."""


class Launch(msgspec.Struct, frozen=True):
    """The command line of a process that serves on its standard input and output."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    pass_fds: Sequence[int] = ()
    reads_to_its_end: bool = False
    """The process reads requests from a socket of its own, not from the one that it writes to."""
    # With one socket for both it gets a reset, and no end of file, if its output was not read.


class Reply(BaseModel):
    """The server's reply to a request. A command inside may have forged it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: Number
    refused: Number | None = None
    """The error number, if a process could not be started; else None."""
    processes: Number = 0
    """The number of processes of the task when one could not be started."""
    stopped: Literal["time", "space", "memory"] | None = None
    ended: bool = False
    exit_code: Number | None = None
    value: str | None = None
    plots: Annotated[
        tuple[Annotated[str, Field(max_length=_MAX_TEXT_CHARS)], ...], Field(max_length=100)
    ] = ()
    last_pid: Number | None = None
    running: Number | None = None
    full_mb: Number | None = None
    size: Number = 0
    """The workspace's size in bytes at the start; only in the first reply, if requested."""
    error: Number | None = None
    """The error number of a request about files that failed; else None."""
    # Tuples, since pydantic copies a default that is a list for each reply.
    entries: tuple[tuple[FilePath, Literal["file", "dir", "link", "other"], Number], ...] = ()
    marks: tuple[FilePath, ...] = ()
    contents: tuple[tuple[Number, bytes | None], ...] = ()
    more: bool = False
    seen: Number = 0
    left_bytes: Number = 0
    stdout: tuple[bytes, bytes, Number] = (b"", b"", 0)
    stderr: tuple[bytes, bytes, Number] = (b"", b"", 0)


class Channel:
    """A process of ours at the other end of a socket, started by `launch` or `fork`."""

    def __init__(self, group: Group | None, *, output_bytes: int) -> None:
        # Enough for the heads and tails of two streams in base64, and a value with escapes in JSON.
        self._max_bytes = 12 * output_bytes + _SPARE_BYTES
        self._inbox = bytearray()
        self._sending = asyncio.Lock()
        self._reply: asyncio.Future[bytes | Exception] | None = None
        """The reply that a request waits for, or an error; None if no request waits."""
        self._watching_loop: asyncio.AbstractEventLoop | None = None
        self.group = group
        self._process: FirstProcess | None = None
        self._socket, self._theirs = socket.socketpair()
        self._sender = self._socket
        """The socket for requests: the one for replies, or another one; see `Launch`."""
        # A pipe: nothing that the other end writes can fill memory here.
        self._errors, self._their_errors = os.pipe()  # `begin` closes the first one
        os.set_blocking(self._errors, False)
        self._socket.setblocking(False)

    def launch(self, launch: Launch) -> None:
        """Start the process; raises `SandboxError` and `HostError`."""
        their_input = self._theirs
        if launch.reads_to_its_end:
            self._sender, their_input = socket.socketpair()
            self._sender.setblocking(False)
        try:
            # In this thread: a sandbox may be set to die with the thread that made it.
            self._process = LaunchedProcess(
                subprocess.Popen(
                    list(launch.argv) if self.group is None else self.group.join(launch.argv),
                    stdin=their_input.fileno(),
                    stdout=self._theirs.fileno(),
                    stderr=self._their_errors,
                    env=dict(launch.env),
                    cwd=launch.cwd,
                    pass_fds=tuple(launch.pass_fds),
                    start_new_session=True,
                )
            )
        except OSError as error:
            self._close_ours()
            os.close(self._errors)
            if (message := machine_failure(error)) is not None:
                raise HostError(f"cannot start a sandbox: {message}") from error
            raise SandboxError(f"the sandbox did not start: {error}") from error
        finally:
            their_input.close()
            self._close_theirs()

    async def fork(self, server: Channel, request: Mapping[str, Any]) -> Reply:
        """Let a fork server make the process, with the terms in `request`; return its first reply.

        Raises `Gone` if the fork server ended before it made the process, and what `begin` raises.
        """
        groups = [] if self.group is None else self.group.open()
        try:
            theirs = [self._theirs.fileno(), self._their_errors, *groups]
            await server.send(request, theirs)
        except BaseException:
            self._socket.close()
            os.close(self._errors)
            raise
        finally:
            self._close_theirs()
            for fd in groups:
                os.close(fd)
        async with self._report_failed_start():
            self._process = await self._receive_handle()
            return await self._exchange(b"", 0, _START_TIMEOUT_S)

    async def begin(self, terms: Mapping[str, Any], program: str) -> Reply:
        """Send the launched process its program and its terms; return its first reply.

        Raises `SandboxError` if the process fails, and `HostError` if its error message says that
        the machine lacks a resource.
        """
        async with self._report_failed_start():
            # The program nearly fits into the socket's buffer, so this never waits long.
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(self._sender, make_frame(program))
            return await self.ask({**terms, "id": 0}, _START_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _report_failed_start(self) -> AsyncIterator[None]:
        """Raise the last line of the process's standard error, if the process fails inside."""
        try:
            yield
        except asyncio.CancelledError:
            await self.close(grace_s=0)
            raise
        except (Gone, TimeoutError) as error:
            await self._end(grace_s=0)
            output = b""
            with contextlib.suppress(BlockingIOError):
                output = os.read(self._errors, 1 << 16)
            if self._process is None and isinstance(error, Gone) and not output:
                raise
            if self.group is not None:
                await self.group.close()
            lines = output.decode(errors="replace").strip().splitlines()
            why = (
                lines[-1][:_MAX_TEXT_CHARS] if lines else str(error) or "it did not answer in time"
            )
            if (message := machine_failure_in(why)) is not None:
                raise HostError(f"a sandbox did not start: {message}") from error
            raise SandboxError(f"the sandbox did not start: {why}") from error
        finally:
            os.close(self._errors)

    async def send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
        """Send a request with descriptors and expect no reply; raises `Gone`."""
        raw = exact_json.dumps(request)
        frame = LENGTH.pack(len(raw)) + raw
        async with self._sending:  # only one request at a time can wait for room
            while True:
                try:
                    # A frame is far smaller than a socket's buffer: it is sent as a whole or not.
                    socket.send_fds(self._socket, [frame], list(descriptors))
                except BlockingIOError:
                    await wait_until_ready(self._socket.fileno(), for_writing=True)
                except OSError as error:
                    raise Gone("ended") from error
                else:
                    return

    async def ask(self, request: Mapping[str, Any], timeout_s: float) -> Reply:
        """Make a request and return the reply; raises `Gone` and `TimeoutError`.

        After any exception, also a cancellation, the channel can only be closed.
        """
        raw = exact_json.dumps(request)
        return await self._exchange(LENGTH.pack(len(raw)) + raw, request["id"], timeout_s)

    async def _exchange(self, frame: bytes, number: int, timeout_s: float) -> Reply:
        """Send a frame, which may be empty; return the next reply.

        Raises `Gone` if the reply does not have this number.
        """
        loop = asyncio.get_running_loop()
        self._reply = waiting = loop.create_future()
        time_is_up = loop.call_later(timeout_s, _resolve, waiting, TimeoutError())
        try:
            if self._watching_loop is not loop:  # the next call can be in another loop
                self._stop_watching()
                self._watching_loop = loop
                loop.add_reader(self._socket.fileno(), self._receive)
            if self._inbox:
                self._check_inbox(waiting)
            await self._send(frame, time_is_up.when())
            answer = await waiting
        except ConnectionError as error:
            raise Gone("ended") from error
        finally:
            time_is_up.cancel()
            self._reply = None
        if isinstance(answer, Exception):
            raise answer
        try:
            reply = Reply.model_validate_json(answer)
        except ValidationError as error:
            raise Gone("said what it may not and was ended") from error
        if reply.id != number:
            raise Gone("answered what it was not asked and was ended")
        return reply

    async def close(self, *, grace_s: float = _STOP_GRACE_S) -> None:
        """End the process and its descendants; kill them after `grace_s` seconds."""
        try:
            await self._end(grace_s)
        finally:
            if self.group is not None:
                await self.group.close()

    async def _end(self, grace_s: float) -> None:
        # The server ends when the socket closes, after all processes that it started.
        self._stop_watching()
        self._close_ours()
        if self._process is not None:
            await self._process.end(grace_s)

    async def _receive_handle(self) -> FirstProcess:
        """Receive the handle that a forked process sends first."""
        async with asyncio.timeout(_START_TIMEOUT_S):
            await wait_until_ready(self._socket.fileno())
        try:
            data, handles, _, _ = socket.recv_fds(self._socket, 1, 1)
        except ConnectionError as error:
            raise Gone("ended") from error
        if not data or not handles:
            raise Gone("ended")
        return ForkedProcess(handles[0])

    def _close_ours(self) -> None:
        self._socket.close()
        self._sender.close()

    def _close_theirs(self) -> None:
        self._theirs.close()
        os.close(self._their_errors)

    async def _send(self, raw: bytes, until: float) -> None:
        # Nearly always sends all at once, which is cheaper without the event loop.
        with contextlib.suppress(BlockingIOError):
            raw = raw[self._sender.send(raw) :]
        if raw:
            async with asyncio.timeout_at(until):
                await asyncio.get_running_loop().sock_sendall(self._sender, raw)

    def _receive(self) -> None:
        """Read a chunk for the request that waits; called by the event loop.

        If no request waits, leave the data in the socket and stop watching it until the next one.
        """
        if (waiting := self._reply) is None or waiting.done():
            self._stop_watching()
            return
        missing = self._frame_bytes - len(self._inbox)
        try:
            chunk = self._socket.recv(max(_MIN_CHUNK_BYTES, min(_CHUNK_BYTES, missing)))
        except BlockingIOError:
            return
        except ConnectionError:
            chunk = b""
        if not chunk:
            _resolve(waiting, Gone("ended"))
            return
        self._inbox += chunk
        self._check_inbox(waiting)

    def _check_inbox(self, waiting: asyncio.Future[bytes | Exception]) -> None:
        """Set the result of a request whose reply has arrived as a whole, or is too long."""
        size = self._frame_bytes
        if size > LENGTH.size + self._max_bytes:
            _resolve(waiting, Gone("said more than it may and was ended"))
        elif len(self._inbox) >= size:
            answer = bytes(self._inbox[LENGTH.size : size])
            del self._inbox[:size]
            _resolve(waiting, answer)

    @property
    def _frame_bytes(self) -> int:
        """The size of the incoming frame in bytes; smaller until its length is known."""
        if len(self._inbox) < LENGTH.size:
            return LENGTH.size
        return LENGTH.size + int.from_bytes(self._inbox[: LENGTH.size])

    def _stop_watching(self) -> None:
        if self._watching_loop is not None:
            self._watching_loop.remove_reader(self._socket.fileno())
            self._watching_loop = None


def _resolve(waiting: asyncio.Future[bytes | Exception], outcome: bytes | Exception) -> None:
    if not waiting.done():
        waiting.set_result(outcome)


def decode_output(kept: tuple[bytes, bytes, int], max_bytes: int) -> tuple[bytes, bytes, int]:
    """Return the head, the tail and the length of an output stream; raises `Gone` if invalid."""
    try:
        head, tail = (binascii.a2b_base64(part, strict_mode=True) for part in kept[:2])
    except ValueError as error:
        raise Gone("said what it may not and was ended") from error
    if len(head) + len(tail) > max_bytes or kept[2] < len(head) + len(tail):
        raise Gone("said what it may not and was ended")
    return head, tail, kept[2]
