"""The python tool: runs cells in an interpreter that keeps its state from call to call."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from toolsets.builtin.command_result import as_tool_result, sandbox_of
from toolsets.context import ToolContext
from toolsets.tool import ToolResult, tool


@tool(sequential=True)
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
