"""What stops a run. Each `RunError` has one exit code; each message says what to do next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from toolsets.errors import machine_failure
from toolsets.extras import install

SIGNALLED = 128
"""Added to the number of the signal that stopped a run, as shells do."""


class RunError(Exception):
    """A run cannot start or go on. `exit_code` is what the command line returns."""

    exit_code = 2


class ConfigError(RunError):
    """An option, a config file or their combination is wrong."""


class DatasetError(RunError):
    """The dataset cannot be read at all, or holds no usable row."""


class RunDirError(RunError):
    """The run directory cannot be used: not writable, or not a run of ours."""


class EnvironmentStop(RunError):
    """The environment ended the run: rejected credentials, no credit, a disk that is full."""

    exit_code = 4


class DatasetChanged(EnvironmentStop):
    """The dataset is not what it was when the start began; the next start takes it as it is."""


class RunLocked(RunError):
    """Another process is working on this run."""

    exit_code = 5


class Stopped(Exception):
    """The run is being stopped: the conversation rests where its journal ends."""


def missing(what: str, extra: str) -> ConfigError:
    """The error for a choice whose packages are not installed."""
    return ConfigError(f"{what} needs more packages: {install(extra)}")


def interrupted(number: int) -> str:
    """What a user reads after a signal."""
    name = signal.Signals(number).name
    return f"interrupted by {name}; finished work is safe: run the same command again to resume"


@contextmanager
def machine_failures_as_stops() -> Iterator[None]:
    """Raise `EnvironmentStop` for what the machine refuses: room on a disk, memory, processes."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        failure = machine_failure(error)
        if failure is None and not isinstance(error, OSError):
            raise
        msg = (
            f"{failure or error}; finished work is safe: fix the problem and run the same command "
            "again"
        )
        raise EnvironmentStop(msg) from error
