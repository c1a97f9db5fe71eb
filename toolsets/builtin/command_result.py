"""Makes a tool result of a command's result."""

from __future__ import annotations

from typing import Any

import orjson

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, Sandbox, SessionKind
from toolsets.tool import MAX_RESULT_CHARS, ToolResult

# The sandbox itself looks for bash: it need not have the programs of this machine.
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$1" bash; exec sh -c "$1" sh'
_STATE_LOST = "its state (variables, functions, current directory) is lost; files are kept"


def shell_argv(command: str, prefix: str = "") -> list[str]:
    """The arguments that run one command outside the task's shell: with bash if there is one.

    `prefix` is run by `sh` first, as `export NAME=TEXT; `.
    """
    return ["sh", "-c", prefix + _SHELL, "sh", command]


def sandbox_of(context: ToolContext) -> Sandbox:
    """Return the sandbox that commands run in; raises `ToolError` if there is none."""
    if context.sandbox is None:
        raise ToolError("this task has no sandbox to run commands in")
    return context.sandbox


def as_tool_result(
    result: ExecResult, context: ToolContext, *, session: SessionKind, tool: str, **more: object
) -> ToolResult:
    """Return the outcome of a call of `tool` as a JSON object, with the members of `more`.

    It has exit_code, stdout and stderr; where they apply value and plots (python), timed_out,
    error, and a note if the state of the session was lost. A call that was stopped is an error of
    the tool; a command that fails is not.
    """
    shown: dict[str, Any] = {"exit_code": result.exit_code, **more}
    if result.value is not None:
        shown["value"] = result.value
    shown |= {"stdout": result.stdout, "stderr": result.stderr}
    if result.plots:
        shown["plots"] = list(result.plots)
    if result.timed_out:
        shown["timed_out"] = True
        shown["error"] = "stopped: it was still running when its time was up"
    if result.full_mb is not None:
        full = f"the workspace is over its limit ({result.full_mb} MB); remove files"
        shown["error"] = f"stopped: {full}" if result.was_filling else full
    if note := _note(result, context, session, tool):
        shown["note"] = note
    content, shortened = _fitted(shown)
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
    """A note for the model on lost state of the session; "" if nothing was lost."""
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


def _fitted(shown: dict[str, Any]) -> tuple[str, bool]:
    """Return the JSON text, with its outputs cut until it fits, and whether they were cut."""
    texts = {name: shown[name] for name in ("value", "stdout", "stderr") if name in shown}
    max_chars = MAX_RESULT_CHARS
    while True:
        clipped = {name: clip(text, max_chars=max_chars) for name, text in texts.items()}
        content = orjson.dumps({**shown, **clipped}).decode()
        if len(content) <= MAX_RESULT_CHARS:
            return content, any(max_chars < len(text) for text in texts.values())
        max_chars //= 2
