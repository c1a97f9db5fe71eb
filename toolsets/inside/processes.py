"""The processes and files of a task, as seen from inside its sandbox."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator

HAS_PROC = os.path.isdir("/proc/self")
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36


def ticks() -> int:
    """The time by which the system tells when a process was started."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


def descendants(root: int | None = None) -> Iterator[tuple[int, int]]:
    """The living processes beneath this one, or `root`, and when each was started.

    None escape by losing their parent, for they then become children of this process. Without
    /proc there are none to be found.
    """
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc") if HAS_PROC else ():
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{int(name)}/stat", "rb") as f:
            fields = f.read().rpartition(b")")[2].split()
            if fields[0] != b"Z":
                children.setdefault(int(fields[1]), []).append((int(name), int(fields[19])))
    pending = [os.getpid() if root is None else root]
    while pending:
        for pid, start in children.get(pending.pop(), ()):
            pending.append(pid)
            yield pid, start


def size_of(root: str) -> int:
    """The bytes that files take on disk; each file and directory counts 4 KiB at least.

    A path too long to look beneath counts as full, for nothing but an escape is that deep.
    """
    total = 0
    linked: set[int] = set()
    pending = [root]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    status = entry.stat(follow_symlinks=False)
                    if status.st_nlink == 1 or status.st_ino not in linked:
                        total += max(status.st_blocks * 512, 4096)
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif status.st_nlink > 1:
                        linked.add(status.st_ino)
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return 1 << 62
    return total


def hold_descendants() -> None:
    """Keep processes that lose their parent as children, and this one out of others' reach."""
    try:
        import ctypes

        prctl = ctypes.CDLL(None).prctl
    except (ImportError, OSError, AttributeError):
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
