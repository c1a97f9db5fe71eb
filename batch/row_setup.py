"""What a row brings for its workspace: files, commands that set it up, and a check at the end.

Columns, read where the run allows it (`row_setup`): `files` ({path: text, or {"base64": …}}),
`setup` (a command or a list of them), `cwd` (where shells begin), and `check` (a command, or
{"command", "files"}; its files are written when it runs, so that the model never sees them).
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import math
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import orjson

from toolsets.command import shell_argv
from toolsets.execution import ExecResult
from toolsets.space import TaskSpace
from toolsets.text import clip
from toolsets.tool import ToolError

COLUMNS = ("files", "setup", "cwd", "check")

_SHOWN = 2000
"""Characters of a command's output that a record or a message repeats."""


class Check(NamedTuple):
    """How the end of a conversation is judged."""

    command: str
    files: Mapping[str, bytes]


class RowSetup(NamedTuple):
    """What one row brings for its workspace."""

    files: Mapping[str, bytes]
    commands: tuple[str, ...]
    start_dir: str
    check: Check | None


class SetupFailed(Exception):
    """The workspace of a task could not be set up as its row says."""


def read_row_setup(columns: Mapping[str, Any]) -> RowSetup:
    """Read the columns of a row. Raises `ValueError` with the reason where they cannot be meant."""
    commands = columns.get("setup", ())
    if isinstance(commands, str):
        commands = (commands,)
    if not isinstance(commands, list | tuple) or not all(isinstance(c, str) for c in commands):
        msg = "`setup` must be a command or a list of commands"
        raise ValueError(msg)
    files = _files(columns.get("files", {}), "files")
    start_dir = _start_dir(columns.get("cwd", "."))
    return RowSetup(files, tuple(commands), start_dir, _check(columns.get("check")))


async def set_up_workspace(space: TaskSpace, row: RowSetup) -> None:
    """Write the files and run the commands. Raises `SetupFailed` with what went wrong."""
    await _write(space, row.files)
    for command in row.commands:
        result = await _run(space, command)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
            said = clip((result.stderr or result.stdout).strip(), max_chars=_SHOWN)
            raise SetupFailed(f"`setup`: {clip(command, max_chars=200)!r} {how}: {said}")


async def run_check(space: TaskSpace, check: Check) -> dict[str, Any]:
    """Judge the workspace; a command that ends with exit code 0 has passed.

    Keys: `passed`, `reward` (the number under "reward" where the last line of the output is a
    JSON object that has one, else 1.0 or 0.0), `exit_code` (None after a timeout), `stdout` and
    `stderr` (cut), `duration_s`. Raises `SetupFailed` where it could not be run at all.
    """
    await _write(space, check.files)
    result = await _run(space, check.command)
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


async def _write(space: TaskSpace, files: Mapping[str, bytes]) -> None:
    for path, content in files.items():
        try:
            await asyncio.to_thread(space.workspace.write_bytes, path, content)
        except ToolError as error:
            raise SetupFailed(f"`files`: {error}") from error


async def _run(space: TaskSpace, command: str) -> ExecResult:
    if space.sandbox is None:
        raise SetupFailed("there is no sandbox to run commands in")
    try:
        return await space.sandbox.exec(shell_argv(command))
    except ToolError as error:
        raise SetupFailed(f"{clip(command, max_chars=200)!r}: {error}") from error


def _files(raw: Any, name: str) -> dict[str, bytes]:
    if not isinstance(raw, dict):
        msg = f"`{name}` must be an object of paths and their contents"
        raise ValueError(msg)
    return {path: _content(content, f"{name}.{path}") for path, content in raw.items()}


def _content(raw: Any, place: str) -> bytes:
    if isinstance(raw, str):
        return raw.encode("utf-8", "replace")
    if isinstance(raw, dict) and raw.keys() == {"base64"} and isinstance(raw["base64"], str):
        try:
            return base64.b64decode(raw["base64"], validate=True)
        except binascii.Error as error:
            msg = f"`{place}`: not base64: {error}"
            raise ValueError(msg) from error
    msg = f'`{place}` must be text or {{"base64": …}}'
    raise ValueError(msg)


def _start_dir(raw: Any) -> str:
    path = PurePosixPath(raw) if isinstance(raw, str) else None
    if path is None or "\0" in str(path) or ".." in path.parts:
        msg = "`cwd` must be a directory in the workspace"
        raise ValueError(msg)
    if path.is_absolute():
        if not path.is_relative_to("/workspace"):
            msg = "`cwd` must be in the workspace: a relative path, or one beneath /workspace"
            raise ValueError(msg)
        path = path.relative_to("/workspace")
    return str(path)


def _check(raw: Any) -> Check | None:
    if raw is None:
        return None
    if isinstance(raw, str):
        return Check(raw, {})
    command = raw.get("command") if isinstance(raw, dict) else None
    if isinstance(command, str) and raw.keys() <= {"command", "files"}:
        return Check(command, _files(raw.get("files", {}), "check.files"))
    msg = "`check` must be a command, or an object of `command` and `files`"
    raise ValueError(msg)


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
