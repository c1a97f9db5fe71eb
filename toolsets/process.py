"""One bounded process: its output, its time and its process group stay within limits.

Nothing here confines what the process may touch; sandboxes build on this.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from toolsets.execution import ExecResult, SandboxError
from toolsets.tool import HOST_ERRNOS, HostError

_EOF_GRACE_S = 0.2
"""How long output is awaited after the process ended, when something else holds its pipes."""
_KILL_GRACE_S = 2.0
"""How long a killed process is awaited; longer only if it hangs inside the kernel."""


@dataclass(frozen=True, slots=True)
class Spawn:
    """What to start, and how."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: str
    stdin: int
    """A file descriptor, or one of the constants of `asyncio.subprocess`."""
    pass_fds: Sequence[int] = ()


class OutputBuffer:
    """The head and the tail of a byte stream of any length, in bounded memory."""

    def __init__(self, max_bytes: int) -> None:
        self._head_bytes = max_bytes // 2
        self._tail_bytes = max_bytes - self._head_bytes
        self._head = bytearray()
        self._tail = bytearray()
        self._fed_bytes = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next piece of the stream."""
        self._fed_bytes += len(chunk)
        room = self._head_bytes - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk[-self._tail_bytes :] if self._tail_bytes else b""
        # Trimming at twice the size moves each byte once on average.
        if len(self._tail) > 2 * self._tail_bytes:
            self._trim()

    @property
    def truncated(self) -> bool:
        """Whether the middle is missing."""
        return self._fed_bytes > self._head_bytes + self._tail_bytes

    def text(self) -> str:
        """What was kept, as text without NUL, with a mark where the middle was cut."""
        self._trim()
        if not self.truncated:
            return _decode(bytes(self._head + self._tail))
        head, tail = bytes(self._head), bytes(self._tail)
        # A character split by the cut is dropped rather than shown as a broken one.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(head)
        head = head[: len(head) - len(decoder.getstate()[0])]
        lead = 0
        while lead < min(3, len(tail)) and tail[lead] & 0xC0 == 0x80:
            lead += 1
        tail = tail[lead:]
        cut_bytes = self._fed_bytes - len(head) - len(tail)
        return f"{_decode(head)}\n[... {cut_bytes} bytes cut ...]\n{_decode(tail)}"

    def _trim(self) -> None:
        if len(self._tail) > self._tail_bytes:
            del self._tail[: len(self._tail) - self._tail_bytes]


@dataclass(slots=True)
class _Collector(asyncio.SubprocessProtocol):
    """Takes in a process's output and notes its end, independently of each other."""

    buffers: dict[int, OutputBuffer]
    open_fds: set[int]
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    exited: asyncio.Event = field(default_factory=asyncio.Event)

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.buffers[fd].feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        self.open_fds.discard(fd)
        if not self.open_fds:
            self.drained.set()

    def process_exited(self) -> None:
        self.exited.set()


async def run_process(spawn: Spawn, *, timeout_s: float, output_bytes: int) -> ExecResult:
    """Run one process in a group of its own and return when it has ended or `timeout_s` is over.

    The whole group is killed when the process ends, when time is up and when the caller is
    cancelled. A process that left the group and still holds an output pipe delays the return
    by a fraction of a second at most.
    """
    started = time.monotonic()
    loop = asyncio.get_running_loop()
    collector = _Collector(
        buffers={1: OutputBuffer(output_bytes), 2: OutputBuffer(output_bytes)}, open_fds={1, 2}
    )
    try:
        transport, _ = await loop.subprocess_exec(
            lambda: collector,
            *spawn.argv,
            stdin=spawn.stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=dict(spawn.env),
            cwd=spawn.cwd,
            pass_fds=tuple(spawn.pass_fds),
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in HOST_ERRNOS:
            raise HostError(f"cannot start a command: {error.strerror}") from error
        raise SandboxError(_explain_spawn(error)) from error
    group = transport.get_pid()
    timed_out = False
    try:
        remaining_s = timeout_s - (time.monotonic() - started)
        timed_out = not await _within(remaining_s, collector.exited)
    finally:
        # What the process left in its group keeps the group's id from being reused, so this
        # reaches those leftovers or, as almost always, nobody.
        _kill_group(group)
        await _within(_KILL_GRACE_S, collector.exited)
        await _within(_EOF_GRACE_S, collector.drained)
        transport.close()
    return ExecResult(
        exit_code=None if timed_out else _shell_exit_code(transport.get_returncode()),
        stdout=collector.buffers[1].text(),
        stderr=collector.buffers[2].text(),
        timed_out=timed_out,
        truncated=any(buffer.truncated for buffer in collector.buffers.values()),
        duration_s=time.monotonic() - started,
    )


@contextlib.contextmanager
def input_file(content: bytes) -> Iterator[IO[bytes]]:
    """Hold `content` in an unnamed file, read from its start.

    A process that takes its input from a file needs nobody to write into a pipe for it.
    """
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


def check_argv(argv: Sequence[str]) -> None:
    """Raise `SandboxError` if no system could start `argv`."""
    if not argv:
        raise SandboxError("there is no command to run")
    if any("\0" in argument for argument in argv):
        raise SandboxError("a command cannot contain a NUL character")


def use_pidfd_watcher() -> None:
    """Have Python 3.11 notice the end of processes without a thread for each.

    Later versions do so by themselves; there, and where the system has no pidfd, this does
    nothing. Call it before the event loop starts.
    """
    if sys.version_info < (3, 12) and hasattr(os, "pidfd_open"):
        try:
            os.close(os.pidfd_open(os.getpid()))
        except OSError:
            return
        asyncio.set_child_watcher(asyncio.PidfdChildWatcher())


async def _within(timeout_s: float, event: asyncio.Event) -> bool:
    """Wait for `event` for at most `timeout_s`; tell whether it happened."""
    try:
        async with asyncio.timeout(max(timeout_s, 0)):
            await event.wait()
    except TimeoutError:
        pass
    return event.is_set()


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _shell_exit_code(returncode: int | None) -> int | None:
    return 128 - returncode if returncode is not None and returncode < 0 else returncode


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace").replace("\0", "\N{REPLACEMENT CHARACTER}")


def _explain_spawn(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno == errno.E2BIG:
        return "the command is too long; write it to a file and run that"
    return f"the command could not be started: {error}"
