"""The interface of all sandboxes: their limits and settings, how to run a command, its result."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from batch_trajectories.basics.errors import ToolError
from toolsets.sandbox import Engine, Pull
from toolsets.workspace.workspace import Workspace

if TYPE_CHECKING:
    from toolsets.images.registry.settings import RegistrySettings

SessionKind = Literal["shell", "python"]
"""A session: a shell or an interpreter whose state lasts from call to call; one each per task."""


class SandboxError(ToolError):
    """The sandbox could not run the command at all."""


class Limits(msgspec.Struct, frozen=True):
    """Limits on every command that a sandbox runs."""

    timeout_s: float = 120.0
    """Maximum duration of a call in seconds; a call may ask for less, not for more."""
    memory_mb: int = 2048
    """Maximum private memory of each process."""
    cpus: float | None = None
    """CPUs that all commands together may use; None: all. Not enforced without a control group."""
    processes: int = 512
    """Maximum number of processes and threads of the task, if the system can limit them."""
    file_mb: int = 512
    """Maximum size of each file that a command writes."""
    workspace_mb: int = 4096
    """Maximum size of the workspace. The size is measured during and after calls, so a fast writer
    can exceed the limit for about a second."""
    output_bytes: int = 64 * 1024
    """Maximum number of bytes that are kept of each output stream: its head and its tail."""
    tmp_mb: int = 256
    """Size of /tmp and of /dev/shm, if the sandbox has its own."""
    network: bool = False
    """Commands may reach the network."""

    def command_timeout_s(self, asked_s: float | None) -> float:
        """Return the time limit of a call in seconds; `asked_s` None: the call asked for none."""
        return self.timeout_s if asked_s is None else min(asked_s, self.timeout_s)


class Extras(msgspec.Struct, frozen=True):
    """Files and a home for a program that the user installed, beside workspace and system.

    Sandboxes without isolation show the whole machine anyway.
    """

    binds: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Files and directories of the machine by their path in the sandbox; read-only."""
    home: str | None = None
    """A writable directory, empty at first and removed with the sandbox; ignored in images."""


@dataclass(frozen=True, slots=True)
class ExecResult:
    """The result of one call: how it ended and what it printed."""

    exit_code: int | None
    """128 + N for a process that signal N ended, as in shells; None if the call was stopped."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """The middle of an output stream was cut."""
    duration_s: float
    full_mb: int | None = None
    """The size of the workspace, if it is over its limit; else None."""
    was_filling: bool = False
    """Whether the call was stopped because it added to a workspace that was over its limit."""
    value: str | None = None
    """The `repr` of a cell's last expression; None if there is none or its value is None."""
    plots: tuple[str, ...] = ()
    """Paths of the files in which a cell's figures were saved."""
    last_pid: int | None = None
    """The process id of the latest background job of the shell; None without one."""
    ended: bool = False
    """Whether the session has ended and its state is lost; the next call begins a new one."""
    lost: str | None = None
    """The reason for which the session had lost its state before this call; None if it had not."""
    is_first: bool = False
    """Whether this is the first call to this session."""
    running: int | None = None
    """Number of processes, and threads of the interpreter, that run on after the call besides the
    sessions; None if unknown."""


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a run about its sandboxes; each sandbox uses those that it needs."""

    image: str | None = None
    """The value of `--docker_image`, or the image of a row; None if there is none."""
    engine: Engine = "docker"
    runtime: str | None = None
    """The OCI runtime of the engine's containers; None: the engine's own choice."""
    images: Path | None = None
    """The directory of images."""
    pull: Pull = "never"
    registry: RegistrySettings | None = None
    """The settings for fetching images; None: without mirrors, with the usual limits."""


class ImageSpec(msgspec.Struct, frozen=True):
    """A container image, and settings of a row or an option for it.

    Settings that are None or empty are taken from the image's own configuration.
    """

    reference: str
    """A name as `docker.io/org/name:tag`, or a digest as `sha256:...`."""
    workdir: str | None = None
    """The absolute path of the directory in the image that is the workspace."""
    user: str | None = None
    """`name`, `uid`, `name:group` or `uid:gid`."""
    env: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Variables that are added to the image's."""
    network: bool = False
    """Commands may reach the network."""
    starts_entrypoint: bool = True
    """The image's ENTRYPOINT runs beside commands."""


class Sandbox(ABC):
    """Runs commands in the workspace of one task.

    The first call starts it, so creating one is cheap; it runs until it is stopped. Calls wait for
    each other. A subclass is registered by its name, see `toolsets.sandbox.factory`. Most
    subclasses derive from `toolsets.sandbox.served.ServedSandbox`, which needs only `home` and
    `launch`.
    """

    name: ClassVar[str]
    """The value of `--sandbox` that selects this kind of sandbox."""
    is_isolated: ClassVar[bool] = True
    """Whether commands have files and processes of their own, and a network only by `Limits`."""
    needs_image: ClassVar[bool] = False
    """The sandbox starts from `SandboxSettings.image`."""
    limits_itself: ClassVar[bool] = False
    """The sandbox limits memory, processes and CPUs itself and needs no control group."""
    lies_in_workspace: ClassVar[bool] = True
    """All files that outlive a sandbox are in the workspace's directory."""
    takes_extras: ClassVar[bool] = False
    """The sandbox can provide `Extras`, so agents that are commands can run in it."""
    has_own_python: ClassVar[bool] = False
    """Python cells run in the sandbox's own `python3`, not in a fork of this program."""
    has_own_loopback: ClassVar[bool] = False
    """The sandbox's 127.0.0.1 is not this machine's, even if it has a network."""

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """Return why the sandbox does not work here and what to do; None if it works.

        The text is one sentence that begins with "sandbox NAME: ". It is asked for at the start of
        a run and by `ServedSandbox` for each sandbox, so cache slow checks (`functools.cache`).
        """
        del settings
        return None

    @classmethod  # noqa: B027 - most have nothing to prepare
    def prepare(cls) -> None:
        """Prepare a process that will make such sandboxes; called once per process."""

    @classmethod
    @abstractmethod
    def create(
        cls,
        workspace: Workspace,
        limits: Limits,
        settings: SandboxSettings,
        extras: Extras | None = None,
    ) -> Sandbox:
        """Return the sandbox of one task; must not block for long. Raises `SandboxError`."""

    @property
    @abstractmethod
    def home(self) -> str:
        """The path of the workspace as commands see it."""

    @abstractmethod
    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one command outside of all sessions; kill its processes when it ends.

        Raises `SandboxError` if the command could not be started, and `SandboxLost` if the
        sandbox's own machine, elsewhere, has failed.
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
        in its own process group, with its output in that file. Raises `SandboxError` if the session
        could not be started, and `SandboxLost` as `exec` does.
        """

    @abstractmethod
    async def stop(self) -> None:
        """End all processes of the sandbox; may be repeated, and needs no call before."""
