"""What differs between a workspace in an image and a fresh one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, cast

from batch_trajectories.runs.dataset.row_setup import RowSetup
from batch_trajectories.runs.worker.diffs.beginning import Known
from batch_trajectories.runs.worker.diffs.git import image_sandbox
from toolsets.context import ToolContext
from toolsets.sandbox.image_files import FileSource, FileState, ImageFiles
from toolsets.sandbox.layer_files import NotComparable, differences
from toolsets.workspace.files import is_named

_NESTED = "/.git"
_CARRIED = ("file", "link")


class Changes(NamedTuple):
    """What a conversation changed in a directory, by the paths in it."""

    top: str
    begun: dict[str, FileState]
    """What was there, at least where something was changed."""
    changed: dict[str, FileState]
    """Files and links that are other ones than before."""
    gone: list[str]
    """What is no longer there, or is something else."""
    had: set[str]
    """Files and links that were there, among those two."""
    closed: list[str]
    """Directories whose entries are not known; what was in them is among `gone`."""
    of_image: list[str]
    """What the check takes from the image, among those two."""
    source: FileSource
    source_before: FileSource | None
    """Where the files are, and were; None where only the sandbox knows that."""


async def changes_of(
    worked: ToolContext, fresh: ToolContext, top: str, setup: RowSetup | None, known: Known
) -> tuple[Changes, list[str]]:
    """What a conversation changed beneath `top`, and the repositories within that of `fresh`.

    Nothing may run in either workspace. What its model did not have is left out. Raises
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
    changes = await asyncio.to_thread(_sorted_out, top, ended, begun, setup, one, other)
    return changes._replace(source_before=None), nested


def changes_of_layers(
    ends: Sequence[Path], begins: Sequence[Path], top: str, setup: RowSetup | None
) -> Changes:
    """As `changes_of`; raises `NotComparable` where a comparison of layers does not tell."""
    found = differences(ends, begins, top)
    return _sorted_out(top, found.ended, found.begun, setup, found.files, found.before)


def _sorted_out(
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
    other, doubtful = _differing(ended, begun)
    sums = (of.checksums(top, doubtful) for of in (source, source_before))
    other |= {path for path, one, before in zip(doubtful, *sums, strict=True) if one != before}
    changed = {path: state for path, state in ended.items() if path in other}
    closed = [path for path, one in ended.items() if one.is_closed and begun.get(path) != one]
    had = {path for path in (*gone, *changed) if _kind(begun.get(path)) in _CARRIED}
    of_image = [p for p in {*gone, *changed} if any(is_named(p, one) for one in from_image)]
    return Changes(top, begun, changed, gone, had, closed, of_image, source, source_before)


def _differing(
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
