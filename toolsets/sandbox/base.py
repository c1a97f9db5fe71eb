"""What running a command takes and gives, whichever sandbox runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from batch_trajectories.basics.errors import ToolError
from toolsets.workspace.workspace import Workspace

Engine = Literal["docker", "podman"]
"""A program that runs containers."""

Pull = Literal["never", "missing"]
"""Whether images that the engine lacks are pulled."""

SessionKind = Literal["shell", "python"]
"""What a task has one of, with a state that lasts from call to call."""


class SandboxError(ToolError):
    """The sandbox could not run the command at all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on every command that a sandbox runs."""

    timeout_s: float = 120.0
    """Longest time one call may take; a call may ask for less, never for more."""
    memory_mb: int = 2048
    """Private memory of each process."""
    cpus: float | None = None
    """CPUs that all commands together may use; None: all. Not enforced without a control group."""
    processes: int = 512
    """Processes and threads of the task at a time, where the system can limit them."""
    file_mb: int = 512
    """Largest single file a command may write."""
    workspace_mb: int = 4096
    """Size of the workspace. It is measured while calls run and after them, so what writes fast
    gets beyond it for a second or so."""
    output_bytes: int = 64 * 1024
    """Kept of each output stream: its head and its tail."""
    tmp_mb: int = 256
    """Size of /tmp, and of /dev/shm, where the sandbox has its own."""
    network: bool = False
    """Commands may reach the network."""

    def command_timeout_s(self, asked_s: float | None) -> float:
        """Return the time a call may take that asked for `asked_s`."""
        return self.timeout_s if asked_s is None else min(asked_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class Extras:
    """What a sandbox has besides workspace and system, for a program that the user installed.

    Sandboxes without isolation see everything of the machine anyway.
    """

    binds: Mapping[str, str] = field(default_factory=dict)
    """Files and directories of the machine by their path in the sandbox, read-only."""
    home: str | None = None
    """A directory that is empty and writable at first and gone with the sandbox; not in images."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How one call ended and what it printed."""

    exit_code: int | None
    """128 + N for a process ended by signal N, as shells report it; None if it was stopped."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """The middle of an output stream was cut."""
    duration_s: float
    full_mb: int | None = None
    """The size of the workspace where it is over its limit."""
    was_filling: bool = False
    """The call was stopped because it made a workspace larger that was over its limit."""
    value: str | None = None
    """The `repr` of a cell's last expression, where it is not None."""
    plots: tuple[str, ...] = ()
    """Files that figures were saved in."""
    last_pid: int | None = None
    """The process that the shell started last in the background."""
    ended: bool = False
    """The session is gone with all that it held; the next call begins a new one."""
    lost: str | None = None
    """Why the session had lost what it held, before this call."""
    is_first: bool = False
    """No call was made to this session before."""
    running: int | None = None
    """How many processes, and threads of the interpreter, ran on after the call besides the
    sessions; None where that is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSettings:
    """What the options of a run say about its sandboxes; each sandbox uses what it needs."""

    image: str | None = None
    """`--docker_image`, or the image of a row."""
    engine: Engine = "docker"
    runtime: str | None = None
    """The OCI runtime of the engine's containers; None: the engine's own choice."""
    images: Path | None = None
    """The directory of images."""
    pull: Pull = "never"


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """A container image and what a row or an option says about working in it.

    What is None or empty is as the image's own configuration has it.
    """

    reference: str
    """A name as `docker.io/org/name:tag`, or a digest as `sha256:...`."""
    workdir: str | None = None
    """The directory of the image that is the workspace, an absolute path."""
    user: str | None = None
    """`name`, `uid`, `name:group` or `uid:gid`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the image's."""
    network: bool = False
    """Commands may reach the network."""
    starts_entrypoint: bool = True
    """The image's ENTRYPOINT runs beside commands."""


class Sandbox(ABC):
    """A place that runs commands beside one workspace, for one task.

    It is started by the first call, so making one is cheap, and kept until it is stopped. Calls
    wait for each other. A subclass is registered by its name, see `toolsets.sandbox.factory`; most
    derive from `toolsets.sandbox.served.ServedSandbox`, which needs only `home` and `launch`.
    """

    name: ClassVar[str]
    """What `--sandbox` calls it."""
    is_isolated: ClassVar[bool] = True
    """Commands have files and processes of their own, and no network unless `Limits` give it."""
    needs_image: ClassVar[bool] = False
    """It starts from `SandboxSettings.image`."""
    limits_itself: ClassVar[bool] = False
    """It limits memory, processes and CPUs without a control group of ours."""
    lies_in_workspace: ClassVar[bool] = True
    """What lasts until the next sandbox of a conversation lies in the workspace's directory."""
    takes_extras: ClassVar[bool] = False
    """It can show `Extras`, so that agents that are commands run in it."""
    has_own_loopback: ClassVar[bool] = False
    """Its 127.0.0.1 is not this machine's, even where it has a network."""

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """Why it does not work here and what to do, in one sentence; None if it works.

        It begins with "sandbox NAME: ". Asked at the start of a run, and by `ServedSandbox` for
        each sandbox, so what takes long is to be remembered (`functools.cache`).
        """
        del settings
        return None

    @classmethod  # noqa: B027 - most have nothing to prepare
    def prepare(cls) -> None:
        """Do what is to be done once in each process that will make such sandboxes."""

    @classmethod
    @abstractmethod
    def create(
        cls,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        extras: Extras | None = None,
    ) -> Sandbox:
        """Return the sandbox of one task; raises `SandboxError`. Blocks no longer than a file."""

    @property
    @abstractmethod
    def home(self) -> str:
        """The path of the workspace as commands see it."""

    @abstractmethod
    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one command apart from all sessions; what it starts is killed when it ends.

        Raises `SandboxError` if it could not be started.
        """

    @abstractmethod
    async def run(
        self,
        session: SessionKind,
        code: str,
        *,
        timeout_s: float | None = None,
        output_file: str | None = None,
    ) -> ExecResult:
        """Run a command in the task's shell, or a cell in its interpreter.

        With `output_file`, a path in the sandbox, the shell starts the command in the background,
        in a process group of its own, and lets it print into that file. Raises `SandboxError` if
        the session could not be started.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End all that runs; may be called again, and without any call before."""
