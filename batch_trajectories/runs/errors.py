"""Errors that stop a run. Each has an exit code; each message says what to do next."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

from toolsets.errors import machine_failure
from toolsets.extras import install

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


def missing(what: str, extra: str) -> ConfigError:
    """The error for a feature whose packages are not installed."""
    return ConfigError(f"{what} needs more packages: {install(extra)}")


def interrupted(number: int) -> str:
    """The message after a signal."""
    name = signal.Signals(number).name
    return f"interrupted by {name}; finished work is safe: run the same command again to continue"


@contextmanager
def machine_failures_as_stops() -> Iterator[None]:
    """Raise `EnvironmentStop` for failures of the machine: a full disk, no memory or processes."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        failure = machine_failure(error)
        if failure is None and not isinstance(error, OSError):
            raise
        raise EnvironmentStop(
            f"{failure or error}. Finished work is safe; fix that and run the same command again"
        ) from error
