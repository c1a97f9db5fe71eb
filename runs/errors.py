"""What stops a run. Each `RunError` has one exit code; each message says what to do next."""

from __future__ import annotations

from toolsets.extras import install


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
