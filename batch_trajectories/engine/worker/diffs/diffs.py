"""The diffs of the conversations of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from typing import Any, NamedTuple

from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import ToolError
from batch_trajectories.dataset.row_workspace import RowSetup
from batch_trajectories.engine.worker.diffs.changes import (
    Changes,
    Known,
    changes_of_layers,
    find_nested,
    find_start,
    find_top,
    is_unchanged,
)
from batch_trajectories.engine.worker.diffs.git import DiffError, image_sandbox
from batch_trajectories.engine.worker.diffs.making import empty_diff, make_diff, no_diff, to_record
from batch_trajectories.engine.worker.diffs.plain import Differ, Differs, Plain, make_plain
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.sandbox.layer_files import NotComparable

Open = Callable[[], Awaitable[ToolContext]]
"""Opens a workspace. Raises `SetupFailed`."""


class Openings(NamedTuple):
    """Functions that open workspaces for the diff of a conversation."""

    fresh: Open
    """Opens a workspace in the state that the conversation started from."""
    reopened: Open
    """Opens the workspace of the conversation again."""
    shared: Open
    """Opens a workspace like `fresh` that several conversations share."""
    made_of: Hashable | None
    """The ingredients of a fresh workspace; None if each one is different."""


class Diffs:
    """Makes diffs, and keeps what the diffs of several conversations have in common."""

    def __init__(self) -> None:
        self.known = Known()
        self._differs = Differs()

    async def make(
        self, worked: ToolContext, setup: RowSetup | None, opening: Openings, *, is_afresh: bool
    ) -> dict[str, Any] | None:
        """The changes of a conversation to the repository of its image; None without a repository.

        The conversation's sandbox must have been stopped. For a check `is_afresh` the changed fresh
        workspace is left in place. Raises `SetupFailed` if there is none for such a check.
        """
        begin = await asyncio.to_thread(_look, worked, setup, opening)
        if begin is None:
            return None
        unchanged, changes = begin
        plain = None if changes is None else await self._plain(changes, opening)
        if not is_afresh and (unchanged or plain is not None):
            return empty_diff() if plain is None else to_record(plain.patch)
        again = fresh = None
        try:
            fresh = await opening.fresh()
            if unchanged:
                diff = empty_diff()
            else:
                again = await opening.reopened()
                diff = await make_diff(again, fresh, setup, self.known, plain)
            is_left = is_afresh
        except (SetupFailed, DiffError) as error:
            if is_afresh and isinstance(error, SetupFailed):
                raise
            diff, is_left = no_diff(str(error)), False
        finally:
            opened = [one for one in (again, fresh) if one is not None]
            await close_all(*(image_sandbox(one).stop for one in opened))
        if fresh is not None and not is_left:
            await asyncio.to_thread(fresh.workspace.remove)
        return diff

    async def close(self) -> None:
        """End what was opened for several conversations."""
        await self._differs.close()

    async def _plain(self, changes: Changes, opening: Openings) -> Plain | None:
        """The diff, if a workspace that others share is enough to make it; else None."""

        async def make() -> Differ | None:
            fresh = await opening.shared()
            if image_sandbox(fresh).origin is not None:
                top = await self.known.get(fresh, find_top)
                if top == changes.top != "/":
                    return Differ(fresh, top, await self.known.get(fresh, find_nested, top))
            await fresh.close(remove=True)
            return None

        with suppress(SetupFailed, ToolError):
            async with self._differs.using(opening.made_of, make) as differ:
                return None if differ is None else await make_plain(changes, differ)
        return None


def _look(
    worked: ToolContext, setup: RowSetup | None, opening: Openings
) -> tuple[bool, Changes | None] | None:
    """Whether a repository is certainly unchanged; else its changes, where layers tell them.

    None where there is no repository.
    """
    if (start := find_start(worked.workspace.root)) is None:
        return None
    top, _ = start
    layers = image_sandbox(worked).layers
    unchanged = is_unchanged(worked)
    if unchanged or layers is None or opening.made_of is None:
        return unchanged, None
    with suppress(NotComparable):
        # Below its own layer is what a fresh workspace is made of.
        return False, changes_of_layers(layers, layers[1:], top, setup)
    return False, None
