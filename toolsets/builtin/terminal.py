"""The terminal tool: runs commands in a shell that keeps its state from call to call."""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import Field

from toolsets.builtin.command_result import as_tool_result, sandbox_of
from toolsets.context import ToolContext
from toolsets.tool import ToolResult, tool

_OUTPUT_DIRECTORY = ".background"


@tool(sequential=True)
async def terminal(
    context: ToolContext,
    command: Annotated[str, Field(description="Shell command; bash where there is one.")],
    timeout_s: Annotated[
        float | None, Field(gt=0, description="Seconds after which the command is killed.")
    ] = None,
    background: Annotated[
        bool,
        Field(description="Start the command and return at once, for servers and long jobs."),
    ] = False,
) -> ToolResult:
    """Run a command in your shell and return its exit code and output as JSON.

    It is one shell for the whole conversation, begun in the workspace: the current directory,
    variables, functions and options last from call to call. `exit`, or a command that has to be
    killed, ends the shell; a note then says that its state is lost. Input is empty; there is no
    terminal for programs that want one.

    With background=true the result holds the process_id, the output_file that the command prints
    into, and the command that stops it. `jobs -l` lists what runs in the background. It runs on
    until it ends, is stopped, or the conversation ends.
    """
    sandbox = sandbox_of(context)
    output_file = None
    if background:
        output_file = f"{sandbox.home}/{_OUTPUT_DIRECTORY}/{secrets.token_hex(4)}.log"
    result = await sandbox.run("shell", command, timeout_s=timeout_s, output_file=output_file)
    more: dict[str, object] = {}
    if background and result.exit_code == 0:
        more = {
            "process_id": result.last_pid,
            "output_file": output_file,
            "stop": f"kill -- -{result.last_pid}",
        }
    return as_tool_result(result, context, session="shell", tool="terminal", **more)
