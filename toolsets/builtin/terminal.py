"""The tools `terminal` and `python`: a shell and an interpreter that keep their state."""

from __future__ import annotations

import secrets
from typing import Annotated, Any

import orjson
from pydantic import Field

from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, SessionKind
from toolsets.sandbox.commands import require_sandbox
from toolsets.tool import MAX_RESULT_CHARS, ToolResult, tool

# Makes a tool result of a command's result.

_STATE_LOST = "its state (variables, functions, current directory) is lost; files are kept"


def as_tool_result(
    result: ExecResult, context: ToolContext, *, session: SessionKind, tool: str, **more: object
) -> ToolResult:
    """Return the outcome of a call of `tool` as a JSON object, with the members of `more`.

    The object has exit_code, stdout and stderr. It has value and plots (python), timed_out, error,
    and a note on lost state of the session only if they apply. A stopped call is an error of the
    tool; a command that fails is not.
    """
    fields: dict[str, Any] = {"exit_code": result.exit_code, **more}
    if result.value is not None:
        fields["value"] = result.value
    fields |= {"stdout": result.stdout, "stderr": result.stderr}
    if result.plots:
        fields["plots"] = list(result.plots)
    if result.timed_out:
        fields["timed_out"] = True
        fields["error"] = "stopped: it was still running when its time was up"
    if result.full_mb is not None:
        full = f"the workspace is over its limit ({result.full_mb} MB); remove files"
        fields["error"] = f"stopped: {full}" if result.was_filling else full
    if note := _note(result, context, session, tool):
        fields["note"] = note
    content, shortened = _encode_clipped(fields)
    details = {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "truncated": result.truncated or shortened,
        "duration_s": round(result.duration_s, 3),
    }
    if result.running is not None:
        details["running"] = result.running
    is_error = result.timed_out or result.full_mb is not None
    return ToolResult(content, is_error=is_error, details=details)


def _note(result: ExecResult, context: ToolContext, session: SessionKind, tool: str) -> str:
    """Return a note for the model on lost state of the session; "" if nothing was lost."""
    noun = "shell" if session == "shell" else "interpreter"
    notes = []
    if result.lost is not None:
        notes.append(f"[new {noun}: {result.lost}, with all that ran in it; {_STATE_LOST}]")
    elif result.is_first and context.resumed and _was_called(tool, context):
        notes.append(f"[new {noun}: the one before ended between the calls; {_STATE_LOST}]")
    if result.ended:
        stopped = result.timed_out or result.was_filling
        how = "was killed" if stopped else "ended"
        notes.append(f"[the {noun} {how}; {_STATE_LOST}; the next call starts a new one]")
    return " ".join(notes)


def _was_called(tool: str, context: ToolContext) -> bool:
    """Whether the conversation has an earlier result of this tool."""
    return any(
        message.get("role") == "tool" and message.get("name") == tool
        for message in context.conversation
    )


def _encode_clipped(fields: dict[str, Any]) -> tuple[str, bool]:
    """Return the JSON text with outputs cut until it fits, and whether any was cut."""
    texts = {name: fields[name] for name in ("value", "stdout", "stderr") if name in fields}
    max_chars = MAX_RESULT_CHARS
    while True:
        clipped = {name: clip(text, max_chars=max_chars) for name, text in texts.items()}
        content = orjson.dumps({**fields, **clipped}).decode()
        if len(content) <= MAX_RESULT_CHARS:
            return content, any(max_chars < len(text) for text in texts.values())
        max_chars //= 2


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
    sandbox = require_sandbox(context)
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
    result = await require_sandbox(context).run("python", code, timeout_s=timeout_s)
    return as_tool_result(result, context, session="python", tool="python")
