"""The errors of tools, of the machine and of runs.

Only this module knows how a machine reports that it is out of disk, files, memory or processes.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batch_trajectories.basics.versions import installed_version


class ToolError(Exception):
    """A failure whose message the model sees unchanged."""


class HostError(Exception):
    """The machine failed, not the tool: its disk is full or broken, or a resource is used up.

    It is never a tool result: its message must not become part of a conversation.
    """


class SandboxLost(HostError):
    """The machine of one sandbox, elsewhere, does not answer any more; this machine is well.

    The attempt of its conversation fails, and the next one continues it on another machine. A
    command may be the reason, so the attempts are counted.
    """

    error_class = "sandbox_lost"


_DISK = "free space on the disk or repair it"
_FILES = "raise the limit of open files (ulimit -n), or run fewer conversations at a time"
_MEMORY = "give it more memory, or run fewer conversations at a time (--batch_size, --num_workers)"
_PROCESSES = (
    "raise the limit on processes and threads (ulimit -u, the pids limit of the container), or "
    "run fewer conversations at a time (--batch_size, --num_workers)"
)
_READ_ONLY = "make that file system writable"
_TO_DO = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EIO: _DISK,
    errno.EROFS: _READ_ONLY,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
    errno.EAGAIN: _PROCESSES,
}
HOST_ERRNOS = frozenset(_TO_DO)
"""The error numbers that mean that the machine failed."""

_NO_THREAD = "can't start new thread"
"""Python's message for EAGAIN and ENOMEM when it starts a thread."""

# Texts of the C library, also used by shells and bwrap (we set their locale), and of Node.js.
_TEXTS = {os.strerror(number): number for number in _TO_DO} | {
    **{errno.errorcode[number]: number for number in _TO_DO},
    _NO_THREAD: errno.EAGAIN,
    "Cannot fork": errno.EAGAIN,
    "MemoryError": errno.ENOMEM,
}
_ANY_TEXT = re.compile("|".join(map(re.escape, _TEXTS)))

_SPARE_BYTES = 64 << 20


def machine_failure(error: BaseException) -> str | None:
    """The resource that the machine has run out of, with advice; None for any other error."""
    if isinstance(error, HostError):
        return str(error)
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(machine_failure, error.exceptions)), None)
    if isinstance(error, OSError) and error.errno in HOST_ERRNOS:
        named = f"{error.filename}: " if error.filename is not None else ""
        return f"{named}{describe_errno(error.errno)}"
    if isinstance(error, MemoryError):
        return describe_errno(errno.ENOMEM)
    if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
        return f"{_NO_THREAD}; {_PROCESSES}"
    return None


def machine_failure_in(output: str) -> str | None:
    """A program's output with advice, if it says that the machine has run out of a resource.

    None for any other output.
    """
    match = _ANY_TEXT.search(output)
    return None if match is None else f"{output}; {_TO_DO[_TEXTS[match[0]]]}"


def describe_errno(number: int) -> str:
    """The text of one of `HOST_ERRNOS`, with advice."""
    return f"{os.strerror(number)}; {_TO_DO[number]}"


def help_for_write(error: OSError) -> str:
    """Advice about a file or directory that cannot be written."""
    match error.errno:
        case errno.EACCES | errno.EPERM:
            return "give this user the right to write there"
        case errno.EROFS:
            return _READ_ONLY
        case errno.EFBIG:
            return "raise the limit of file sizes (ulimit -f)"
    return "make room or fix the disk"


def has_memory() -> bool:
    """Whether memory is left; if so, a `MemoryError` came from one oversized value."""
    try:
        mmap.mmap(-1, _SPARE_BYTES).close()
    except (OSError, MemoryError):
        return False
    return True


SIGNALLED = 128
"""The exit code of a run that a signal stopped is this plus the signal's number, as in shells."""


class RunError(Exception):
    """A run cannot start or continue. The command line returns `exit_code`."""

    exit_code = 2


class ConfigError(RunError):
    """An option, a config file or their combination is wrong."""


class DatasetError(RunError):
    """The dataset cannot be read, or has no usable row."""


class RunDirError(RunError):
    """The run directory cannot be used: not writable, or not a run."""


class EnvironmentStop(RunError):
    """The environment stopped the run: rejected credentials, no credit, a full disk."""

    exit_code = 4


class DatasetChanged(EnvironmentStop):
    """The dataset has changed since this start began; the next start uses it as it is."""


class RunLocked(RunError):
    """Another process is working on this run."""

    exit_code = 5


class AgentFailed(Exception):
    """An agent that runs as a command ended without an answer; the message says how."""

    error_class = "agent_failed"


class Stopped(Exception):
    """The run is stopping: the conversation will continue where its journal ends."""


def install_command(extra: str) -> str:
    """The command that installs an extra: beside the installed program, or in the checkout."""
    name = "batch-trajectories"
    if installed_version(name) is None:
        return f"pip install -e '{Path(__file__).parents[2]}[{extra}]'"
    return f"pip install '{name}[{extra}]'"


def missing_extra(what: str, extra: str) -> ConfigError:
    """The error for a feature whose packages are not installed."""
    return ConfigError(f"{what} needs more packages: {install_command(extra)}")


def interruption_message(number: int) -> str:
    """The message of a run that was stopped by signal `number`."""
    name = signal.Signals(number).name
    return f"interrupted by {name}; finished work is safe: run the same command again to continue"


def lost_directory() -> str | None:
    """Advice if the current directory was removed; None if it exists."""
    try:
        Path.cwd()
    except FileNotFoundError:
        return (
            "the current directory was removed, so that relative paths lead nowhere: change to one "
            "that exists (cd), then run the same command again"
        )
    return None


@contextmanager
def stop_on_machine_failure() -> Iterator[None]:
    """Raise `EnvironmentStop` for failures of the machine: a full disk, no memory or processes."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        failure = machine_failure(error)
        if failure is None and not isinstance(error, OSError):
            raise
        if isinstance(error, FileNotFoundError) and (lost := lost_directory()) is not None:
            raise EnvironmentStop(lost) from error
        raise EnvironmentStop(
            f"{failure or error}. Finished work is safe; fix that and run the same command again"
        ) from error
