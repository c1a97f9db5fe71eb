"""Setting a workspace up as its row says, and checking it at the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from runs.dataset.row_setup import Check, RowSetup
from toolsets.builtin.command_result import shell_argv
from toolsets.context import ToolContext
from toolsets.errors import ToolError
from toolsets.sandbox.base import ExecResult
from toolsets.text import clip

_SHOWN = 2000
"""Characters of a command's output that a record or a message repeats."""


_NOT_PASSED: dict[str, Any] = {
    "passed": False,
    "reward": 0.0,
    "exit_code": None,
    "stdout": "",
    "stderr": "",
    "duration_s": 0.0,
}


class SetupFailed(Exception):
    """The workspace of a task could not be set up as its row says."""


async def set_up_workspace(context: ToolContext, row: RowSetup) -> None:
    """Write the files and run the commands. Raises `SetupFailed` with what went wrong."""
    mark = half_set_up(context.workspace.root)
    await asyncio.to_thread(mark.touch)
    await _write(context, row.files)
    for command in row.commands:
        result = await _run(context, command)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
            said = clip((result.stderr or result.stdout).strip(), max_chars=_SHOWN)
            raise SetupFailed(f"`setup`: {clip(command, max_chars=200)!r} {how}: {said}")
    await asyncio.to_thread(mark.unlink, missing_ok=True)


def half_set_up(root: Path) -> Path:
    """The mark beside a workspace that is being set up: a crash may have left it half done."""
    return root.with_name(f"{root.name}.half")


async def run_check(context: ToolContext, check: Check) -> dict[str, Any]:
    """Judge the workspace; a command that ends with exit code 0 has passed.

    Keys: `passed`, `reward` (the number under "reward" where the last line of the output is a
    JSON object that has one, else 1.0 or 0.0), `exit_code` (None after a timeout), `stdout` and
    `stderr` (cut), `duration_s`. Raises `SetupFailed` where it could not be run at all.
    """
    try:
        await _write(context, check.files)
    except SetupFailed as error:
        # What the model left there is in the way: that is its doing.
        return _NOT_PASSED | {"stderr": str(error)}
    result = await _run(context, check.command)
    passed = result.exit_code == 0
    reward = _reward(result.stdout)
    return {
        "passed": passed,
        "reward": float(passed) if reward is None else reward,
        "exit_code": result.exit_code,
        "stdout": clip(result.stdout, max_chars=_SHOWN),
        "stderr": clip(result.stderr, max_chars=_SHOWN),
        "duration_s": round(result.duration_s, 3),
    }


async def _write(context: ToolContext, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        try:
            await asyncio.to_thread(context.workspace.write_bytes, path, content)
        except ToolError as error:
            raise SetupFailed(f"`files`: {error}") from error


async def _run(context: ToolContext, command: str) -> ExecResult:
    if context.sandbox is None:
        raise SetupFailed("there is no sandbox to run commands in")
    try:
        return await context.sandbox.exec(shell_argv(command))
    except ToolError as error:
        raise SetupFailed(f"{clip(command, max_chars=200)!r}: {error}") from error


def _reward(stdout: str) -> float | None:
    last = stdout.strip().rpartition("\n")[2]
    try:
        told = orjson.loads(last)
    except orjson.JSONDecodeError:
        return None
    reward = told.get("reward") if isinstance(told, dict) else None
    if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward):
        return float(reward)
    return None
