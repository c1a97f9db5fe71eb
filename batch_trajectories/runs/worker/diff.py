"""What a conversation changed in the repository that it worked in.

The diff is made when nothing of the conversation runs any more, in a fresh copy of its image: with
the git and the repository that the model was given, whatever it did to its own. Files that differ
are carried there, so the copy is what a fresh check judges.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import (
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip, plural
from batch_trajectories.runs.dataset.row_setup import RowSetup
from batch_trajectories.runs.worker.workspace_setup import SetupFailed
from toolsets.context import ToolContext
from toolsets.sandbox.base import ExecResult, Sandbox
from toolsets.sandbox.image_files import FileSource, FileState, ImageFiles, ImageSandbox
from toolsets.sandbox.layer_files import NotComparable, differences
from toolsets.workspace.files import is_named

MAX_BYTES = 16 << 20
"""Of a diff in a record."""

MAX_CARRIED_BYTES = 64 << 20
"""Of all changed files."""

_MAX_IN_MEMORY = 16 << 20
"""Of all changed files, as they were and as they are."""

_START = "diff_start"
_TIMEOUT_S = 600.0
_ARGUMENTS_BYTES = 64 << 10
_NESTED = "/.git"
_IGNORES = ".gitignore"
_CARRIED = ("file", "link")

# `safe.directory`: the files may belong to another user than commands. Modes are those on disk.
_GIT = (
    "set -e; umask 077; export LC_ALL=C GIT_CONFIG_COUNT=4 "
    "GIT_CONFIG_KEY_0=safe.directory 'GIT_CONFIG_VALUE_0=*' "
    "GIT_CONFIG_KEY_1=core.fileMode GIT_CONFIG_VALUE_1=true "
    "GIT_CONFIG_KEY_2=core.fsmonitor GIT_CONFIG_VALUE_2=false "
    "GIT_CONFIG_KEY_3=core.hooksPath GIT_CONFIG_VALUE_3=/dev/null; "
)
_TOP = _GIT + "git rev-parse --show-toplevel"
_AT_TOP = _GIT + 'cd "$1"; shift; '
_LINKS = _AT_TOP + (
    "line='\n'; listed=$(git ls-files -s); "
    'case $line$listed in *"${line}160000 "*) echo yes;; esac'
)
_AT_STORE = _AT_TOP + "store=$1; shift; "
# It fails where nothing is ignored.
_IGNORED = (
    'GIT_INDEX_FILE="$store/index" git check-ignore -z --stdin >"$store/ignored" || [ $? = 1 ]'
)
_IGNORED_LATER = _AT_STORE + _IGNORED
# The files of repositories within the repository are files like others. What the image's index
# names is ignored by no rule.
_BEGIN = (
    _AT_STORE
    + (
        'mkdir -p "$store/objects"; '
        'index=$(git rev-parse --git-path index); if [ -f "$index" ]; then '
        'cp -p "$index" "$store/index"; fi; '
        'number=0; for nested; do number=$((number + 1)); mv "$nested" "$store/$number"; done; '
        "tab=$(printf '\\t'); line='\n'; listed=$(git ls-files -s); "
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
_BEFORE = _AT_STORE + _TREE + 'tree begin >"$store/begin"'
_REMOVE = _AT_TOP + 'rm -rf -- "$@"'
# `--no-ext-diff` and `--no-textconv`: what the repository configures is not asked.
_SHOWN_AS = (
    "--binary --no-color --no-ext-diff --no-textconv --no-renames --src-prefix=a/ --dst-prefix=b/"
)
_END = (
    _AT_STORE
    + _TREE
    + (
        'tree=$(tree end); read -r begin <"$store/begin"; '
        "git diff " + _SHOWN_AS + ' "$begin" "$tree" >"$store/patch"; '
        'number=0; for nested; do number=$((number + 1)); mv "$store/$number" "$nested"; done'
    )
)


# The same where files were only edited and added: in two commands, with the index of the image, and
# in memory. What is ignored ends the first command, since all that depends on the order of steps.
_IN_MEMORY = _AT_STORE + (
    'export GIT_OBJECT_DIRECTORY="$store"; '
    "add() { export GIT_INDEX_FILE=$1; git update-index --add -z --stdin; }; "
)
_BEGIN_PLAIN = _IN_MEMORY + (
    'git check-ignore -- "$@" >/dev/null && exit 3 || [ $? = 1 ]; '
    'add "$store/begin.index"; git write-tree >"$store/begin"'
)
_END_PLAIN = _IN_MEMORY + (
    'add "$store/end.index"; read -r begin <"$store/begin"; '
    "git diff --cached " + _SHOWN_AS + ' "$begin" >"$store/patch"'
)
_IS_IGNORED = 3


# What the check takes from the image is moved aside, and back when the diff is made.
_SAVE = _AT_STORE + (
    'part=$store/of_image.$1; shift; mkdir "$part"; number=0; for path; do number=$((number + 1)); '
    '[ ! -L "$path" ] && [ ! -f "$path" ] || mv "$path" "$part/$number"; done'
)
_BRING_BACK = _AT_STORE + (
    "part=$store/of_image.$1; shift; "
    "number=0; for path; do number=$((number + 1)); old=$part/$number; "
    'rm -rf "$path"; [ ! -L "$old" ] && [ ! -f "$old" ] || '
    '{ mkdir -p "./$(dirname "$path")"; mv "$old" "$path"; }; done'
)


Found = TypeVar("Found")


class DiffError(Exception):
    """The changes of a conversation cannot be copied to a fresh workspace."""


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
        origin = _image_sandbox(context).origin
        if origin is None:
            return await find(context, *arguments)
        if (origin, find) not in self._found:
            self._found[origin, find] = await find(context, *arguments)
        return cast("Found", self._found[origin, find])


async def begin_diff(context: ToolContext, *, is_needed: bool, known: Known | None = None) -> None:
    """Remember whether a repository holds the workspace, before the model could change that.

    Raises `SetupFailed` where there is none and it is needed, as for fresh checks.
    """
    try:
        top = await (known or Known()).get(context, _top)
    except ToolError as error:
        raise SetupFailed(str(error)) from error
    if top is not None:
        await asyncio.to_thread(_remember, context, top)
    elif is_needed:
        raise SetupFailed("`check`: `fresh` needs git and a repository that holds the workspace")


def _remember(context: ToolContext, top: str) -> None:
    mark = _image_sandbox(context).layer_mark(top)
    context.workspace.make()
    (context.workspace.root / _START).write_text(f"{top}\0{mark or ''}")


def has_repository(root: Path) -> bool:
    """Whether a repository held the workspace at its start."""
    return (root / _START).exists()


def is_unchanged(context: ToolContext) -> bool:
    """Whether it is certain, without a comparison of files, that the repository is as it was.

    Nothing of the conversation may run.
    """
    top, _, mark = (context.workspace.root / _START).read_text().partition("\0")
    return bool(mark) and _image_sandbox(context).layer_mark(top) == mark


def empty_diff() -> dict[str, Any]:
    """The diff of a conversation that changed nothing."""
    return {"patch": "", "truncated": False}


async def make_diff(
    worked: ToolContext, fresh: ToolContext, setup: RowSetup | None, known: Known | None = None
) -> dict[str, Any]:
    """Change a fresh workspace as a conversation did, and return the diff.

    Nothing else may run in either. What the model did not have is left out; what the check takes
    from the image is in the diff, but in the fresh workspace as before. The keys of what is
    returned: `patch` (text as `git apply` takes it), `truncated` (it is longer than is kept),
    `base64` (the exact bytes, where they are not UTF-8). Raises `DiffError`.
    """
    known = known or Known()
    try:
        top = await known.get(fresh, _top)
        if top is None:
            raise DiffError("a fresh copy of the image has no repository")
        if top == "/":
            raise DiffError("the repository is the whole image")
        hidden = [_path(path) for path in setup.hidden] if setup else []
        check = setup and setup.check
        from_image = check.from_image if check else ()
        patch = await _made(worked, fresh, top, hidden, from_image, known)
    except ToolError as error:
        raise DiffError(str(error)) from error
    kept = patch[:MAX_BYTES]
    diff: dict[str, Any] = {
        "patch": kept.decode("utf-8", "replace"),
        "truncated": len(patch) > MAX_BYTES,
    }
    if diff["patch"].encode() != kept:
        diff["base64"] = base64.b64encode(kept).decode()
    return diff


def no_diff(why: str) -> dict[str, Any]:
    """The diff in a record where it could not be made."""
    return {**empty_diff(), "error": why}


async def _made(
    worked: ToolContext,
    fresh: ToolContext,
    top: str,
    hidden: Sequence[str],
    from_image: Sequence[str],
    known: Known,
) -> bytes:
    """Copy the changes below `top`, and return the diff."""
    sandbox, files = _sandbox(fresh), cast("ImageFiles", fresh.workspace)
    ended, begun, source, nested = await _compared(worked, fresh, top, known)
    for states in (ended, begun):
        for path in [path for path in states if _is_left_out(f"{top}/{path}", hidden)]:
            del states[path]
    gone = [path for path, state in begun.items() if _kind(ended.get(path)) != state.kind]
    changed = {
        path: state
        for path, state in ended.items()
        if state.kind in _CARRIED and begun.get(path) != state
    }
    had = {path for path in (*gone, *changed) if _kind(begun.get(path)) in _CARRIED}
    kept = [*_batches(p for p in {*gone, *changed} if any(is_named(p, one) for one in from_image))]
    rules = {path for path in changed if path.rpartition("/")[2] == _IGNORES}
    if not (gone or kept or rules or nested):
        sizes = [begun[path].size for path in had] + [state.size for state in changed.values()]
        if sum(sizes) <= _MAX_IN_MEMORY:
            patch = await _plain(source, fresh, top, changed, had, known)
            if patch is not None:
                return patch
    store = f"/tmp/.diff-{files.root.name[:16]}"
    had -= await _ignored(fresh, had, top, store, _BEGIN, *nested)
    await _run(sandbox, _BEFORE, top, store, stdin=_listed(had))
    for part, some in enumerate(kept):
        await _run(sandbox, _SAVE, top, store, str(part), *some)
    for some in _batches(_uppermost(gone)):
        await _run(sandbox, _REMOVE, top, *some)
    await _carry(source, files, top, {path: changed[path] for path in rules})
    if new := changed.keys() - had:
        for path in await _ignored(fresh, new, top, store, _IGNORED_LATER):
            del changed[path]
    carried = {path: state for path, state in changed.items() if path not in rules}
    await _carry(source, files, top, carried)
    await _run(sandbox, _END, top, store, *nested, stdin=_listed(changed))
    patch = await asyncio.to_thread(files.read_bytes, f"{store}/patch", MAX_BYTES + 1)
    for part, some in enumerate(kept):
        await _run(sandbox, _BRING_BACK, top, store, str(part), *some)
    await sandbox.exec(["rm", "-rf", "--", store])
    return patch


async def _plain(
    source: FileSource,
    fresh: ToolContext,
    top: str,
    changed: Mapping[str, FileState],
    had: Set[str],
    known: Known,
) -> bytes | None:
    """The diff where files were only edited and added; None where the general way must make it."""
    sandbox, files = _image_sandbox(fresh), cast("ImageFiles", fresh.workspace)
    some = [*_batches(sorted(changed))]
    store = sandbox.memory_dir
    if store is None or len(some) != 1 or await known.get(fresh, _has_links, top):
        return None
    result = await _run(
        sandbox, _BEGIN_PLAIN, top, store, *some[0], stdin=_listed(had), others=(_IS_IGNORED,)
    )
    if result.exit_code == _IS_IGNORED:
        return None
    await _carry(source, files, top, changed)
    await _run(sandbox, _END_PLAIN, top, store, stdin=_listed(changed))
    return await asyncio.to_thread(files.read_bytes, f"{store}/patch", MAX_BYTES + 1)


async def _compared(
    worked: ToolContext, fresh: ToolContext, top: str, known: Known
) -> tuple[dict[str, FileState], dict[str, FileState], FileSource, list[str]]:
    """What both workspaces have below `top`, at least where they differ.

    Then where the files of the first are, and the repositories within that of the second.
    """
    ends, begins = _image_sandbox(worked).layers, _image_sandbox(fresh).layers
    if ends is not None and begins is not None:
        with suppress(NotComparable):
            found = await asyncio.to_thread(differences, ends, begins, top)
            return found.ended, found.begun, found.files, await known.get(fresh, _nested, top)
    one, other = cast("ImageFiles", worked.workspace), cast("ImageFiles", fresh.workspace)
    ended, begun = await asyncio.gather(
        asyncio.to_thread(one.tree, top), asyncio.to_thread(other.tree, top)
    )
    return ended, begun, one, [path for path in begun if path.endswith(_NESTED)]


async def _nested(fresh: ToolContext, top: str) -> list[str]:
    """The repositories within a repository."""
    tree = await asyncio.to_thread(cast("ImageFiles", fresh.workspace).tree, top)
    return [path for path in tree if path.endswith(_NESTED)]


async def _has_links(fresh: ToolContext, top: str) -> bool:
    """Whether the index of a repository has commits of others, as for submodules."""
    return bool((await _run(_sandbox(fresh), _LINKS, top)).stdout)


async def _ignored(
    fresh: ToolContext, paths: Iterable[str], top: str, store: str, script: str, *arguments: str
) -> set[str]:
    """Which paths are ignored, as a script finds that reads them and writes a list of these."""
    listing = _listed(paths)
    await _run(_sandbox(fresh), script, top, store, *arguments, stdin=listing)
    found = await asyncio.to_thread(fresh.workspace.read_bytes, f"{store}/ignored", len(listing))
    return set(found.decode().split("\0")[:-1])


def _listed(paths: Iterable[str]) -> bytes:
    return b"".join(path.encode() + b"\0" for path in sorted(paths))


async def _carry(
    source: FileSource, fresh: ImageFiles, top: str, changed: Mapping[str, FileState]
) -> None:
    """Copy files and links to a fresh workspace. Raises `DiffError`."""
    size = sum(state.size for state in changed.values())
    if size > MAX_CARRIED_BYTES:
        what = f"{plural(len(changed), 'changed file')} with {size >> 20} MiB"
        raise DiffError(f"{what}: at most {MAX_CARRIED_BYTES >> 20} MiB can be carried")
    for path, state in changed.items():
        if "\ufffd" in path or (state.kind == "link" and "\ufffd" in state.mark):
            raise DiffError(f"{path!r}: its name or target is not UTF-8")
    if changed:
        await asyncio.to_thread(fresh.copy_from, source, top, changed)


def _is_left_out(path: str, hidden: Sequence[str]) -> bool:
    """Whether a path belongs to git's own data or to files that the model did not have."""
    if path.endswith(_NESTED):
        return True
    return any(path == one or path.startswith(f"{one}/") for one in hidden)


def _path(path: str) -> str:
    return path.rstrip("/")


def _kind(state: FileState | None) -> str | None:
    return None if state is None else state.kind


def _uppermost(paths: Iterable[str]) -> Iterator[str]:
    """Paths in their order, without those beneath another."""
    last = None
    for path in sorted(paths, key=lambda path: path.split("/")):
        if last is None or not path.startswith(f"{last}/"):
            last = path
            yield path


def _batches(paths: Iterable[str]) -> Iterator[list[str]]:
    """Paths that fit into the arguments of a command."""
    some: list[str] = []
    size = 0
    for path in paths:
        size += len(path.encode()) + 1
        if some and size > _ARGUMENTS_BYTES:
            yield some
            some, size = [], len(path.encode()) + 1
        some.append(path)
    if some:
        yield some


async def _top(context: ToolContext) -> str | None:
    """The directory of the repository that holds the workspace."""
    result = await _sandbox(context).exec(["sh", "-c", _TOP], timeout_s=_TIMEOUT_S)
    return result.stdout.rstrip("\n") if result.exit_code == 0 else None


async def _run(
    sandbox: Sandbox,
    script: str,
    *arguments: str,
    stdin: bytes = b"",
    others: Sequence[int] = (),
) -> ExecResult:
    """Run a script, which may end with 0 or one of `others`. Raises `DiffError`."""
    argv = ["sh", "-c", script, "sh", *arguments]
    result = await sandbox.exec(argv, timeout_s=_TIMEOUT_S, stdin=stdin)
    if result.exit_code not in (0, *others):
        said = clip((result.stderr or result.stdout).strip(), max_chars=500)
        how = "it timed out" if result.timed_out else f"exit code {result.exit_code}"
        raise DiffError(f"the diff cannot be made: {said or how}")
    return result


def _image_sandbox(context: ToolContext) -> ImageSandbox:
    return cast("ImageSandbox", _sandbox(context))


def _sandbox(context: ToolContext) -> Sandbox:
    if context.sandbox is None:
        raise ToolError("there is no sandbox to run commands in")
    return context.sandbox
