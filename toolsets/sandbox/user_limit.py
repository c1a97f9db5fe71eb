"""Whether a user has as many processes as the system allows."""

from __future__ import annotations

import contextlib
import os
import re
import resource
from pathlib import Path

# What shells, C programs and Python say of it. Others say the first of a lock or a socket, and a
# command can print anything, so it only gives cause to count.
_SAID = re.compile(r"Resource temporarily unavailable|can't start new thread|Cannot fork")
_NEARLY = 0.9
"""Some may have ended since."""


def is_user_full(*outputs: str) -> bool:
    """Whether a command says that it got no process, and this user really is at its limit."""
    if not any(map(_SAID.search, outputs)):
        return False
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if limit == resource.RLIM_INFINITY or os.getuid() == 0:  # the limit does not hold root
        return False
    return _tasks_of(os.getuid()) >= _NEARLY * limit


def _tasks_of(user: int) -> int:
    total = 0
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            status = (path / "status").read_text()
            if int(status.partition("\nUid:")[2].split()[0]) == user:
                total += int(status.partition("\nThreads:")[2].split()[0])
    return total
