"""Judge a workspace by its check: what runs before it, where it runs, and what it gets there."""

from __future__ import annotations

import asyncio
import logging
import posixpath
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from batch_trajectories.basics.text import clip
from batch_trajectories.runs.worker.check import CheckFailed, Open, run_check, unjudged
from batch_trajectories.runs.worker.diffs.making import MAX_CARRIED_BYTES
from batch_trajectories.runs.worker.workspace_setup import fresh_root, make_executable, run_command
from toolsets.builtin.command_result import sandbox_of
from toolsets.context import ToolContext
from toolsets.workspace.workspace import PathError

if TYPE_CHECKING:
    from batch_trajectories.runs.dataset.row import RowTask
    from batch_trajectories.runs.dataset.row_check import Artifact, Check
    from batch_trajectories.runs.worker.workspaces import Workspaces
    from toolsets.sandbox.image_files import FileState, ImageFiles, ImageSandbox

log = logging.getLogger(__name__)

_COMMAND_CHARS = 500
"""Maximum characters of a command and of its output in a log."""


async def collect(context: ToolContext, check: Check, task_id: str) -> None:
    """Run what a check collects, while the conversation's processes still run.

    What fails is logged: a check that needs it fails, too. Raises `SetupFailed` where the sandbox
    cannot run it.
    """
    for command in check.collect:
        result = await run_command(context, command.command, timeout_s=command.timeout_s)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"exit code {result.exit_code}"
            said = clip((result.stderr or result.stdout).strip(), max_chars=_COMMAND_CHARS)
            shown = clip(command.command, max_chars=_COMMAND_CHARS)
            log.warning("%s: `check.collect`: %r: %s: %s", task_id, shown, how, said)


async def judge(
    spaces: Workspaces,
    context: ToolContext,
    row: RowTask,
    turns: int | None,
    diff: Mapping[str, Any] | None,
) -> dict[str, Any] | None:
    """The result of the row's check; None if it has none. Raises `SetupFailed`.

    `turns` is how many turns of the run's model it judges, if known; `diff` is that of
    `Workspaces.diff`, which has left the changed copy of the image for a fresh check.
    """
    if (check := row.check) is None:
        return None
    # Processes that the model left running could affect the check.
    await sandbox_of(context).stop()
    root = context.workspace.root
    if not spaces.are_in_images:
        return await run_check(check, partial(spaces.judging, context, row, check, root), turns)
    own = cast("ImageSandbox", sandbox_of(context))
    place: dict[str, Any] = {"in": check.where or "image"}
    prepare_as = "root" if check.user or check.image or not own.can_change_all else None
    if check.where == "same":
        open_as = partial(spaces.judging, context, row, check, root)
        return place | await run_check(check, open_as, turns, prepare_as=prepare_as)
    open_as = partial(spaces.judging, context, row, check, fresh_root(root))
    try:
        if check.image is not None:
            await spaces.remove_judged(row, check, fresh_root(root))
            worked = await spaces.reopened(context, row, starts_entrypoint=False)
            try:
                await _bring(worked, open_as, check.artifacts)
            finally:
                await sandbox_of(worked).stop()
            place |= {"image": spaces.image(row, check)}
        elif why := "there is no repository" if diff is None else diff.get("error"):
            raise CheckFailed(f"`check`: {why}")
        return place | await run_check(check, open_as, turns, prepare_as=prepare_as)
    except CheckFailed as error:
        return unjudged(str(error)) | place
    finally:
        await spaces.remove_judged(row, check, fresh_root(root))


async def _bring(worked: ToolContext, open_as: Open, artifacts: Sequence[Artifact]) -> None:
    """Copy what a check judges to where it runs. Raises `CheckFailed` and `SetupFailed`."""
    judged = await open_as("root")
    try:
        await _carry_all(worked, judged, artifacts)
    finally:
        await sandbox_of(judged).stop()


async def _carry_all(
    worked: ToolContext, judged: ToolContext, artifacts: Sequence[Artifact]
) -> None:
    """Copy files and directories to the same paths in another image.

    Those that do not exist are left out; a directory replaces what the image has there. Raises
    `CheckFailed` for what cannot be copied, and `SetupFailed`.
    """
    left = MAX_CARRIED_BYTES
    for artifact in artifacts:
        path = posixpath.join(worked.workspace.home, artifact.path)
        try:
            left -= await _carry(worked, judged, path, artifact.exclude, left)
        except PathError as error:
            raise CheckFailed(f"`check.artifacts`: {error}") from error


async def _carry(
    worked: ToolContext, judged: ToolContext, path: str, exclude: Sequence[str], limit: int
) -> int:
    """Copy one file or directory; how many bytes it has."""
    source, target = cast("ImageFiles", worked.workspace), cast("ImageFiles", judged.workspace)
    try:
        tree = await asyncio.to_thread(source.tree, path, with_git=True)
    except PathError as error:
        return 0 if error.is_missing else await _carry_file(worked, judged, path, limit)
    states = {
        name: state
        for name, state in tree.items()
        if state.kind in ("file", "link") and not _is_excluded(name, exclude)
    }
    closed = [name for name, state in tree.items() if state.is_closed]
    if closed and not all(_is_excluded(name, exclude) for name in closed):
        raise CheckFailed(f"`check.artifacts`: {path}/{closed[0]}: the directory cannot be read")
    size = _size_of(states, path, limit)
    await run_command(judged, ["rm", "-rf", "--", path])
    await run_command(judged, ["mkdir", "-p", "--", path])
    await asyncio.to_thread(target.copy_from, source, path, states)
    return size


def _size_of(states: dict[str, FileState], path: str, limit: int) -> int:
    size = sum(state.size for state in states.values() if state.kind == "file")
    for name, state in states.items():
        if "\ufffd" in name or state.has_odd_target:
            raise CheckFailed(f"`check.artifacts`: {path}/{name}: its name or target is not UTF-8")
    if size > limit:
        raise CheckFailed(_too_large(path))
    return size


async def _carry_file(worked: ToolContext, judged: ToolContext, path: str, limit: int) -> int:
    content = await asyncio.to_thread(worked.workspace.read_bytes, path, limit + 1)
    if len(content) > limit:
        raise CheckFailed(_too_large(path))
    await asyncio.to_thread(judged.workspace.write_bytes, path, content)
    if (await run_command(worked, ["test", "-x", path])).exit_code == 0:
        await make_executable(judged, [path])
    return len(content)


def _too_large(path: str) -> str:
    most = MAX_CARRIED_BYTES >> 20
    return f"`check.artifacts`: {path}: more than {most} MiB, with those before it"


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern matches the path or a directory of it, from any of its names on."""
    names = path.split("/")
    places = [
        "/".join(names[first:last])
        for first in range(len(names))
        for last in range(first + 1, len(names) + 1)
    ]
    return any(fnmatchcase(place, pattern) for pattern in patterns for place in places)
