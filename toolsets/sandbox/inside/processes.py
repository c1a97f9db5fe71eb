"""Finds and measures the processes and files of a task from inside its sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator
from functools import cache
from typing import Any

HAS_PROC = os.path.isdir("/proc/self")
HAS_CHILDREN = os.path.exists(f"/proc/self/task/{os.getpid()}/children")
_FILE_BYTES = 16 << 10
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def ticks() -> int:
    """Return the present time in the unit of processes' start times (/proc); 0 if unknown."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def descendants(root: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the id and start time of each living process beneath this one, or `root`.

    Processes that lose their parent become children of this process, so none escapes. Without /proc
    none is found.
    """
    for pid in all_descendants(root):
        with contextlib.suppress(OSError):
            fields = _stat_fields(pid)
            if fields[0] != b"Z":
                yield pid, int(fields[19])


def find_started(since: int, before: Container[int], sessions: Container[int]) -> Iterator[int]:
    """Yield living processes that were started at `since` or later and are not in `before`.

    Processes whose parent is older are left out, unless the parent is one of `sessions`.
    """
    children = _children_finder()
    pending = [os.getpid()] if HAS_PROC else []
    while pending:
        for pid in children(pending.pop()):
            with contextlib.suppress(OSError):
                fields = _stat_fields(pid)
                is_new = int(fields[19]) >= since and pid not in before
                if is_new or pid in sessions:
                    pending.append(pid)
                if is_new and fields[0] != b"Z":
                    yield pid


def all_descendants(root: int | None = None) -> Iterator[int]:
    """Yield all processes beneath this one, or `root`, also ended ones not waited for."""
    children = _children_finder()
    pending = [os.getpid() if root is None else root] if HAS_PROC else []
    while pending:
        for pid in children(pending.pop()):
            pending.append(pid)
            yield pid


def _children_finder() -> Callable[[int], list[int]]:
    return _children if HAS_CHILDREN else _children_by_parent().__getitem__


def _children(pid: int) -> list[int]:
    pids = []
    with contextlib.suppress(OSError):
        # Two links and one per thread. Most processes have one thread, with the process's number.
        has_one = os.stat(f"/proc/{pid}/task").st_nlink == 3
        for thread in [pid] if has_one else os.listdir(f"/proc/{pid}/task"):
            children = read_file(f"/proc/{pid}/task/{thread}/children")
            pids += [int(child) for child in children.split()]
    return pids


def _children_by_parent() -> dict[int, list[int]]:
    """Return the children of all processes, for systems without a list per process."""
    children: dict[int, list[int]] = defaultdict(list)
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            children[int(_stat_fields(int(name))[1])].append(int(name))
    return children


def read_file(path: str) -> bytes:
    """Return the content of a file in /proc, with fewer system calls than `open` makes."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        content = b""
        while chunk := os.read(fd, 1 << 16):
            content += chunk
        return content
    finally:
        os.close(fd)


def _stat_fields(pid: int) -> list[bytes]:
    """Return the fields of a process's `stat`, from its state on."""
    return read_file(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def count_tasks() -> int:
    """Count the processes and threads beneath this one."""
    total = 0
    for pid, _ in descendants():
        with contextlib.suppress(OSError):
            total += int(_stat_fields(pid)[17])
    return total


def measure_memory(enough: int) -> int:
    """Return the bytes of memory of all processes beneath this one, with shared memory.

    The sum counts memory that several processes share for each of them, unless it is above
    `enough`: then it is made exact.
    """
    pids = [pid for pid, _ in descendants()]
    total = files = 0
    seen: set[tuple[int, int]] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/statm", "rb") as f:
                total += int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            # Files in memory may be mapped by no process, so count them separately.
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    if not os.readlink(path).startswith("/memfd:"):
                        continue
                    state = os.stat(path)
                    if (state.st_dev, state.st_ino) not in seen:
                        seen.add((state.st_dev, state.st_ino))
                        files += state.st_blocks * 512
    return total + files if total + files <= enough else max(files, _exact_memory(pids, files))


def _exact_memory(pids: list[int], files: int) -> int:
    """Return the memory of processes; each page counts once.

    `files` are bytes of files in memory, which any of the processes may have mapped.
    """
    own = shared = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as f:
            for line in f:
                if line.startswith((b"Pss_Anon:", b"SwapPss:")):
                    own += int(line.split()[1]) << 10
                elif line.startswith(b"Pss_Shmem:"):
                    shared += int(line.split()[1]) << 10
    return own + max(shared, files)


def measure_size(root: str) -> int:
    """Return the bytes that files take on disk; each file and directory counts as 16 KiB or more.

    A tree that is too deep to walk counts as full: only an attempt to escape makes one.
    """
    # File systems have about one inode per 16 KiB: small files use them up before the disk is full.
    total = 0
    linked: set[int] = set()
    pending = [root]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink == 1 or status.st_ino not in linked:
                        total += max(status.st_blocks * 512, _FILE_BYTES)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif status.st_nlink > 1:
                        linked.add(status.st_ino)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return 1 << 62
    return total


def hold_descendants() -> None:
    """Adopt processes that lose their parent; protect this process from other processes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    set_dumpable(False)


def set_dumpable(allowed: bool) -> None:
    """Allow processes of the same user to look into this one, or forbid it."""
    _prctl(_PR_SET_DUMPABLE, int(allowed))


def check_descriptor(highest: int) -> None:
    """Raise `OSError` (EMFILE) if the limit of open files is too low for a descriptor."""
    # The system calls it a bad descriptor, which looks like a failure of the command.
    if highest >= resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def close_descriptors(kept: set[int]) -> None:
    """Close all descriptors of this process except `kept`."""
    for name in os.listdir("/dev/fd"):
        if int(name) not in kept:
            with contextlib.suppress(OSError):  # the listing had a descriptor itself
                os.close(int(name))


def _prctl(option: int, value: int) -> None:
    if (prctl := _find_prctl()) is not None:
        prctl(option, value, 0, 0, 0)


@cache
def _find_prctl() -> Any:
    """Return the C function `prctl`; None on systems other than Linux."""
    try:
        import ctypes

        return ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return None
