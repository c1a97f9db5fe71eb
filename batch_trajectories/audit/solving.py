"""Applies the reference solution of a row to its workspace."""

from __future__ import annotations

import shlex
from typing import Any

from batch_trajectories.audit.reference import Reference
from batch_trajectories.basics.text import clip
from batch_trajectories.engine.worker.workspace_setup import SetupFailed, run_command, write_files
from toolsets.context import ToolContext
from toolsets.sandbox.commands import require_sandbox

_MAX_OUTPUT_CHARS = 2000
# `safe.directory`: the files may belong to another user than commands. Outside of a repository
# `git apply` works on the files alone.
_APPLY_SCRIPT = (
    "export LC_ALL=C GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*'; "
    'cd "$(git rev-parse --show-toplevel 2>/dev/null || pwd)" && '
    'git apply --whitespace=nowarn "$@" -'
)


class NotApplied(Exception):
    """The reference solution of a row cannot be applied."""


async def solve(context: ToolContext, reference: Reference) -> dict[str, Any] | None:
    """Apply the solution; return the exit code and output of its command, None without a command.

    Raises `NotApplied` with the reason. The exit code of the command does not matter: the check
    decides whether the task is solved.
    """
    try:
        if reference.patch is not None:
            options = ["--reverse"] if reference.is_reversed else []
            await apply_patch(context, reference.patch.encode(), *options)
        await write_files(context, reference.files)
        if reference.removed:
            await run_command(context, ["rm", "-rf", "--", *reference.removed])
        if reference.command is not None:
            exports = "".join(f"export {k}={shlex.quote(v)}; " for k, v in reference.env.items())
            result = await run_command(context, reference.command, exports)
            output = clip((result.stderr or result.stdout).strip(), max_chars=_MAX_OUTPUT_CHARS)
            if result.timed_out:
                raise NotApplied(f"it timed out after {result.duration_s:.0f} s: {output}")
            return {"exit_code": result.exit_code, "said": output}
    except SetupFailed as error:
        raise NotApplied(str(error)) from error
    return None


async def apply_patch(context: ToolContext, patch: bytes, *options: str) -> None:
    """Apply a patch to the repository that holds a workspace. Raises `NotApplied`."""
    result = await require_sandbox(context).exec(
        ["sh", "-c", _APPLY_SCRIPT, "sh", *options], stdin=patch
    )
    if result.exit_code != 0:
        raise NotApplied(f"git apply: {clip(result.stderr.strip(), max_chars=_MAX_OUTPUT_CHARS)}")
