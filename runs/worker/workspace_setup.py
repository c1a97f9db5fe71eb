"""Set up a workspace as its row says, and run the row's check at the end."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from runs.dataset.row_check import Check
from runs.dataset.row_setup import RowSetup
from toolsets.builtin.command_result import shell_argv
from toolsets.context import ToolContext
from toolsets.errors import ToolError
from toolsets.sandbox.base import ExecResult
from toolsets.text import clip

_SHOWN = 2000
"""Maximum characters of a command's output in a record or message."""

NOT_PASSED: dict[str, Any] = {
    "passed": False,
    "reward": 0.0,
    "exit_code": None,
    "stdout": "",
    "stderr": "",
    "duration_s": 0.0,
}


class SetupFailed(Exception):
    """The workspace of a task could not be set up, or its check could not run."""


async def set_up_workspace(context: ToolContext, row: RowSetup) -> None:
    """Write the files and run the commands. Raises `SetupFailed` with the reason."""
    mark = half_set_up(context.workspace.root)
    await asyncio.to_thread(mark.touch)
    await _write(context, row.files)
    for command in row.commands:
        result = await _run(context, command)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
            output = clip((result.stderr or result.stdout).strip(), max_chars=_SHOWN)
            raise SetupFailed(f"`setup`: {clip(command, max_chars=200)!r} {how}: {output}")
    await asyncio.to_thread(mark.unlink, missing_ok=True)


def half_set_up(root: Path) -> Path:
    """The file beside a workspace that is being set up; after a crash it shows that it is not."""
    return root.with_name(f"{root.name}.half")


async def run_check(context: ToolContext, check: Check) -> dict[str, Any]:
    """Run the check of a workspace; it has passed if its exit code is 0.

    Keys: `passed`, `reward` (the number "reward" of a JSON object in the last line of the output,
    else 1.0 or 0.0), `exit_code` (None after a timeout), `stdout` and `stderr` (shortened),
    `duration_s`. Raises `SetupFailed` if it could not run at all.
    """
    try:
        await _write(context, check.files)
    except SetupFailed as error:
        # Files of the model are in the way, so the check fails.
        return NOT_PASSED | {"stderr": str(error)}
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
        result = orjson.loads(last)
    except orjson.JSONDecodeError:
        return None
    reward = result.get("reward") if isinstance(result, dict) else None
    if isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward):
        return float(reward)
    return None
