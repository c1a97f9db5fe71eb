"""How a command's outcome becomes a tool result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from toolsets.execution import ExecResult
from toolsets.space import TaskSpace
from toolsets.text import clip
from toolsets.tool import MAX_RESULT_CHARS, ToolError, ToolResult

# Chosen where the command runs, since a sandbox need not hold the programs of this machine.
_SHELL = 'command -v bash >/dev/null 2>&1 && exec bash -c "$1" bash; exec sh -c "$1" sh'


def shell_argv(command: str) -> list[str]:
    """What runs a shell command: bash where there is one."""
    return ["sh", "-c", _SHELL, "sh", command]


async def run_command(
    space: TaskSpace, argv: Sequence[str], *, timeout_s: float | None, stdin: bytes = b""
) -> ToolResult:
    """Run a command of a tool in the task's sandbox.

    The content is a JSON object with exit_code, stdout and stderr, and where the time was up
    also timed_out and error. Only that is an error of the tool; a command that fails is none.
    """
    if space.sandbox is None:
        raise ToolError("this task has no sandbox to run commands in")
    result = await space.sandbox.exec(argv, timeout_s=timeout_s, stdin=stdin)
    content, shortened = _content(result)
    details = {
        "exit_code": result.exit_code,
        "timed_out": result.timed_out,
        "truncated": result.truncated or shortened,
        "duration_s": round(result.duration_s, 3),
    }
    return ToolResult(content, is_error=result.timed_out, details=details)


def _content(result: ExecResult) -> tuple[str, bool]:
    """Return the JSON text, with streams shortened until it fits, and whether they were."""
    max_chars = MAX_RESULT_CHARS
    while True:
        shown: dict[str, Any] = {
            "exit_code": result.exit_code,
            "stdout": clip(result.stdout, max_chars=max_chars),
            "stderr": clip(result.stderr, max_chars=max_chars),
        }
        if result.timed_out:
            shown["timed_out"] = True
            shown["error"] = "killed: it was still running when its time was up"
        content = orjson.dumps(shown).decode()
        if len(content) <= MAX_RESULT_CHARS:
            return content, max_chars < max(len(result.stdout), len(result.stderr))
        max_chars //= 2
