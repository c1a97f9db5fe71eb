"""Set up a workspace as its row says."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult
from toolsets.sandbox.commands import shell_argv
from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import TEMPORARY

if TYPE_CHECKING:
    from batch_trajectories.dataset.row_workspace import RowSetup
    from toolsets.sandbox.image_files import ImageSandbox

IMAGE_FILE = "image"
"""Name of the file beside a conversation's layer that holds the digest of the image below."""

_PATHS_PER_COMMAND = 200
_MAX_OUTPUT_CHARS = 2000
"""Maximum characters of a command's output in a record or message."""


class SetupFailed(Exception):
    """The workspace of a task could not be set up, or its check could not run."""

    error_class = "setup_failed"


async def set_up_workspace(context: ToolContext, row: RowSetup) -> None:
    """Write the files and run the commands. Raises `SetupFailed` with the reason."""
    await write_files(context, row.files)
    for command in row.commands:
        result = await run_command(context, command)
        if result.exit_code != 0:
            how = "timed out" if result.timed_out else f"ended with exit code {result.exit_code}"
            output = clip((result.stderr or result.stdout).strip(), max_chars=_MAX_OUTPUT_CHARS)
            raise SetupFailed(f"`setup`: {clip(command, max_chars=200)!r} {how}: {output}")
    if row.hidden:
        result = await run_command(context, ["rm", "-rf", "--", *row.hidden])
        if result.exit_code != 0:
            raise SetupFailed(f"`hide`: {clip(result.stderr.strip(), max_chars=_MAX_OUTPUT_CHARS)}")


@asynccontextmanager
async def mark_unfinished_setup(root: Path) -> AsyncIterator[None]:
    """Set a workspace up inside a `with` block; a crash or an error leaves a mark."""
    mark = incomplete_mark(root)
    await asyncio.to_thread(mark.touch)
    yield
    await asyncio.to_thread(mark.unlink, missing_ok=True)


def incomplete_mark(root: Path) -> Path:
    """The file beside a workspace that is being set up; after a crash it shows that it is not."""
    return root.with_name(f"{root.name}.half")


def is_set_aside(root: Path) -> bool:
    """Whether a workspace lies beside one that is being rebuilt; see `set_aside`."""
    return _aside(root).exists()


def set_aside(root: Path) -> None:
    """Make room for a workspace that is rebuilt; a crash until `forget_aside` undoes that."""
    root.mkdir(exist_ok=True)
    root.rename(_aside(root))


def put_back(root: Path) -> None:
    """Give up a workspace that is being rebuilt for the one that was set aside."""
    remove_tree(root)
    incomplete_mark(root).unlink(missing_ok=True)
    _aside(root).rename(root)


def forget_aside(root: Path) -> None:
    """Remove what was set aside: the workspace has been rebuilt."""
    gone = root.with_name(f"{TEMPORARY}{root.name}")  # at once, for half of it must not come back
    _aside(root).rename(gone)
    remove_tree(gone)


def _aside(root: Path) -> Path:
    return root.with_name(f"{root.name}.before")


def keep_or_remove(root: Path, sandbox: ImageSandbox) -> tuple[bool, bool]:
    """Keep what a conversation has changed in its image, or prepare for a workspace made anew.

    Return whether the changes were kept, and whether the image was replaced. A new workspace is
    marked as incomplete until `mark_finished_setup`, so that a crash before shows.
    """
    is_other = image_was_replaced(root, sandbox.image_digest)
    if sandbox.has_survived() and not is_other and not incomplete_mark(root).exists():
        return True, False
    incomplete_mark(root).touch()
    remove_all(root, sandbox)
    return False, is_other


def remove_all(root: Path, sandbox: ImageSandbox) -> None:
    """Remove a workspace inside an image; its sandbox must not run."""
    sandbox.discard()
    remove_tree(root)


def mark_finished_setup(root: Path, digest: str) -> None:
    """Mark a workspace as whole, and note the digest of its image, in one step."""
    root.mkdir(mode=0o700, exist_ok=True)
    incomplete_mark(root).write_text(digest)
    incomplete_mark(root).rename(root / IMAGE_FILE)


def image_was_replaced(root: Path, digest: str) -> bool:
    """Whether the layer of a conversation is above another image; False where there is none."""
    try:
        return (root / IMAGE_FILE).read_text() != digest
    except FileNotFoundError:
        return False


async def make_ready(sandbox: ImageSandbox) -> None:
    """Prepare what a sandbox keeps. Raises `SetupFailed`."""
    if sandbox.is_made_at_once:
        return
    try:
        await asyncio.to_thread(sandbox.make)
    except ToolError as error:
        raise SetupFailed(str(error)) from error


async def home_of_user(sandbox: ImageSandbox) -> str:
    """HOME of the user that commands run as, asked inside with a Python that is always there."""
    from toolsets.sandbox.programs import inside_python

    code = "import os; print(os.environ.get('HOME') or '/', end='')"
    return (await sandbox.exec([*inside_python().command, "-I", "-S", "-c", code])).stdout


def fresh_root(root: Path) -> Path:
    """Path of the fresh workspace of a conversation, for its diff and its check."""
    return root.with_name(f"{root.name}.fresh")


async def write_files(context: ToolContext, files: Mapping[str, bytes]) -> None:
    """Write files into the workspace. Raises `SetupFailed`."""
    from batch_trajectories.dataset.columns import Executable

    for path, content in files.items():
        try:
            await asyncio.to_thread(context.workspace.write_bytes, path, content)
        except ToolError as error:
            raise SetupFailed(f"`files`: {error}") from error
    if programs := [path for path, content in files.items() if isinstance(content, Executable)]:
        await make_executable(context, programs)


def few_at_a_time(paths: Sequence[str]) -> Iterator[Sequence[str]]:
    """The paths in parts that fit into the arguments of one command."""
    for start in range(0, len(paths), _PATHS_PER_COMMAND):
        yield paths[start : start + _PATHS_PER_COMMAND]


async def make_executable(context: ToolContext, paths: Sequence[str]) -> None:
    """Let everyone run files. Raises `SetupFailed`."""
    for some in few_at_a_time(paths):
        result = await run_command(context, ["chmod", "a+rx", "--", *some])
        if result.exit_code != 0:
            error_text = clip(result.stderr.strip(), max_chars=_MAX_OUTPUT_CHARS)
            raise SetupFailed(f"`files`: cannot make {some[0]} executable: {error_text}")


async def run_command(
    context: ToolContext,
    command: str | Sequence[str],
    prefix: str = "",
    *,
    timeout_s: float | None = None,
) -> ExecResult:
    """Run a shell command, or a program; `prefix` is for `sh`. Raises `SetupFailed`."""
    if context.sandbox is None:
        raise SetupFailed("there is no sandbox to run commands in")
    argv = shell_argv(command, prefix) if isinstance(command, str) else command
    try:
        return await context.sandbox.exec(argv, timeout_s=timeout_s)
    except ToolError as error:
        shown = command if isinstance(command, str) else shlex.join(command)
        raise SetupFailed(f"{clip(shown, max_chars=200)!r}: {error}") from error
