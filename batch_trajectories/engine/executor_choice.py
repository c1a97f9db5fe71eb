"""The executor that a config names: local processes or Ray."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from itertools import islice
from pkgutil import resolve_name

from agent.models.resolve import SCRIPTED
from batch_trajectories.basics.errors import ConfigError, install_command
from batch_trajectories.config.models import resolve_settings
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import Executor
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.local_workers import LocalExecutor, fork_workers
from batch_trajectories.engine.run_dir import RunDir
from toolsets.catalog.registry import ALL, TOOLSETS
from toolsets.sandbox import SANDBOXES
from toolsets.sandbox.factory import find_sandbox_class


def check_executor(config: RunConfig) -> None:
    """Raise `ConfigError` where the executor cannot do what is asked, or would delete the run."""
    if config.executor == "ray" and find_spec("ray") is None:
        raise ConfigError(
            f"executor: ray is not installed: {install_command('ray')}, here and on every node, or "
            "leave --executor=ray out"
        )
    if config.executor == "ray" and config.keep_workspaces is not None:
        raise ConfigError(
            "keep_workspaces: workers on other nodes keep no workspaces; leave it out, or use "
            "--executor=local"
        )
    if any(part.startswith("_ray_pkg_") for part in config.output_dir.resolve().parts):
        raise ConfigError(
            f"output_dir: {config.output_dir} is in the copy of a directory that Ray makes for a "
            "job and deletes later: give an absolute path on this node by --output_dir"
        )


def fork_ahead(config: RunConfig) -> None:
    """Fork the workers of a start before it is planned; see `fork_workers`.

    No more than there can be tasks.
    """
    if config.executor == "local":
        wanted = config.enabled_toolsets or ALL
        for name, toolset in TOOLSETS.items():
            if name in wanted or (toolset.in_all and set(wanted) & set(ALL)):
                len(toolset.tools)  # which imports them, once for all
        if config.sandbox in SANDBOXES:  # others are the user's
            find_sandbox_class(config.sandbox)
            if config.is_inside:
                _load_images(config.sandbox)
        if config.mcp:
            import toolsets.mcp.servers  # noqa: F401 - as above
        if config.model_weights().keys() != {SCRIPTED}:
            from agent.models.prices import load_table

            load_table()
            _load_clients(config)
        fork_workers(min(config.num_workers, _most_tasks(config)))


def _load_images(sandbox: str) -> None:
    """Import what conversations in images need."""
    import batch_trajectories.engine.worker.diffs.diffs  # noqa: F401 - as for `_load_clients`

    if (images := SANDBOXES[sandbox].images) is not None:
        resolve_name(images)


def _load_clients(config: RunConfig) -> None:
    """Import what calls of the run's models need."""
    import batch_trajectories.engine.worker.call_limiter  # noqa: F401 - workers would each import it
    from agent.models.client.endpoint import load_client

    for name in config.model_weights():
        with suppress(ValueError):  # the plan will say why
            load_client(resolve_settings(config, name))


def _most_tasks(config: RunConfig) -> int:
    """The most tasks that there can be, as far as the first lines of the dataset show."""
    if config.dataset_file.suffix == ".jsonl" and config.dataset_file.is_file():
        with suppress(OSError), config.dataset_file.open("rb") as file:  # the plan will say why
            return sum(1 for _ in islice(file, config.num_workers)) * config.num_samples
    return config.num_workers


def open_executor(config: RunConfig, run_dir: RunDir) -> Executor:
    """Open the executor that starts the workers of a run. Raises `ConfigError`."""
    if config.executor == "local":
        return LocalExecutor()
    executor: Executor = find_feature(config.executor)(config, run_dir)
    return executor
