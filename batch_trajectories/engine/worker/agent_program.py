"""Start an agent's program in its sandbox: the files it sees, its version, how many fit a
machine."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.gateway.command_agent import CommandAgent
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import clip
from batch_trajectories.config.run_config import RunConfig
from toolsets.sandbox.base import ExecResult, Extras, Limits, SandboxError
from toolsets.sandbox.factory import find_sandbox_class, make_sandbox
from toolsets.sandbox.programs import inside_python
from toolsets.workspace.workspace import Workspace

# Programs that the user installed: where they are, and what of the machine they need to run.
#
# A sandbox shows /usr. A program elsewhere (npm's or pip's, an own directory) is shown read-only
# with what it is installed with, at the same path.

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")


class NotInstalled(ValueError):
    """A program was not found; the message names it."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A program of this machine."""

    path: str
    """Absolute path of the program."""
    binds: Mapping[str, str]
    """Paths that the program needs besides the system, by their paths in a sandbox."""
    directories: Sequence[str]
    """Directories of the program and its interpreter, for its PATH."""

    @property
    def shims(self) -> str | None:
        """The directory of pyenv, asdf or the like with the program or its interpreter; None
        without one. Scripts in it look for the real program with all that the version manager
        has installed, which a sandbox does not show."""
        return next((place for place in self.directories if Path(place).name == "shims"), None)


def find_program(name: str, more: Sequence[Path] = ()) -> Installed:
    """Find a program by its path or on the PATH. `more` are further paths to show.

    Raises `NotInstalled`.
    """
    located = shutil.which(name)
    if located is None:
        if "/" in name and Path(name).is_file():
            raise NotInstalled(f"the program {name!r} is not executable: chmod +x {name}")
        raise NotInstalled(f"the program {name!r} was not found; install it, or give its path")
    binds: list[Path] = []
    directories: list[str] = []
    program = _add(Path(located).absolute(), binds, directories)
    for path in more:
        if not path.exists():
            raise NotInstalled(f"{path} does not exist")
        binds.append(path.absolute())
    shown = {str(path): str(path) for path in dict.fromkeys(binds) if not _is_system(path)}
    return Installed(str(program), shown, tuple(dict.fromkeys(directories)))


def _add(path: Path, binds: list[Path], directories: list[str]) -> Path:
    """Note what the program at `path` needs; return its path after following its links."""
    if environment := _find_environment(path):
        # A link to the interpreter is followed only for what it needs: by its own place the
        # interpreter finds the packages.
        binds.append(environment)
        base = (environment / "bin" / "python").resolve().parent
        binds.append(base.parent)
        directories += [str(environment / "bin"), str(base)]
        return path
    real = path.resolve()
    directories.append(str(real.parent))
    if environment := _find_environment(real):
        return _add(real, binds, directories)
    if packages := _npm_root(real):
        binds.append(packages)
    elif not _is_system(real):
        # An interpreter has a library beside its `bin`; any other program is a single file.
        is_tree = real.parent.name == "bin" and (real.parent.parent / "lib").is_dir()
        binds.append(real.parent.parent if is_tree else real)
    if interpreter := _interpreter(real):
        _add(interpreter, binds, directories)
    return real


def _find_environment(path: Path) -> Path | None:
    """The virtual environment that holds a file."""
    return next((above for above in path.parents if (above / "pyvenv.cfg").is_file()), None)


def _npm_root(path: Path) -> Path | None:
    """The outermost `node_modules` above a file, where packages find the packages that they
    need."""
    return next((above for above in reversed(path.parents) if above.name == "node_modules"), None)


def _interpreter(path: Path) -> Path | None:
    """The program that the first line of a script names."""
    with path.open("rb") as file:
        first = file.readline(512)
    if not first.startswith(b"#!"):
        return None
    words = first[2:].decode(errors="replace").split()
    if words and Path(words[0]).name == "env":
        name = next((word for word in words[1:] if not word.startswith("-")), None)
        located = shutil.which(name) if name else None
        if located is None:
            raise NotInstalled(f"{path}: its interpreter {name!r} was not found")
        return Path(located).absolute()
    return Path(words[0]) if words else None


def _is_system(path: Path) -> bool:
    return any(path.is_relative_to(system) for system in _SYSTEM)


HOME = "/home/user"
"""The HOME of agents in sandboxes that have a file system of their own."""

SOCKET_DIR = "/run/gateway"
"""Directory in an agent's sandbox with the socket of its gateway."""

_SHARE = 0.8
"""Share of the free memory that agents may use."""
VERSION_TIMEOUT_S = 180.0
"""Seconds for the version command; some agents load for a minute while all cores are busy."""
_MAX_OUTPUT_CHARS = 300


def check_agent_program(config: RunConfig) -> RunConfig:
    """Run the agent's program for its version, and set how many conversations fit into memory.

    Nodes of a cluster have their own memory, which is not looked at.

    It runs in the sandbox, so an agent that cannot start there is found before anything is paid.
    Blocks. Raises `ConfigError`.
    """
    if config.agent is None:
        return config
    agent = config.agent
    try:
        installed = find_agent_program(agent, config)
        if installed.shims is not None and find_sandbox_class(config.sandbox).is_isolated:
            raise NotInstalled(
                f"{agent.command[0]!r} or its interpreter is a script of a version manager in "
                f"{installed.shims}, which does not work in the sandbox; install the agent in a "
                "virtual environment, or give the path of the real program (as `pyenv which NAME` "
                "prints it)"
            )
        # Each image may have another one: its worker asks.
        asks = agent.version_command and not config.uses_images
        version = read_agent_version(agent, config) if asks else None
    except (NotInstalled, SandboxError) as error:
        raise ConfigError(f"agent {agent.name!r}: {error}") from error
    changes: dict[str, Any] = {"agent": agent.with_version(version)}
    is_here = config.executor == "local"
    if is_here and config.concurrency is None and (free_mb := free_memory_mb()) is not None:
        limit = max(1, int(_SHARE * free_mb / agent.memory_mb))
        changes["num_workers"] = min(config.num_workers, limit)
        changes["concurrency"] = min(config.batch_size, limit // changes["num_workers"])
    return config.model_copy(update=changes)


def check_agent_of_node(config: RunConfig) -> None:
    """Raise `ConfigError` if this node lacks the agent, or has another version of it."""
    here = check_agent_program(config).agent
    if (
        here is not None
        and config.agent is not None
        and here.found_version != config.agent.found_version
    ):
        raise ConfigError(
            f"agent {here.name!r} is version {here.found_version} on this node, but "
            f"{config.agent.found_version} where the run was started; install the same version on "
            "all nodes"
        )


def read_agent_version(agent: CommandAgent, config: RunConfig) -> str:
    """The version that an agent's program prints. Raises `NotInstalled` and `SandboxError`."""
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
                extras=sandbox_extras(installed),
            )
            try:
                path = f"PATH={search_path(installed)}"
                argv = ["env", f"HOME={HOME}", path, installed.path, *arguments]
                return printed_version(agent, await sandbox.exec(argv))
            finally:
                await sandbox.stop()

    return run_here(ask())


def printed_version(agent: CommandAgent, result: ExecResult) -> str:
    """The version in what the version command printed; raises `SandboxError`."""
    # Some print it as they print errors; what failed may say anything there.
    output = result.stdout or (result.stderr if result.exit_code == 0 else "")
    version = re.search(r"\d+\.\d+[\w.+-]*", output)
    if version is None:
        how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
        printed = clip(f"{result.stdout}\n{result.stderr}".strip(), max_chars=_MAX_OUTPUT_CHARS)
        raise SandboxError(
            f"`{' '.join(agent.version_command)}` printed no version ({how}): "
            f"{printed or 'no output'}; set `version` of the agent to the command that does, or to "
            "[] if there is none"
        )
    return version[0].rstrip(".")


def find_agent_program(agent: CommandAgent, config: RunConfig) -> Installed:
    """The program of an agent, with its paths. Raises `NotInstalled`.

    An image has the program itself; `programs` names what of this machine it shows beside it.
    """
    if not config.uses_images:
        return find_program(agent.command[0], agent.programs)
    for path in agent.programs:
        if not path.exists():
            raise NotInstalled(f"{path} does not exist")
    shown = [str(path.absolute()) for path in agent.programs]
    return Installed(agent.command[0], dict(zip(shown, shown, strict=True)), ())


def sandbox_extras(
    installed: Installed,
    socket: Path | None = None,
    *,
    in_image: bool = False,
    home: str | None = HOME,
) -> Extras:
    """The paths that the sandbox of an agent shows: its program, and the directory of its socket.

    In an image also the Python that forwards its calls. `home` None: the image's user has one.
    """
    binds = dict(installed.binds)
    if socket is not None:
        binds[SOCKET_DIR] = str(socket.parent)
    if in_image:
        binds |= {at: path for path, at in inside_python().mounts}
    return Extras(binds, home)


def search_path(installed: Installed) -> str:
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
