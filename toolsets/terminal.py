"""The terminal tool: shell commands in the task's sandbox."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from toolsets.command import run_command, shell_argv
from toolsets.space import TaskSpace
from toolsets.tool import ToolResult, tool


@tool(sequential=True)
async def terminal(
    space: TaskSpace,
    command: Annotated[str, Field(description="Shell command; bash where there is one.")],
    timeout_s: Annotated[
        float | None, Field(gt=0, description="Seconds after which the command is killed.")
    ] = None,
) -> ToolResult:
    """Run a shell command in the workspace and return its exit code and output as JSON.

    Each call is a new shell: files stay, variables and the current directory do not. Input is
    empty, and processes left in the background are killed.
    """
    return await run_command(space, shell_argv(command), timeout_s=timeout_s)
