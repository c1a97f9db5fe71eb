"""The python tool: code in a fresh interpreter in the task's sandbox."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from toolsets.command import run_command
from toolsets.space import TaskSpace
from toolsets.tool import ToolResult, tool

# Reads the code from standard input, which takes code of any length, and shows the lines of the
# code in tracebacks, which the interpreter alone does only for files. The first entry of a
# traceback is this runner and is dropped. The workspace can be imported from only after the
# runner's own imports, so that a file called traceback.py there cannot break it.
_RUNNER = """\
import linecache, os, sys, traceback, types
source = sys.stdin.buffer.read().decode()
linecache.cache["<python>"] = (len(source), None, source.splitlines(True), "<python>")
def show(kind, error, trace):
    if trace is not None and trace.tb_frame.f_code.co_filename == "<string>":
        trace = trace.tb_next
    traceback.print_exception(kind, error, trace)
sys.excepthook = show
sys.argv = ["<python>"]
sys.path.insert(0, os.getcwd())
main = sys.modules["__main__"] = types.ModuleType("__main__")
exec(compile(source, "<python>", "exec"), main.__dict__)
"""


@tool(sequential=True)
async def python(
    space: TaskSpace,
    code: Annotated[str, Field(description="Python code; print what you want to see.")],
    timeout_s: Annotated[
        float | None, Field(gt=0, description="Seconds after which the code is stopped.")
    ] = None,
) -> ToolResult:
    """Run Python code in the workspace and return its exit code and output as JSON.

    Each call is a new interpreter: files stay, variables do not. Files of the workspace can be
    imported.
    """
    return await run_command(
        space,
        ["python3", "-I", "-c", _RUNNER],
        timeout_s=timeout_s,
        stdin=code.encode("utf-8", "replace"),
    )
