"""The files of a conversation that works in an image, through the server in its sandbox."""

from __future__ import annotations

import asyncio
import base64
import binascii
import errno
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Hashable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe
from toolsets.sandbox.base import (
    Extras,
    ImageSpec,
    Limits,
    Sandbox,
    SandboxError,
    SandboxSettings,
)
from toolsets.sandbox.channel import Reply
from toolsets.sandbox.inside.file_requests import UNNAMED, UNREADABLE
from toolsets.workspace.workspace import FileEntry, PathError, Workspace, check_path

_PART_BYTES = 512 << 10
_PROBE_BYTES = 64 << 10
_BATCH = 500
_MAX_SEARCHED_BYTES = 32 << 20
"""Of one request, so that others need not wait long."""
_FORBIDDEN = "the sandbox said what it may not"

Answer = TypeVar("Answer")


class ImageSandbox(Sandbox):
    """A sandbox in an image: the files are inside, and what changes lasts until it is discarded."""

    lies_in_workspace = False
    image_digest: str
    """Of the image's configuration, which names its layers: for all sandboxes the same."""
    memory_dir: str | None = None
    """A directory inside whose files are in memory, of this sandbox alone."""
    shares_bases = False
    """Whether it can begin above what others began with: see `begin_above`."""
    user_home: str | None
    """HOME of the user that commands run as; None where only the engine knows it."""

    @property
    @abstractmethod
    def can_change_all(self) -> bool:
        """Whether commands may change every file of the image."""

    @abstractmethod
    def is_kept(self) -> bool:
        """Whether what an earlier sandbox of this conversation changed is still there."""

    @property
    def is_made_at_once(self) -> bool:
        """Whether `make` has nothing to prepare."""
        return False

    @abstractmethod
    def make(self) -> None:
        """Prepare what is kept, where that takes time; may be repeated."""

    @abstractmethod
    def discard(self) -> None:
        """Remove what is kept; the sandbox must have been stopped."""

    def begin_above(self, base: str) -> bool:
        """Before its first call, take over what `keep_as` kept; False where nothing is kept."""
        del base
        return False

    def keep_as(self, base: str) -> None:
        """Keep what was changed for others under a name; the sandbox must have been stopped."""

    def layer_mark(self, path: str) -> str | None:
        """A text that stays the same as long as nothing beneath a directory is changed.

        Directories `.git` do not count. None where only a comparison of all files can tell.
        """
        del path
        return None

    @property
    def origin(self) -> Hashable | None:
        """What the workspace is made of, while nothing in it was changed and its sandbox may begin.

        Equal ones have equal files. None where that is not known.
        """
        return None

    @property
    def layers(self) -> Sequence[Path] | None:
        """The directories out here that are merged into what commands see, the uppermost first.

        None where they are not known, or there are none.
        """
        return None

    @abstractmethod
    async def ask_files(self, request: dict[str, Any]) -> Reply:
        """Make one request; see `toolsets.sandbox.inside.file_requests`."""


class ImageSandboxes(ABC):
    """Makes the sandboxes of the conversations of a run that work in images."""

    @abstractmethod
    def __init__(self, settings: SandboxSettings, run_dir: Path) -> None:
        """`settings` are those of the run; nothing is looked at before a method is called."""

    @abstractmethod
    def problem(self) -> str | None:
        """Return None if images can be used here, else one sentence that says what to do."""

    def problem_of_image(self, reference: str) -> str | None:
        """Why there is no image of this name; None also where only a start can tell."""
        del reference
        return None

    @abstractmethod
    def digests(self, references: Collection[str]) -> dict[str, str]:
        """The digests of those images that are here; see `ImageSandbox.image_digest`.

        Raises `SandboxError`.
        """

    def warning(self) -> str | None:
        """What makes images slow here; None if nothing does."""
        return None

    @abstractmethod
    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """Return the sandbox of one conversation; waits until its image is there.

        Raises `ImageError` where the image is missing, damaged or cannot be used, `HostError`, and
        `SandboxError`.
        """

    def remove_leftovers(self) -> int:
        """Remove containers that no conversation uses; return how many there were.

        Raises `SandboxError`.
        """
        return 0


class FileState(NamedTuple):
    """What tells a file from what it was."""

    kind: str
    """As in `FileEntry`."""
    size: int
    mark: str
    """The target of a link; of a file who may execute it, and the time of its contents; of a
    directory `UNREADABLE` where its entries are not known."""
    changed_ns: int = 0
    """Of a file, when it or its status was changed (ctime), which no command can set."""

    @property
    def is_executable(self) -> bool:
        """Whether a file may be run."""
        return not self.mark.startswith("-")

    @property
    def is_for_others_only(self) -> bool:
        """Whether a file may be run, but not by its owner, whose permission git looks at."""
        return self.mark.startswith("o")

    @property
    def has_odd_target(self) -> bool:
        """Whether it is a link whose target is not UTF-8."""
        return self.kind == "link" and UNNAMED in self.mark

    @property
    def is_closed(self) -> bool:
        """Whether a directory has entries that are not known."""
        return self.kind == "dir" and self.mark == UNREADABLE


class FileSource(Protocol):
    """Where files are copied from."""

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """The contents of small files beneath a directory. Raises `ToolError`."""

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """Up to so many bytes of a file. Raises `ToolError`."""

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """Of files beneath a directory, by `checksum`; empty ones of those that cannot be read."""


class ImageFiles(FileSource):
    """See `Files`. A request waits for a command that runs."""

    def __init__(self, kept: Workspace, sandbox: ImageSandbox) -> None:
        """`kept` is where what changes in the image is. To be made in the sandbox's event loop."""
        self._kept = kept
        self._sandbox = sandbox
        self._loop = asyncio.get_running_loop()
        self.root: Path = kept.root

    @property
    def start_dir(self) -> str:
        """See `Files`."""
        return self._kept.start_dir

    @start_dir.setter
    def start_dir(self, path: str) -> None:
        self._kept.start_dir = path

    @property
    def home(self) -> str:
        """See `Files`."""
        return self._sandbox.home

    def make(self) -> None:
        """See `Files`."""
        self._kept.make()

    def close(self) -> None:
        """See `Files`."""
        self._kept.close()

    def remove(self) -> None:
        """See `Files`."""
        self._sandbox.discard()
        self._kept.remove()

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """See `Files`."""
        return self._wait(self.read(path, max_bytes))

    async def read(self, path: str, max_bytes: int) -> bytes:
        """As `read_bytes`, in the event loop."""
        pieces: list[bytes] = []
        offset = 0
        while offset < max_bytes:
            size = min(_PART_BYTES, max_bytes - offset)
            reply = await self.ask(path, op="read", offset=offset, size=size)
            piece = _content(reply.contents[0][1]) if reply.contents else b""
            pieces.append(piece)
            offset += len(piece)
            if len(piece) < size:
                break
        return b"".join(pieces)

    def write_bytes(self, path: str, data: bytes) -> None:
        """See `Files`."""
        for start in range(0, len(data) or 1, _PART_BYTES):
            self._ask(
                path,
                op="write",
                content=base64.b64encode(data[start : start + _PART_BYTES]).decode(),
                is_first=start == 0,
                is_last=start + _PART_BYTES >= len(data),
            )

    def listing(self, path: str = ".") -> list[FileEntry]:
        """See `Files`."""
        return list(self._entries("list", path))

    def walk(self, path: str = ".") -> Iterator[FileEntry]:
        """See `Files`."""
        return self._entries("walk", path)

    def tree(self, path: str, *, with_git: bool = False) -> dict[str, FileState]:
        """All beneath a directory by its path in it; directories `.git` only on demand.

        Names are as `exact_text` has them.
        """
        entries = self._marked("tree", path, with_git=with_git)
        return {entry.path: _state(entry, mark) for entry, mark in entries}

    def copy_from(self, source: FileSource, top: str, states: Mapping[str, FileState]) -> None:
        """Copy files and links beneath a directory, with whether they may be executed."""
        group: list[str] = []
        size = 0
        for path, state in states.items():
            if size + state.size > _PART_BYTES or len(group) == _BATCH:
                self._put(top, {path: states[path] for path in group}, source)
                group, size = [], 0
            group.append(path)
            size += state.size
        self._put(top, {path: states[path] for path in group}, source)

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """See `FileSource`; they must fit into one reply."""
        try:
            reply = self._ask(top, op="read_all", paths=paths)
        except PathError:
            for path in paths:  # the error of one names it
                self.read_bytes(f"{top}/{path}", 1)
            raise
        if [number for number, _ in reply.contents] != [*range(len(paths))]:
            raise SandboxError(_FORBIDDEN)
        return {paths[number]: _content(content) for number, content in reply.contents}

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """See `FileSource`."""
        found: list[str] = []
        while len(found) < len(paths):
            some = paths[len(found) : len(found) + _BATCH]
            marks = self._ask(top, op="checksums", paths=some).marks
            if not 0 < len(marks) <= len(some):
                raise SandboxError(_FORBIDDEN)
            found += marks
        return found

    def _put(self, top: str, states: Mapping[str, FileState], source: FileSource) -> None:
        """Copy what fits into one request, or one large file."""
        files = [path for path, state in states.items() if state.kind == "file"]
        small = [path for path in files if states[path].size <= _PART_BYTES]
        read = source.read_all(top, small) if small else {}
        for path in set(files) - set(small):
            self.write_bytes(f"{top}/{path}", source.read_bytes(f"{top}/{path}", states[path].size))
        put = [
            {
                "path": path,
                "target": state.mark if state.kind == "link" else None,
                "content": base64.b64encode(read[path]).decode() if path in read else None,
                "is_executable": state.is_executable,
            }
            for path, state in states.items()
        ]
        if put:
            self._ask(top, op="put", entries=put)

    def contents(
        self, path: str, is_wanted: Callable[[str], bool], *literals: bytes, max_bytes: int
    ) -> Iterator[tuple[str, bytes]]:
        """See `Files`. The server leaves out binary files and those without a literal."""
        wanted = [base64.b64encode(literal).decode() for literal in literals]
        paths = (e.path for e in self.walk(path) if e.kind == "file" and is_wanted(e.path))
        while batch := list(islice(paths, _BATCH)):
            while batch:
                reply = self._ask(
                    ".",
                    op="contents",
                    paths=batch,
                    wanted=wanted,
                    max_bytes=max_bytes,
                    max_total=_MAX_SEARCHED_BYTES,
                )
                for number, encoded in reply.contents:
                    if not 0 <= number < len(batch):
                        raise SandboxError(_FORBIDDEN)
                    content = batch[number]
                    large = encoded is None
                    yield (
                        content,
                        self.read_bytes(content, max_bytes) if large else _content(encoded),
                    )
                if not 0 < reply.seen <= len(batch):
                    raise SandboxError(_FORBIDDEN)
                batch = batch[reply.seen :]

    def _entries(self, op: str, path: str) -> Iterator[FileEntry]:
        return (entry for entry, _ in self._marked(op, path))

    def _marked(self, op: str, path: str, **more: Any) -> Iterator[tuple[FileEntry, str]]:
        after: str | None = None
        while True:
            reply = self._ask(path, op=op, after=after, **more)
            for (name, kind, size), mark in zip_longest(reply.entries, reply.marks):
                yield FileEntry(name, kind, max(size, 0)), mark
            if not reply.more or not reply.entries:
                return
            name, kind, _ = reply.entries[-1]
            last = name + "/" * (kind == "dir")
            if after is not None and last <= after:
                raise SandboxError(_FORBIDDEN)
            after = last

    def _ask(self, path: str, **request: Any) -> Reply:
        return self._wait(self.ask(path, **request))

    def _wait(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def ask(self, path: str, **request: Any) -> Reply:
        """Make one request about a path. Raises `PathError`, `SandboxError` and `HostError`."""
        check_path(path, str.encode)  # requests are JSON
        reply = await self._sandbox.ask_files({**request, "path": path})
        if reply.error is not None:
            raise self._error(reply.error, path)
        return reply

    def _error(self, number: int, path: str) -> Exception:
        """The error from inside, with the caller's path."""
        if number in HOST_ERRNOS and (failed := self._disk_failure()) is not None:
            return HostError(f"workspace: {describe(failed)}")
        if number == errno.ENOENT:
            return PathError(f"path {path!r} does not exist", is_missing=True)
        if number in (errno.ENOTDIR, errno.ELOOP, errno.EEXIST):
            return PathError(f"path {path!r} is not a directory, or passes through a file")
        if number == errno.EISDIR:
            return PathError(f"path {path!r} is a directory")
        if number == errno.EINVAL:
            return PathError(f"path {path!r} is not a regular file")
        return PathError(f"path {path!r}: {os.strerror(number)}")

    def _disk_failure(self) -> int | None:
        """What is wrong with the disk of this machine: an error inside need not be its error.

        A small file system inside may be full, and files of /proc fail as broken disks do.
        """
        try:
            with tempfile.TemporaryFile(dir=self.root) as file:
                file.write(bytes(_PROBE_BYTES))
        except OSError as error:
            return error.errno if error.errno in HOST_ERRNOS else None
        return None


def _state(entry: FileEntry, mark: str) -> FileState:
    changed_ns = "0"
    if entry.kind == "file":
        mark, _, changed_ns = mark.partition(" ")
    try:
        return FileState(entry.kind, entry.size_bytes, mark, int(changed_ns or 0))
    except ValueError as error:
        raise SandboxError(_FORBIDDEN) from error


def _content(encoded: bytes | None) -> bytes:
    try:
        return binascii.a2b_base64(encoded or b"", strict_mode=True)
    except ValueError as error:
        raise SandboxError(_FORBIDDEN) from error
