"""Finds the sandbox of a context for commands outside the tools, and makes arguments of a shell."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batch_trajectories.basics.errors import ToolError

if TYPE_CHECKING:
    from toolsets.context import ToolContext
    from toolsets.sandbox.base import Sandbox

# The sandbox itself looks for bash: it need not have the programs of this machine.
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$1" bash; exec sh -c "$1" sh'


def shell_argv(command: str, prefix: str = "") -> list[str]:
    """Return the arguments that run a command outside the task's shell, with bash if possible.

    `prefix` is run by `sh` first, as `export NAME=TEXT; `.
    """
    return ["sh", "-c", prefix + _SHELL, "sh", command]


def require_sandbox(context: ToolContext) -> Sandbox:
    """Return the sandbox for commands; raises `ToolError` if there is none."""
    if context.sandbox is None:
        raise ToolError("this task has no sandbox to run commands in")
    return context.sandbox
