"""The lock of a run directory: one process at a time works on a run."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson

from batch_trajectories.basics.errors import RunLocked
from batch_trajectories.runs.store.files import open_own


def holder_of(path: Path) -> dict[str, Any] | None:
    """The process that works on the run: {"pid", "host", "started"}; {} if it is just starting.

    None if there is none. Reads the kernel's list of locks: trying the lock could make a start
    fail at that moment.
    """
    try:
        lock = (path / "lock").stat()
        locks = Path("/proc/locks").read_text().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return None
    name = f" {os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}:{lock.st_ino} "
    if not any("FLOCK" in line and name in line for line in locks):
        return None
    fd = os.open(path / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _holder(fd)
    finally:
        os.close(fd)


def refuse_held(path: Path) -> None:
    """Raise `RunLocked` if another process is working on the run."""
    if (holder := holder_of(path)) is not None:
        raise _is_locked(path, holder)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run. Raises `RunLocked`."""
    fd = lock(path)
    try:
        yield
    finally:
        os.close(fd)


def lock(path: Path) -> int:
    """Take the lock of a run and return its descriptor. Raises `RunLocked`."""
    while True:
        fd = open_own(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NONBLOCK)
        try:
            if _is_locked_by(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _is_locked_by(fd: int, path: Path) -> bool:
    """Whether the lock of a run was taken; not if its directory was moved aside meanwhile."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _is_locked(path, _holder(fd)) from None
    if not is_same_file(fd, path / "lock"):
        return False
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.time()}
    os.ftruncate(fd, 0)
    os.pwrite(fd, orjson.dumps(me), 0)
    return True


def _is_locked(path: Path, holder: dict[str, Any]) -> RunLocked:
    return RunLocked(
        f"{path}: another process is working on this run: pid {holder.get('pid')} on host "
        f"{holder.get('host')}. Wait for it, or stop it and run the same command again."
    )


def is_same_file(fd: int, path: Path) -> bool:
    """Whether `fd` refers to the file that is at `path` now."""
    try:
        there = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return os.path.samestat(os.fstat(fd), there)


def _holder(fd: int) -> dict[str, Any]:
    try:
        holder = orjson.loads(os.pread(fd, 4096, 0))
    except orjson.JSONDecodeError:
        return {}
    return holder if isinstance(holder, dict) else {}
