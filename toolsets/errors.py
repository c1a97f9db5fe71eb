"""What can go wrong with a tool: by its own fault, or by that of the machine.

This is the one place that knows in which ways a machine says that it has no more of something.
"""

from __future__ import annotations

import errno
import mmap
import os
import re


class ToolError(Exception):
    """A failure whose message the model should see as it is."""


class HostError(Exception):
    """The machine failed, not the tool: its disk is full or failing, or it ran out of something.

    No result: what it says must not become part of a conversation.
    """


_DISK = "make room on the disk or mend it"
_FILES = "raise the limit of open files (ulimit -n), or run fewer conversations at a time"
_MEMORY = "give it more memory, or run fewer conversations at a time (--batch_size, --num_workers)"
_PROCESSES = (
    "raise the limit on processes and threads (ulimit -u, the pids limit of the container), or "
    "run fewer conversations at a time (--batch_size, --num_workers)"
)
_TO_DO = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EIO: _DISK,
    errno.EROFS: _DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _PROCESSES,
}
HOST_ERRNOS = frozenset(_TO_DO)
"""What a machine says that has no more of something, as error numbers of the system."""

_NO_THREAD = "can't start new thread"
"""How Python says EAGAIN and ENOMEM where it wanted a thread."""

# As the C library puts them, and shells and bwrap after it, whose locale is ours to choose; and as
# Node.js does.
_SAID = {os.strerror(number): number for number in _TO_DO} | {
    **{errno.errorcode[number]: number for number in _TO_DO},
    _NO_THREAD: errno.EAGAIN,
    "Cannot fork": errno.EAGAIN,
    "MemoryError": errno.ENOMEM,
}
_SAYS_SO = re.compile("|".join(map(re.escape, _SAID)))

_SPARE_BYTES = 64 << 20


def machine_failure(error: BaseException) -> str | None:
    """What this machine is out of and what to do; None where the error says no such thing."""
    if isinstance(error, HostError):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(machine_failure, error.exceptions)), None)
    if isinstance(error, OSError) and error.errno in HOST_ERRNOS:
        named = f"{error.filename}: " if error.filename is not None else ""
        return f"{named}{describe(error.errno)}"
    if isinstance(error, MemoryError):
        return describe(errno.ENOMEM)
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return f"{_NO_THREAD}; {_PROCESSES}"
    return None


def failure_told(words: str) -> str | None:
    """As `machine_failure`, of what a program said that was to start something for us."""
    found = _SAYS_SO.search(words)
    return None if found is None else f"{words}; {_TO_DO[_SAID[found[0]]]}"


def describe(number: int) -> str:
    """One of `HOST_ERRNOS`, and what to do about it."""
    return f"{os.strerror(number)}; {_TO_DO[number]}"


def has_memory() -> bool:
    """Whether this process can have more; if so, a `MemoryError` was about one oversized value."""
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except (OSError, MemoryError):
        return False
    return True
