"""The tools `terminal` and `python`: a shell and an interpreter that keep their state from call to
call."""

from __future__ import annotations

import secrets
from typing import Annotated

from pydantic import Field

from toolsets.builtin.command_result import as_tool_result, sandbox_of
from toolsets.context import ToolContext
from toolsets.tool import ToolResult, tool

_OUTPUT_DIRECTORY = ".background"


@tool(effects="workspace", sequential=True)
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


@tool(effects="workspace", sequential=True)
async def python(
    context: ToolContext,
    code: Annotated[str, Field(description="Python code, as in a cell of a notebook.")],
    timeout_s: Annotated[
        float | None, Field(gt=0, description="Seconds after which the code is interrupted.")
    ] = None,
) -> ToolResult:
    """Run Python code and return its output as JSON, with the value of a last expression.

    It is one interpreter for the whole conversation, begun in the workspace: variables, functions
    and imports last from call to call. Figures of matplotlib that are open at the end are saved to
    files. Code that takes too long is interrupted; code that ends the interpreter, or does not
    let itself be interrupted, loses its state, and a note says so. Input is empty.
    """
    result = await sandbox_of(context).run("python", code, timeout_s=timeout_s)
    return as_tool_result(result, context, session="python", tool="python")
