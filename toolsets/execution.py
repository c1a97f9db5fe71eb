"""What running a command takes and gives, whichever sandbox runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from toolsets.tool import ToolError


class SandboxError(ToolError):
    """The sandbox could not run the command at all."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on every command a sandbox runs."""

    timeout_s: float = 120.0
    """Longest time one command may take; a command may ask for less, never for more."""
    memory_mb: int = 2048
    """Private memory of each process of a command."""
    file_mb: int = 512
    """Largest single file a command may write."""
    output_bytes: int = 64 * 1024
    """Kept of each output stream: its head and its tail."""
    tmp_mb: int = 256
    """Size of /tmp, and of /dev/shm, where the sandbox has its own."""
    network: bool = False
    """Commands may reach the network."""

    def command_timeout_s(self, asked_s: float | None) -> float:
        """Return the time a command may take that asked for `asked_s`."""
        return self.timeout_s if asked_s is None else min(asked_s, self.timeout_s)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """How one command ended and what it printed."""

    exit_code: int | None
    """128 + N for a command ended by signal N, as shells report it; None after a timeout."""
    stdout: str
    stderr: str
    timed_out: bool
    truncated: bool
    """The middle of an output stream was cut."""
    duration_s: float


class Sandbox(Protocol):
    """A place that runs commands beside one workspace.

    Whatever it needs it starts at the first `exec`, so making one is cheap. Each `exec` leaves
    no process behind. A sandbox belongs to one task.
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
        """Run one command in the workspace; raises `SandboxError` if it could not be started."""

    async def stop(self) -> None:
        """Release what the sandbox holds; may be called again, and without any `exec`."""
