"""How an agent's program is started in its sandbox: what it is shown, its version, how many fit."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from agent.gateway.command_agent import CommandAgent
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import clip
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.worker.agents.installed import Installed, NotInstalled, find_program
from toolsets.sandbox.base import ExecResult, Extras, Limits, SandboxError
from toolsets.sandbox.factory import make_sandbox, sandbox_kind
from toolsets.sandbox.programs import inside_python
from toolsets.workspace.workspace import Workspace

HOME = "/home/user"
"""The HOME of agents in sandboxes that have a file system of their own."""

SOCKET_DIR = "/run/gateway"
"""Where an agent's sandbox has the socket of its gateway."""

_SHARE = 0.8
"""Of the free memory, for agents."""
VERSION_TIMEOUT_S = 180.0
"""Some agents load for a minute where all cores are busy."""
_SHOWN = 300


def with_checked_agent(config: RunConfig) -> RunConfig:
    """Run the agent's program for its version, and set how many conversations fit into memory.

    Nodes of a cluster have their own memory, which is not looked at.

    It runs in the sandbox, so an agent that cannot start there is found before anything is paid.
    Blocks. Raises `ConfigError`.
    """
    if config.agent is None:
        return config
    agent = config.agent
    try:
        installed = program_of(agent, config)
        if installed.shims is not None and sandbox_kind(config.sandbox).is_isolated:
            raise NotInstalled(
                f"{agent.command[0]!r} or its interpreter is a script of a version manager in "
                f"{installed.shims}, which does not work in the sandbox; install the agent in a "
                "virtual environment, or give the path of the real program (as `pyenv which NAME` "
                "prints it)"
            )
        # Each image may have another one: its worker asks.
        asks = agent.version_command and not config.uses_images
        version = version_of(agent, config) if asks else None
    except (NotInstalled, SandboxError) as error:
        raise ConfigError(f"agent {agent.name!r}: {error}") from error
    changes: dict[str, Any] = {"agent": agent.with_found(version)}
    is_here = config.executor == "local"
    if is_here and config.concurrency is None and (free_mb := free_memory_mb()) is not None:
        limit = max(1, int(_SHARE * free_mb / agent.memory_mb))
        changes["num_workers"] = min(config.num_workers, limit)
        changes["concurrency"] = min(config.batch_size, limit // changes["num_workers"])
    return config.model_copy(update=changes)


def check_agent_of_node(config: RunConfig) -> None:
    """Raise `ConfigError` where this node lacks the agent, or has another version of it."""
    here = with_checked_agent(config).agent
    if here is not None and config.agent is not None and here.found != config.agent.found:
        raise ConfigError(
            f"agent {here.name!r} is version {here.found} on this node, but {config.agent.found} "
            "where the run was started; install the same version on all nodes"
        )


def version_of(agent: CommandAgent, config: RunConfig) -> str:
    """What an agent's program says its version is. Raises `NotInstalled` and `SandboxError`."""
    from agent.session import run_here  # takes long to import, and few runs have agents

    program, *arguments = agent.version_command
    installed = find_program(program, agent.programs)

    async def ask() -> str:
        with tempfile.TemporaryDirectory() as directory:
            limits = Limits(
                timeout_s=VERSION_TIMEOUT_S,
                memory_mb=config.command_memory_mb,
                processes=config.max_processes,
            )
            sandbox = make_sandbox(
                config.sandbox,
                Workspace(Path(directory) / "workspace"),
                limits,
                extras=extras_of(installed),
            )
            try:
                path = f"PATH={path_of(installed)}"
                argv = ["env", f"HOME={HOME}", path, installed.path, *arguments]
                return printed_version(agent, await sandbox.exec(argv))
            finally:
                await sandbox.stop()

    return run_here(ask())


def printed_version(agent: CommandAgent, result: ExecResult) -> str:
    """The version in what the version command printed; raises `SandboxError`."""
    # Some print it as they print errors; what failed may say anything there.
    said = result.stdout or (result.stderr if result.exit_code == 0 else "")
    version = re.search(r"\d+\.\d+[\w.+-]*", said)
    if version is None:
        how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        printed = clip(f"{result.stdout}\n{result.stderr}".strip(), max_chars=_SHOWN)
        raise SandboxError(
            f"`{' '.join(agent.version_command)}` printed no version ({how}): "
            f"{printed or 'no output'}; set `version` of the agent to the command that does, or to "
            "[] if there is none"
        )
    return version[0].rstrip(".")


def program_of(agent: CommandAgent, config: RunConfig) -> Installed:
    """Where the program of an agent is. Raises `NotInstalled`.

    An image has it itself; what of this machine is shown there beside it is in `programs`.
    """
    if not config.uses_images:
        return find_program(agent.command[0], agent.programs)
    for path in agent.programs:
        if not path.exists():
            raise NotInstalled(f"{path} does not exist")
    shown = [str(path.absolute()) for path in agent.programs]
    return Installed(agent.command[0], dict(zip(shown, shown, strict=True)), ())


def extras_of(
    installed: Installed,
    socket: Path | None = None,
    *,
    in_image: bool = False,
    home: str | None = HOME,
) -> Extras:
    """What the sandbox of an agent shows: its program, and the directory of its socket.

    In an image also the Python that forwards its calls. `home` None: the image's user has one.
    """
    binds = dict(installed.binds)
    if socket is not None:
        binds[SOCKET_DIR] = str(socket.parent)
    if in_image:
        binds |= {at: path for path, at in inside_python().mounts}
    return Extras(binds, home)


def path_of(installed: Installed) -> str:
    """The PATH of an agent."""
    system = ("/usr/local/bin", "/usr/bin", "/bin", "/usr/local/sbin", "/usr/sbin", "/sbin")
    return ":".join(dict.fromkeys((*installed.directories, *system)))


def free_memory_mb() -> int | None:
    """The memory that this machine or container has left; None if that cannot be said."""
    amounts = []
    try:
        meminfo = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    if available := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.M):
        amounts.append(int(available[1]) >> 10)
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            limit_mb, now = ((root / name).read_text().strip() for name in (limit, used))
        except OSError:
            continue
        if limit_mb.isdigit() and now.isdigit():
            amounts.append(max(0, int(limit_mb) - int(now)) >> 20)
    return min(amounts, default=None)
