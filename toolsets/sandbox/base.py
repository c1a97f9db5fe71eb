"""What running a command takes and gives, whichever sandbox runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from batch_trajectories.basics.errors import ToolError

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


class Sandbox(Protocol):
    """A place that runs commands beside one workspace, for one task.

    It is started by the first call, so making one is cheap, and kept until it is stopped. Calls
    wait for each other.
    """

    @property
    def name(self) -> str:
        """The name it was asked for by."""

    @property
    def home(self) -> str:
        """The path of the workspace as commands see it."""

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one command apart from all sessions; what it starts is killed when it ends.

        Raises `SandboxError` if it could not be started.
        """

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

    async def stop(self) -> None:
        """End all that runs; may be called again, and without any call before."""
