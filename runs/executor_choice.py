"""The executor that a config names: local processes or Ray."""

from __future__ import annotations

from importlib.util import find_spec

from runs.config.run_config import RunConfig
from runs.errors import ConfigError
from runs.executors.base import Executor
from runs.executors.local import LocalExecutor
from runs.run_dir import RunDir
from toolsets.extras import install


def check_executor(config: RunConfig) -> None:
    """Raise `ConfigError` if the packages of the executor are not installed."""
    if config.executor == "ray" and find_spec("ray") is None:
        msg = (
            f"executor: ray is not installed: {install('ray')}, here and on every node, or leave "
            "--executor=ray out"
        )
        raise ConfigError(msg)


def open_executor(config: RunConfig, run_dir: RunDir) -> Executor:
    """Open the executor that starts the workers of a run. Raises `ConfigError`."""
    if config.executor == "local":
        return LocalExecutor()
    from runs.executors.ray.executor import RayExecutor  # slow, and an extra

    return RayExecutor(config, run_dir)
