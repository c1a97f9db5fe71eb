"""The diff of the repository that a conversation worked in.

The diff is made when nothing of the conversation runs any more, in a fresh copy of its image: with
the git and the repository that the model was given, whatever it did to its own. Files that differ
are carried there, so the copy is what a fresh check judges.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, cast

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import plural
from batch_trajectories.dataset.row_workspace import RowSetup
from batch_trajectories.engine.worker.diffs.changes import Changes, Known, find_changes, find_top
from batch_trajectories.engine.worker.diffs.git import (
    AT_STORE,
    AT_TOP,
    SHOWN_AS,
    DiffError,
    batches,
    encode_paths,
    image_sandbox,
    run,
    uppermost,
)
from batch_trajectories.engine.worker.diffs.plain import Differ, Plain, make_plain
from toolsets.context import ToolContext
from toolsets.sandbox.image_files import FileSource, FileState, ImageFiles

MAX_BYTES = 16 << 20
"""Most bytes of a diff in a record."""

MAX_CARRIED_BYTES = 64 << 20
"""Most bytes of all changed files."""

_IGNORES = ".gitignore"

# It fails where nothing is ignored.
_IGNORED = (
    'GIT_INDEX_FILE="$store/index" git check-ignore -z --stdin >"$store/ignored" || [ $? = 1 ]'
)
_IGNORED_LATER = AT_STORE + _IGNORED
# The files of repositories within the repository are files like others. What the image's index
# names is ignored by no rule.
_BEGIN = (
    AT_STORE
    + (
        'mkdir -p "$store/objects"; '
        'index=$(git rev-parse --git-path index); if [ -f "$index" ]; then '
        'cp -p "$index" "$store/index"; fi; '
        'number=0; for nested; do number=$((number + 1)); mv "$nested" "$store/$number"; done; '
        "tab=$(printf '\\t'); line='\n'; listed=$(git -c core.quotePath=false ls-files -s); "
        'case $line$listed in *"${line}160000 "*) echo "$listed" | while IFS= read -r entry; do '
        'case $entry in 160000*) GIT_INDEX_FILE="$store/index" '
        'git update-index --force-remove -- "${entry#*"$tab"}";; esac; done;; esac; '
    )
    + _IGNORED
)
# A tree of these files alone. Index and objects are our own: where git finds an object in the
# repository, it marks it as new, and the layer gets a copy of its whole pack.
_TREE = (
    'export GIT_OBJECT_DIRECTORY="$store/objects"; tree() { '
    'GIT_INDEX_FILE="$store/$1.index" git update-index --add -z --stdin; '
    'GIT_INDEX_FILE="$store/$1.index" git write-tree; }; '
)
_BEFORE = AT_STORE + _TREE + 'tree begin >"$store/begin"'
_REMOVE = AT_TOP + 'rm -rf -- "$@"'
_END = (
    AT_STORE
    + _TREE
    + (
        'tree=$(tree end); read -r begin <"$store/begin"; '
        "git diff " + SHOWN_AS + ' "$begin" "$tree" >"$store/patch"; '
        'number=0; for nested; do number=$((number + 1)); [ ! -d "${nested%/.git}" ] || '
        'mv "$store/$number" "$nested"; done'
    )
)


# What the check takes from the image is moved aside, and back when the diff is made.
_SAVE = AT_STORE + (
    'part=$store/of_image.$1; shift; mkdir "$part"; number=0; for path; do number=$((number + 1)); '
    '[ ! -L "$path" ] && [ ! -f "$path" ] || mv "$path" "$part/$number"; done'
)
_BRING_BACK = AT_STORE + (
    "part=$store/of_image.$1; shift; "
    "number=0; for path; do number=$((number + 1)); old=$part/$number; "
    'rm -rf "$path"; [ ! -L "$old" ] && [ ! -f "$old" ] || '
    '{ mkdir -p "./$(dirname "$path")"; mv "$old" "$path"; }; done'
)


def empty_diff() -> dict[str, Any]:
    """The diff of a conversation that changed nothing."""
    return {"patch": "", "truncated": False}


async def make_diff(
    worked: ToolContext,
    fresh: ToolContext,
    setup: RowSetup | None,
    known: Known | None = None,
    plain: Plain | None = None,
) -> dict[str, Any]:
    """Change a fresh workspace as a conversation did, and return the diff.

    Nothing else may run in either. What the model did not have is left out; what the check takes
    from the image is in the diff, but in the fresh workspace as before. `plain` is the diff where
    that is known. For what is returned see `to_record`. Raises `DiffError`.
    """
    known = known or Known()
    try:
        top = await known.get(fresh, find_top)
        if top is None:
            raise DiffError("a fresh copy of the image has no repository")
        if top == "/":
            raise DiffError("the repository is the whole image")
        changes, nested = await find_changes(worked, fresh, top, setup, known)
        plain = plain or await make_plain(changes, Differ(fresh, top, nested))
        if plain is None:
            return to_record(await _make_in_copy(changes, nested, fresh))
        await _remove(fresh, changes)
        carried = _remove_paths(changes.changed, plain.ignored)
        await _copy_changes(changes.source, cast("ImageFiles", fresh.workspace), top, carried)
        return to_record(plain.patch)
    except ToolError as error:
        raise DiffError(str(error)) from error


def to_record(patch: bytes) -> dict[str, Any]:
    """A diff as a record has it.

    `patch` is text as `git apply` takes it, `truncated` whether it is longer than is kept, and
    `base64` the exact bytes, where they are not UTF-8.
    """
    kept = patch[:MAX_BYTES]
    diff: dict[str, Any] = {
        "patch": kept.decode("utf-8", "replace"),
        "truncated": len(patch) > MAX_BYTES,
    }
    if diff["patch"].encode() != kept:
        diff["base64"] = base64.b64encode(kept).decode()
    return diff


def no_diff(why: str) -> dict[str, Any]:
    """The entry of a record whose diff could not be made."""
    return {**empty_diff(), "error": why}


async def _make_in_copy(changes: Changes, nested: Sequence[str], fresh: ToolContext) -> bytes:
    """Copy the changes to a fresh workspace, and return the diff that git makes there."""
    top, changed, source = changes.top, dict(changes.changed), changes.source
    sandbox, files = image_sandbox(fresh), cast("ImageFiles", fresh.workspace)
    store = f"/tmp/.diff-{files.root.name[:16]}"
    # What is beneath a directory is ignored if it is.
    inside = {f"{path}/-" for path in changes.closed}
    ignored = await _find_ignored(fresh, changes.had | inside, top, store, _BEGIN, *nested)
    had = changes.had - ignored
    for path in inside - ignored:
        raise DiffError(f"{path[:-2]!r}: the directory cannot be read")
    for path in had:
        _check_name(path)
    await run(sandbox, _BEFORE, top, store, stdin=encode_paths(had))
    kept = [*batches(changes.of_image)]
    for part, some in enumerate(kept):
        await run(sandbox, _SAVE, top, store, str(part), *some)
    await _remove(fresh, changes)
    rules = {path for path in changed if path.rpartition("/")[2] == _IGNORES}
    await _copy_changes(source, files, top, {path: changed[path] for path in rules})
    if new := changed.keys() - had:
        changed = _remove_paths(
            changed, await _find_ignored(fresh, new, top, store, _IGNORED_LATER)
        )
    await _copy_changes(source, files, top, _remove_paths(changed, rules))
    await run(sandbox, _END, top, store, *nested, stdin=encode_paths(changed))
    patch = await asyncio.to_thread(files.read_bytes, f"{store}/patch", MAX_BYTES + 1)
    for part, some in enumerate(kept):
        await run(sandbox, _BRING_BACK, top, store, str(part), *some)
    await sandbox.exec(["rm", "-rf", "--", store])
    return patch


async def _remove(fresh: ToolContext, changes: Changes) -> None:
    for some in batches(uppermost(changes.gone)):
        await run(image_sandbox(fresh), _REMOVE, changes.top, *some)


def _remove_paths(states: Mapping[str, FileState], paths: Set[str]) -> dict[str, FileState]:
    return {path: state for path, state in states.items() if path not in paths}


async def _find_ignored(
    fresh: ToolContext, paths: Iterable[str], top: str, store: str, script: str, *arguments: str
) -> set[str]:
    """The ignored paths, found by a script that reads paths and writes the list of ignored ones."""
    # What begins with a colon would be a pattern.
    listing = encode_paths(f"./{path}" if path.startswith(":") else path for path in paths)
    await run(image_sandbox(fresh), script, top, store, *arguments, stdin=listing)
    found = await asyncio.to_thread(fresh.workspace.read_bytes, f"{store}/ignored", len(listing))
    return {path.removeprefix("./") for path in found.decode().split("\0")[:-1]}


def _check_name(path: str, state: FileState | None = None) -> None:
    if "\ufffd" in path or (state is not None and state.has_odd_target):
        named = path.replace("\ufffd", "\\x")
        raise DiffError(f"'{named}': its name or target is not UTF-8")


async def _copy_changes(
    source: FileSource, fresh: ImageFiles, top: str, changed: Mapping[str, FileState]
) -> None:
    """Copy files and links to a fresh workspace. Raises `DiffError`."""
    size = sum(state.size for state in changed.values())
    if size > MAX_CARRIED_BYTES:
        what = f"{plural(len(changed), 'changed file')} with {size >> 20} MiB"
        raise DiffError(f"{what}: at most {MAX_CARRIED_BYTES >> 20} MiB can be carried")
    for path, state in changed.items():
        _check_name(path, state)
    if changed:
        await asyncio.to_thread(fresh.copy_from, source, top, changed)
