"""Compares a workspace in an image with a fresh one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.dataset.row_workspace import RowSetup
from batch_trajectories.engine.worker.diffs.git import GIT, TIMEOUT_S, image_sandbox
from batch_trajectories.engine.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.sandbox.image_files import FileSource, FileState, ImageFiles
from toolsets.sandbox.layer_files import NotComparable, differences
from toolsets.workspace.files import is_named

# What is remembered of a workspace in an image before its model could change that.

_START = "diff_start"
_TOP = GIT + "git rev-parse --is-inside-work-tree --show-toplevel"

Found = TypeVar("Found")


class Known:
    """Facts about unchanged workspaces, found once for all that are made of the same
    ingredients."""

    def __init__(self) -> None:
        self._found: dict[tuple[Hashable, Callable[..., object]], object] = {}

    async def get(
        self, context: ToolContext, find: Callable[..., Awaitable[Found]], *arguments: object
    ) -> Found:
        """The result of `find` in a workspace."""
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
    """Remember whether a repository holds the workspace, before the model can change that.

    `then` is called in the same thread once the answer is written. Raises `SetupFailed` if a
    repository is needed, as for fresh checks, and there is none, or if changes could not be copied
    to another workspace.
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


def find_start(root: Path) -> tuple[str, str] | None:
    """The directory of the repository that held the workspace at its start, and its mark then."""
    try:
        top, _, mark = (root / _START).read_text().partition("\0")
    except FileNotFoundError:
        return None
    return top, mark


def is_unchanged(context: ToolContext) -> bool:
    """Whether the repository is certainly unchanged; found without a comparison of files.

    No process of the conversation may run. False without a repository.
    """
    if (start := find_start(context.workspace.root)) is None:
        return False
    top, mark = start
    return bool(mark) and image_sandbox(context).layer_mark(top) == mark


async def find_top(context: ToolContext) -> str | None:
    """The directory of the repository that holds the workspace."""
    result = await image_sandbox(context).exec(["sh", "-c", _TOP], timeout_s=TIMEOUT_S)
    is_inside, _, top = result.stdout.partition("\n")
    # A repository can say that its files are elsewhere.
    return top.rstrip("\n") if result.exit_code == 0 and is_inside == "true" else None


_NESTED = "/.git"
_CARRIED = ("file", "link")


class Changes(NamedTuple):
    """Changes of a conversation in a directory, by the paths in it."""

    top: str
    begun: dict[str, FileState]
    """State of the paths before, at least of those that were changed."""
    changed: dict[str, FileState]
    """Files and links that are other ones than before."""
    gone: list[str]
    """Paths that are no longer there, or are something else."""
    had: set[str]
    """Files and links that were there before, among `changed` and `gone`."""
    closed: list[str]
    """Directories whose entries are not known; what was in them is among `gone`."""
    of_image: list[str]
    """Paths that the check takes from the image, among `changed` and `gone`."""
    source: FileSource
    source_before: FileSource | None
    """Places of the files before; None if only the sandbox knows them."""


async def find_changes(
    worked: ToolContext, fresh: ToolContext, top: str, setup: RowSetup | None, known: Known
) -> tuple[Changes, list[str]]:
    """The changes of a conversation beneath `top`, and the repositories within the fresh one.

    No process may run in either workspace. Paths that the model did not have are left out. Raises
    `ToolError`.
    """
    ends, begins = image_sandbox(worked).layers, image_sandbox(fresh).layers
    if ends is not None and begins is not None:
        with suppress(NotComparable):
            changes = await asyncio.to_thread(changes_of_layers, ends, begins, top, setup)
            return changes, await known.get(fresh, find_nested, top)
    one, other = cast("ImageFiles", worked.workspace), cast("ImageFiles", fresh.workspace)
    ended, begun = await asyncio.gather(
        asyncio.to_thread(one.tree, top), asyncio.to_thread(other.tree, top)
    )
    nested = [path for path in begun if path.endswith(_NESTED)]
    changes = await asyncio.to_thread(_sort_changes, top, ended, begun, setup, one, other)
    return changes._replace(source_before=None), nested


def changes_of_layers(
    ends: Sequence[Path], begins: Sequence[Path], top: str, setup: RowSetup | None
) -> Changes:
    """Find the changes by comparing layers; see `find_changes`. Raises `NotComparable`."""
    found = differences(ends, begins, top)
    return _sort_changes(top, found.ended, found.begun, setup, found.files, found.before)


def _sort_changes(
    top: str,
    ended: dict[str, FileState],
    begun: dict[str, FileState],
    setup: RowSetup | None,
    source: FileSource,
    source_before: FileSource,
) -> Changes:
    hidden = [path.rstrip("/") for path in setup.hidden] if setup else []
    from_image = setup.check.from_image if setup and setup.check else ()
    for states in (ended, begun):
        for path in [path for path in states if _is_left_out(f"{top}/{path}", hidden)]:
            del states[path]
    gone = [path for path, state in begun.items() if _kind(ended.get(path)) != state.kind]
    other, doubtful = _find_differing(ended, begun)
    sums = (of.checksums(top, doubtful) for of in (source, source_before))
    other |= {path for path, one, before in zip(doubtful, *sums, strict=True) if one != before}
    changed = {path: state for path, state in ended.items() if path in other}
    closed = [path for path, one in ended.items() if one.is_unreadable and begun.get(path) != one]
    had = {path for path in (*gone, *changed) if _kind(begun.get(path)) in _CARRIED}
    of_image = [p for p in {*gone, *changed} if any(is_named(p, one) for one in from_image)]
    return Changes(
        top=top,
        begun=begun,
        changed=changed,
        gone=gone,
        had=had,
        closed=closed,
        of_image=of_image,
        source=source,
        source_before=source_before,
    )


def _find_differing(
    ended: Mapping[str, FileState], begun: Mapping[str, FileState]
) -> tuple[set[str], list[str]]:
    """Which files and links are other ones, and of which files only the contents tell that.

    A program can set the time of a file to what it was, or bring another with the same time:
    images can have one time for all files. A file whose name is not UTF-8 could not be carried, so
    another time alone is no change of it.
    """
    differing, doubtful = set(), []
    for path, state in ended.items():
        before = begun.get(path)
        if state.kind not in _CARRIED or state == before:
            continue
        if before is not None and _can_be_same(before, state, is_odd="\ufffd" in path):
            doubtful.append(path)
        else:
            differing.add(path)
    return differing, doubtful


def _can_be_same(before: FileState, state: FileState, *, is_odd: bool) -> bool:
    """Whether two files differ at most in contents of one length."""
    if before.kind != "file" or (state.kind, state.size) != ("file", before.size):
        return False
    return before.mark == state.mark or (is_odd and before.mark[:1] == state.mark[:1])


async def find_nested(fresh: ToolContext, top: str) -> list[str]:
    """The repositories within a repository."""
    tree = await asyncio.to_thread(cast("ImageFiles", fresh.workspace).tree, top)
    return [path for path in tree if path.endswith(_NESTED)]


def _is_left_out(path: str, hidden: Sequence[str]) -> bool:
    """Whether a path belongs to git's own data or to files that the model did not have."""
    if path.endswith(_NESTED):
        return True
    return any(path == one or path.startswith(f"{one}/") for one in hidden)


def _kind(state: FileState | None) -> str | None:
    return None if state is None else state.kind
