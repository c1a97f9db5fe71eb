"""The diff of files that were edited, added and removed, made from their contents alone.

Git compares two trees of these files in a sandbox with an unchanged workspace, in which nothing of
any conversation runs: with the configuration and attributes of the repository there, and with
objects of ours in memory. So one sandbox makes the diffs of many conversations.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import zlib
from collections import OrderedDict, defaultdict
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
    Set,
)
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple, cast

from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import ToolError
from batch_trajectories.engine.worker.diffs.changes import Changes
from batch_trajectories.engine.worker.diffs.git import (
    AT_STORE,
    AT_TOP,
    SHOWN_AS,
    VARIABLES,
    DiffError,
    encode_paths,
    image_sandbox,
    run,
)
from toolsets.context import ToolContext
from toolsets.sandbox.image_files import PART_BYTES, FileSource, FileState, ImageFiles

# Objects of git, named by SHA-1, as files of a directory of objects (gitrepository-layout(5)).

EMPTY_TREE = hashlib.sha1(b"tree 0\0", usedforsecurity=False).hexdigest()
_DIRECTORY = b"40000"
_MAX_REQUEST_BYTES = 512 << 10
"""Most bytes of contents in one request; a single content may be larger."""


class Blob(NamedTuple):
    """A file or link in a tree."""

    mode: bytes
    """Mode as git's trees have it: octal digits."""
    content: bytes
    """Contents of the file; the target of a link."""


class Objects:
    """Blobs and trees, to be copied to a directory of objects."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        """Contents by path in the directory."""

    def add_tree(self, blobs: Mapping[str, Blob]) -> str:
        """Add a tree with files by their paths; return its name."""
        return self._tree(blobs).hex()

    def write_requests(self) -> Iterator[list[dict[str, Any]]]:
        """The entries of requests that write them; see `inside.file_requests`."""
        entries: list[dict[str, Any]] = []
        size = 0
        for path, raw in self.files.items():
            if entries and size + len(raw) > _MAX_REQUEST_BYTES:
                yield entries
                entries, size = [], 0
            content = binascii.b2a_base64(raw, newline=False).decode()
            more = {"target": None, "is_executable": False}
            entries.append({"path": path, "content": content, **more})
            size += len(raw)
        yield entries

    def _tree(self, blobs: Mapping[str, Blob]) -> bytes:
        beneath: defaultdict[bytes, dict[str, Blob]] = defaultdict(dict)
        entries: list[tuple[bytes, bytes, bytes]] = []
        for path, blob in blobs.items():
            name, _, rest = path.partition("/")
            if rest:
                beneath[name.encode()][rest] = blob
            else:
                entries.append((name.encode(), blob.mode, self._add(b"blob", blob.content)))
        # Names of directories are sorted as if a slash ended them.
        entries += [(name + b"/", _DIRECTORY, self._tree(some)) for name, some in beneath.items()]
        parts = [
            b"%s %s\0%s" % (mode, name.removesuffix(b"/"), digest)
            for name, mode, digest in sorted(entries)
        ]
        return self._add(b"tree", b"".join(parts))

    def _add(self, kind: bytes, content: bytes) -> bytes:
        raw = b"%s %d\0%s" % (kind, len(content), content)
        digest = hashlib.sha1(raw, usedforsecurity=False)
        name = digest.hexdigest()
        self.files[f"{name[:2]}/{name[2:]}"] = zlib.compress(raw, 1)
        return digest.digest()


_MAX_BYTES = 1 << 20
"""Most bytes of all files, before and after."""
_MAX_FILES = 2000
_TIMEOUT_S = 60.0
"""Seconds for one command of git, since the diffs of other conversations wait for it."""
_MAX_STORED_BYTES = 16 << 20
_MAX_DIFFS = 64
_MAX_PATHS = 100_000
_MAX_OPEN = 8

# The index has no commits of others, as for submodules, and names are those of `objects`.
_IS_USUAL = AT_TOP + (
    "line='\n'; listed=$(git ls-files -s); "
    'case $line$listed in *"${line}160000 "*) exit 0;; esac; git hash-object -t tree /dev/null'
)
# Git exits with 1 where nothing is ignored. Attributes are those of files.
_LOOK_AT_PATHS = AT_STORE + (
    'mkdir -p "$store"; cat >"$store/paths"; '
    'git check-ignore -z --stdin <"$store/paths" >"$store/ignored" || [ $? = 1 ]; '
    'export GIT_INDEX_FILE="$store/none"; '
    'git check-attr -z --stdin filter ident working-tree-encoding <"$store/paths" '
    '>"$store/attributes"'
)
_NOT_SET = ("unspecified", "unset")


class Sides(NamedTuple):
    """Files by their paths, as they were and as they are."""

    begun: dict[str, Blob]
    ended: dict[str, Blob]


class Plain(NamedTuple):
    """A diff that was made from the contents of files, and which of these git ignores."""

    patch: bytes
    ignored: set[str]


class Differ:
    """Makes diffs of files of one workspace, in which nothing may be changed meanwhile."""

    def __init__(self, fresh: ToolContext, top: str, nested: Sequence[str]) -> None:
        """`top` is the directory of the repository, `nested` are repositories within it."""
        self.fresh = fresh
        self.top = top
        self.can_read = not nested and image_sandbox(fresh).memory_dir is not None
        self._files = cast("ImageFiles", fresh.workspace)
        self._is_usual: bool | None = None
        self._ignored: set[str] = set()
        self._converted: set[str] = set()
        self._looked_at: set[str] = set()
        self._diffs = 0
        self._stored_bytes = 0
        self.is_used_up = False
        """Whether the object has reached its limits and another should take its place."""

    async def find_ignored(self, paths: set[str]) -> set[str] | None:
        """The paths that git ignores; None if git changes the contents of any other path.

        Raises `DiffError` and `ToolError`.
        """
        sandbox = image_sandbox(self.fresh)
        if self._is_usual is None:
            output = (await run(sandbox, _IS_USUAL, self.top)).stdout
            self._is_usual = output.strip() == EMPTY_TREE
        if not self._is_usual:
            return None
        if new := paths - self._looked_at:
            store = f"{sandbox.memory_dir}/paths"
            await run(
                sandbox,
                _LOOK_AT_PATHS,
                self.top,
                store,
                stdin=encode_paths(new),
                timeout_s=_TIMEOUT_S,
            )
            ignored, attributes = await asyncio.to_thread(self._read_paths, store, new)
            self._ignored |= ignored
            self._converted |= attributes
            self._looked_at |= new
            self.is_used_up |= len(self._looked_at) >= _MAX_PATHS
        ignored = paths & self._ignored
        return None if (paths - ignored) & self._converted else ignored

    def _read_paths(self, store: str, paths: set[str]) -> tuple[set[str], set[str]]:
        """The ignored paths, and the paths whose contents git changes."""
        size = len(encode_paths(paths))
        ignored = self._files.read_bytes(f"{store}/ignored", size).decode().split("\0")
        content = self._files.read_bytes(f"{store}/attributes", 4 * size + 600 * len(paths))
        fields = content.decode("utf-8", "replace").split("\0")
        if len(fields) != 9 * len(paths) + 1:
            raise DiffError("attributes of files are too long")
        changing = zip(fields[::3], fields[2::3], strict=False)
        return {*ignored[:-1]}, {path for path, value in changing if value not in _NOT_SET}

    async def patch(self, sides: Callable[[], Sides | None]) -> bytes | None:
        """The diff of files that are not ignored, which are read in a thread; None without any.

        Raises `DiffError` and `ToolError`.
        """
        read = await asyncio.to_thread(_objects, sides)
        if read is None:
            return None
        objects, trees = read
        if trees[0] == trees[1]:
            return b""
        self._diffs += 1
        self._stored_bytes += sum(map(len, objects.files.values()))
        self.is_used_up |= self._diffs >= _MAX_DIFFS or self._stored_bytes >= _MAX_STORED_BYTES
        store = f"{image_sandbox(self.fresh).memory_dir}/{self._diffs}"
        *earlier, last = objects.write_requests()
        for entries in earlier:
            await self._files.ask(f"{store}/objects", op="put", entries=entries)
        reply, patch = await self._files.run_on_files(
            ["git", "diff", *SHOWN_AS.split(), f"--output={store}/patch", *trees],
            cwd=self.top,
            env={
                **VARIABLES,
                "GIT_DIFF_OPTS": "",
                "GIT_INDEX_FILE": f"{store}/none",
                "GIT_OBJECT_DIRECTORY": f"{store}/objects",
            },
            directory=f"{store}/objects",
            entries=last,
            result=f"{store}/patch",
            timeout_s=_TIMEOUT_S,
        )
        if reply.exit_code != 0:
            raise DiffError("git could not compare the files")
        if len(patch) < PART_BYTES:
            return patch
        return await self._files.read(f"{store}/patch", 4 * _MAX_BYTES)


def _objects(sides: Callable[[], Sides | None]) -> tuple[Objects, tuple[str, str]] | None:
    """The objects of both sides, and the names of their trees."""
    if (read := sides()) is None:
        return None
    objects = Objects()
    return objects, (objects.add_tree(read.begun), objects.add_tree(read.ended))


async def make_plain(changes: Changes, differ: Differ) -> Plain | None:
    """The diff made from the contents of files; None where git has to see the files."""
    try:
        return await _make_plain(changes, differ)
    except (DiffError, ToolError):
        differ.is_used_up = True
        return None


async def _make_plain(changes: Changes, differ: Differ) -> Plain | None:
    """Make the plain diff. Raises `DiffError` and `ToolError`."""
    begun = {path: changes.begun[path] for path in changes.had}
    states = [*begun.values(), *changes.changed.values()]
    if (
        changes.source_before is None
        or changes.of_image
        or not differ.can_read
        or len(states) > _MAX_FILES
        or sum(state.size for state in states) > _MAX_BYTES
        or any(map(_is_special, {*begun, *changes.changed}))
        or any(state.kind == "file" and state.is_for_others_only for state in begun.values())
        or changes.closed
        or any(state.has_odd_target for state in states)
    ):
        return None
    ignored = await differ.find_ignored({*begun, *changes.changed})
    if ignored is None:
        return None
    patch = await differ.patch(partial(_read, changes, begun, ignored))
    return None if patch is None else Plain(patch, ignored)


def _read(changes: Changes, begun: Mapping[str, FileState], ignored: Set[str]) -> Sides | None:
    """The files that are not ignored; None if git may change their contents."""
    assert changes.source_before is not None
    sides = Sides(
        _blobs(changes.source_before, changes.top, begun, ignored),
        _blobs(changes.source, changes.top, changes.changed, ignored),
    )
    # Line endings can be converted.
    if any(b"\r" in blob.content for side in sides for blob in side.values()):
        return None
    return sides


def _is_special(path: str) -> bool:
    """Whether git treats files of this name in its own way, or a record may have it otherwise."""
    name = path.lower()
    return name.startswith(":") or ".git" in name or "git~" in name or "\ufffd" in name


def _blobs(
    source: FileSource, top: str, states: Mapping[str, FileState], ignored: Set[str]
) -> dict[str, Blob]:
    blobs = {}
    for path in states.keys() - ignored:
        state = states[path]
        if state.kind == "link":
            blobs[path] = Blob(b"120000", state.mark.encode())
        else:
            mode = b"100755" if state.is_executable else b"100644"
            blobs[path] = Blob(mode, source.read_bytes(f"{top}/{path}", state.size))
    return blobs


class Differs:
    """The differs that the conversations of a worker share, the last used ones of many images."""

    def __init__(self) -> None:
        self._open: OrderedDict[Hashable, Differ | None] = OrderedDict()
        self._using: dict[Hashable, asyncio.Lock] = {}

    @asynccontextmanager
    async def using(
        self, key: Hashable, make: Callable[[], Awaitable[Differ | None]]
    ) -> AsyncIterator[Differ | None]:
        """The differ of this key, made where there is none; None where there can be none."""
        async with self._using.setdefault(key, asyncio.Lock()):
            if key not in self._open:
                self._open[key] = await make()
            self._open.move_to_end(key)
            differ = self._open[key]
            try:
                yield differ
            finally:
                if differ is not None and differ.is_used_up:
                    await self._end(key)
        for oldest in [*self._open][: max(0, len(self._open) - _MAX_OPEN)]:
            if not self._using[oldest].locked():
                await self._end(oldest)

    async def close(self) -> None:
        """End their sandboxes."""
        await close_all(*(partial(self._end, key) for key in self._open))

    async def _end(self, key: Hashable) -> None:
        # Ending one takes time, in which another conversation may have begun to end it, too.
        if (differ := self._open.pop(key, None)) is not None:
            await differ.fresh.close(remove=True)
