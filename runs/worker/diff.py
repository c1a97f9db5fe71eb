"""What a conversation changed in the repository that it worked in.

The start is a tree in the repository's objects, made with an index of our own: the diff does not
depend on what the model commits, stages or stashes, and its index stays as it is.
"""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

from runs.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.errors import ToolError
from toolsets.sandbox.base import ExecResult
from toolsets.text import clip

MAX_BYTES = 1 << 20
"""Of a diff in a record."""

_START, _PATCH = "diff_start", "diff_patch"
_TIMEOUT_S = 120.0

# The image's own index says what has not changed since it was made, but only by size and time:
# unpacking gave each file another inode. Objects go where the model's do, so they must be there
# when the diff is made. `safe.directory`: the files may belong to another user than commands.
_GIT = (
    "set -e; umask 077; export LC_ALL=C GIT_CONFIG_COUNT=5 "
    "GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*' "
    "GIT_CONFIG_KEY_1=core.checkStat GIT_CONFIG_VALUE_1=minimal "
    "GIT_CONFIG_KEY_2=core.trustctime GIT_CONFIG_VALUE_2=false "
    "GIT_CONFIG_KEY_3=core.fsmonitor GIT_CONFIG_VALUE_3=false "
    "GIT_CONFIG_KEY_4=core.hooksPath GIT_CONFIG_VALUE_4=/dev/null; "
    'top=$(git rev-parse --show-toplevel); own=$(git rev-parse --absolute-git-dir); cd "$top"; '
)
_TREE = (
    'export GIT_INDEX_FILE="$own/.start-index.$$"; trap \'rm -f "$GIT_INDEX_FILE"*\' EXIT; '
    'if [ -f "$own/index" ]; then cp -p "$own/index" "$GIT_INDEX_FILE"; fi; '
    "git add -A >/dev/null 2>&1; tree=$(git write-tree); "
)
_BEGIN = _GIT + _TREE + 'echo "$tree"'
# `--no-ext-diff` and `--no-textconv`: the model may have configured programs.
_DIFF = (
    "git diff --binary --no-color --no-ext-diff --no-textconv --no-renames "
    '--src-prefix=a/ --dst-prefix=b/ "$1" "$tree" >"$2"'
)
_END = _GIT + _TREE + _DIFF
_APPLY = _GIT + 'git apply --binary --whitespace=nowarn "$1"'


class DiffError(Exception):
    """A conversation left no diff that a fresh workspace can take: its check fails."""


async def begin_diff(context: ToolContext) -> None:
    """Remember what the repository is like now; does nothing where there is none.

    Raises `SetupFailed` where the sandbox does not start.
    """
    try:
        result = await _git(context, _BEGIN)
    except ToolError as error:
        raise SetupFailed(str(error)) from error
    tree = result.stdout.strip()
    if result.exit_code == 0 and tree.isalnum():
        await asyncio.to_thread((context.workspace.root / _START).write_text, tree)


async def end_diff(context: ToolContext) -> dict[str, Any] | None:
    """The diff against the start; None where there was no repository.

    Keys: `patch` (text as `git apply` takes it), `truncated` (it is longer than is kept, and cannot
    be applied), `base64` (the exact bytes, where they are not UTF-8), and `error` if there is none.
    """
    start = context.workspace.root / _START
    if not start.exists():
        return None
    path = f"/tmp/.diff-{context.workspace.root.name[:16]}"
    try:
        result = await _git(context, _END, start.read_text(), path)
        if result.exit_code != 0:
            said = clip((result.stderr or result.stdout).strip(), max_chars=500)
            return {"patch": "", "truncated": False, "error": said or "git failed"}
        patch = await asyncio.to_thread(context.workspace.read_bytes, path, MAX_BYTES + 1)
        await _git(context, 'rm -f "$1"', path)
    except ToolError as error:
        return {"patch": "", "truncated": False, "error": str(error)}
    await asyncio.to_thread(_keep, context.workspace.root / _PATCH, patch)
    kept = patch[:MAX_BYTES]
    diff: dict[str, Any] = {
        "patch": kept.decode("utf-8", "replace"),
        "truncated": len(patch) > MAX_BYTES,
    }
    if diff["patch"].encode() != kept:
        diff["base64"] = base64.b64encode(kept).decode()
    return diff


def patch_of(root: Path) -> bytes:
    """The diff of a workspace, as it is applied elsewhere.

    Raises `SetupFailed` where there was no repository, and `DiffError` where the model made it
    impossible.
    """
    if not (root / _START).exists():
        raise SetupFailed("`check`: `fresh` needs a git repository that holds the workspace")
    try:
        patch = (root / _PATCH).read_bytes()
    except FileNotFoundError:
        raise DiffError("the diff could not be made") from None
    if len(patch) > MAX_BYTES:
        raise DiffError(f"the diff is longer than {MAX_BYTES} bytes")
    return patch


async def apply_diff(context: ToolContext, patch: bytes) -> None:
    """Change a fresh workspace as the conversation did. Raises `SetupFailed` and `DiffError`."""
    if not patch:
        return
    path = "/tmp/.diff-to-apply"
    try:
        await asyncio.to_thread(context.workspace.write_bytes, path, patch)
        result = await _git(context, _APPLY, path)
        await _git(context, 'rm -f "$1"', path)
    except ToolError as error:
        raise SetupFailed(f"`check`: {error}") from error
    if result.exit_code != 0:
        said = clip((result.stderr or result.stdout).strip(), max_chars=500)
        raise DiffError(f"the diff cannot be applied: {said}")


async def _git(context: ToolContext, script: str, *arguments: str) -> ExecResult:
    if context.sandbox is None:
        raise ToolError("there is no sandbox to run commands in")
    return await context.sandbox.exec(["sh", "-c", script, "sh", *arguments], timeout_s=_TIMEOUT_S)


def _keep(path: Path, content: bytes) -> None:
    path.write_bytes(content)
