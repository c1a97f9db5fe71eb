"""What is remembered of a workspace in an image before its model could change that."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from pathlib import Path
from typing import TypeVar, cast

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.runs.worker.diffs.git import GIT, TIMEOUT_S, image_sandbox
from batch_trajectories.runs.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext

_START = "diff_start"
_TOP = GIT + "git rev-parse --is-inside-work-tree --show-toplevel"

Found = TypeVar("Found")


class Known:
    """What was found in workspaces in which nothing had been changed.

    It holds for all that are made of the same, so that most conversations need not look for it.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, Callable[..., object]], object] = {}

    async def get(
        self, context: ToolContext, find: Callable[..., Awaitable[Found]], *arguments: object
    ) -> Found:
        """What `find` finds in a workspace."""
        origin = image_sandbox(context).origin
        if origin is None:
            return await find(context, *arguments)
        if (origin, find) not in self._found:
            self._found[origin, find] = await find(context, *arguments)
        return cast("Found", self._found[origin, find])


async def begin_diff(
    context: ToolContext,
    *,
    is_needed: bool,
    known: Known | None = None,
    then: Callable[[], object] | None = None,
) -> None:
    """Remember whether a repository holds the workspace, before the model could change that.

    `then` is called when that is written, in the same thread. Raises `SetupFailed` where it is
    needed, as for fresh checks, and there is none, or changes could not be carried to another.
    """
    try:
        top = await (known or Known()).get(context, find_top)
    except ToolError as error:
        raise SetupFailed(str(error)) from error
    if top is None and is_needed:
        raise SetupFailed("`check`: `fresh` needs git and a repository that holds the workspace")
    if top == "/" and is_needed:
        raise SetupFailed("`check`: `fresh` cannot be used where the repository is the whole image")
    await asyncio.to_thread(_remember, context, top, then)


def _remember(context: ToolContext, top: str | None, then: Callable[[], object] | None) -> None:
    if top is not None:
        mark = image_sandbox(context).layer_mark(top)
        context.workspace.make()
        (context.workspace.root / _START).write_text(f"{top}\0{mark or ''}")
    if then is not None:
        then()


def start_of(root: Path) -> tuple[str, str] | None:
    """The directory of the repository that held the workspace at its start, and its mark then."""
    try:
        top, _, mark = (root / _START).read_text().partition("\0")
    except FileNotFoundError:
        return None
    return top, mark


def is_unchanged(context: ToolContext) -> bool:
    """Whether it is certain, without a comparison of files, that the repository is as it was.

    Nothing of the conversation may run. False without a repository.
    """
    if (start := start_of(context.workspace.root)) is None:
        return False
    top, mark = start
    return bool(mark) and image_sandbox(context).layer_mark(top) == mark


async def find_top(context: ToolContext) -> str | None:
    """The directory of the repository that holds the workspace."""
    result = await image_sandbox(context).exec(["sh", "-c", _TOP], timeout_s=TIMEOUT_S)
    is_inside, _, top = result.stdout.partition("\n")
    # A repository can say that its files are elsewhere.
    return top.rstrip("\n") if result.exit_code == 0 and is_inside == "true" else None
