"""Ends the first process of a sandbox: a child of this process or of a fork server."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

from toolsets.sandbox.inside.processes import descendants

_LAST_WAIT_S = 0.5
_KILL_ROUNDS = 100
_CHECK_S = 0.002


def proc_problem() -> str | None:
    """Return why processes of sandboxes cannot be found in /proc; None if they can."""
    if sys.platform != "linux":
        return None
    try:
        own = os.readlink("/proc/self")  # noqa: PTH115 - for each conversation, so without a Path
    except OSError:
        if os.path.exists("/proc/version"):  # noqa: PTH110 - as above
            own = ""
        else:
            return "/proc is not mounted: run `mount -t proc proc /proc` before the start"
    if own == str(os.getpid()):
        return None
    return (
        "/proc shows the processes of another PID namespace: mount that of this one "
        "(`unshare --mount-proc`, or `mount -t proc proc /proc`) before the start"
    )


class FirstProcess(Protocol):
    """A process that can be ended together with its descendants."""

    async def end(self, grace_s: float) -> None:
        """Wait until the process has ended; after `grace_s` seconds kill it."""


class LaunchedProcess:
    """A child of this process."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    async def end(self, grace_s: float) -> None:
        """See `FirstProcess`."""
        try:
            give_up = time.monotonic() + grace_s
            while self._process.poll() is None and time.monotonic() < give_up:
                await asyncio.sleep(_CHECK_S)
        finally:
            if self._process.poll() is None:
                self._kill()

    def _kill(self) -> None:
        pid = self._process.pid
        _kill_descendants(pid)
        # A command may have stopped the process, which could then not wait for its children.
        os.kill(pid, signal.SIGCONT)
        try:
            self._process.wait(_LAST_WAIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            self._process.wait()


class ForkedProcess:
    """A child of a fork server, known by a handle, as its number may be reused."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    async def end(self, grace_s: float) -> None:
        """See `FirstProcess`."""
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await wait_until_ready(self._handle)
        finally:
            if not self._has_ended(0):
                self._kill()
            os.close(self._handle)

    def _kill(self) -> None:
        if (pid := self._pid()) > 0:
            _kill_descendants(pid)
        for number in (signal.SIGCONT, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)
            if self._has_ended(_LAST_WAIT_S):
                return
        self._has_ended(None)

    def _has_ended(self, within_s: float | None) -> bool:
        poll = select.poll()
        poll.register(self._handle, select.POLLIN)
        return bool(poll.poll(None if within_s is None else within_s * 1000))

    def _pid(self) -> int:
        """Return the process id on this machine; -1 after the process has ended."""
        info = Path(f"/proc/self/fdinfo/{self._handle}").read_text()
        return int(info.partition("\nPid:")[2].split()[0])


async def wait_until_ready(fd: int, *, for_writing: bool = False) -> None:
    """Wait until there is something to read from a descriptor, or room to write."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def note() -> None:
        if not ready.done():
            ready.set_result(None)

    (loop.add_writer if for_writing else loop.add_reader)(fd, note)
    try:
        await ready
    finally:
        (loop.remove_writer if for_writing else loop.remove_reader)(fd)


def _kill_descendants(pid: int) -> None:
    """Kill the descendants of a process; it still waits for each of them."""
    for _ in range(_KILL_ROUNDS):
        children = [child for child, _ in descendants(pid)]
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if not children:
            break
