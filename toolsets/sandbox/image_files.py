"""The files of a conversation that works in an image, read and written by the server inside."""

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

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno
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

PART_BYTES = 512 << 10
_PROBE_BYTES = 64 << 10
_BATCH = 500
_MAX_SEARCHED_BYTES = 32 << 20
"""Maximum number of bytes that one request searches, so that others need not wait long."""
_INVALID_REPLY = "the sandbox said what it may not"

Answer = TypeVar("Answer")


class ImageSandbox(Sandbox):
    """A sandbox in an image. Changes of the image's files last until they are discarded."""

    lies_in_workspace = False
    image_digest: str
    """Digest of the image's configuration, which names its layers. Equal in all sandboxes."""
    memory_dir: str | None = None
    """A directory inside whose files are in memory and belong to this sandbox; None without one."""
    shares_bases = False
    """Whether conversations can begin above a common base; see `begin_from_base`."""
    user_home: str | None
    """HOME of the user that runs commands; None if only the engine knows it."""

    @property
    @abstractmethod
    def can_change_all(self) -> bool:
        """Whether commands may change every file of the image."""

    @abstractmethod
    def has_survived(self) -> bool:
        """Whether the changes by an earlier sandbox of this conversation still exist."""

    @property
    def is_made_at_once(self) -> bool:
        """Whether `make` has nothing to prepare."""
        return False

    @abstractmethod
    def make(self) -> None:
        """Prepare the storage of the changes, if that takes time; may be repeated."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the changes; the sandbox must have been stopped."""

    def begin_from_base(self, base: str) -> bool:
        """Begin above a base that `save_base` made; call it before the first command.

        Returns False if there is no such base.
        """
        del base
        return False

    def save_base(self, base: str) -> None:
        """Keep the changes under a name, as a base; the sandbox must have been stopped."""

    def layer_mark(self, path: str) -> str | None:
        """Return a text that changes with any file beneath a directory, except in `.git`.

        Returns None if only a comparison of all files can tell.
        """
        del path
        return None

    @property
    def origin(self) -> Hashable | None:
        """The identity of an unchanged workspace: workspaces with equal origins have equal files.

        None if the workspace was changed, cannot begin, or its origin is unknown.
        """
        return None

    @property
    def layers(self) -> Sequence[Path] | None:
        """The directories of this machine that are merged into the sandbox's files.

        The uppermost is first. None if they are unknown or there are none.
        """
        return None

    @abstractmethod
    async def ask_files(self, request: dict[str, Any]) -> Reply:
        """Make one request; see `toolsets.sandbox.inside.file_requests`."""

    @abstractmethod
    async def ask_command(self, request: dict[str, Any], *, timeout_s: float) -> Reply:
        """Run a command with files before and after it; see `ServedSandbox.ask_command`."""


class ImageSandboxes(ABC):
    """Makes the sandboxes of a run's conversations that work in images."""

    @abstractmethod
    def __init__(self, settings: SandboxSettings, run_dir: Path) -> None:
        """Store the settings of the run; look at nothing before a method is called."""

    @abstractmethod
    def problem(self) -> str | None:
        """Return None if images can be used here, else one sentence that says what to do."""

    async def fetch(self, reference: str) -> None:  # noqa: B027 - engines pull in `make`
        """Fetch an image from its registry if it is missing and these sandboxes can do that.

        Several callers may wait for the same image, which is fetched once. Raises `ImageError` with
        the reason, and `HostError`.
        """

    def problem_of_image(self, reference: str) -> str | None:
        """Return why there is no image of this name; None also if only a start can tell."""
        del reference
        return None

    @abstractmethod
    def digests(self, references: Collection[str]) -> dict[str, str]:
        """Return the digests of available images by reference; see `ImageSandbox.image_digest`.

        Raises `SandboxError`.
        """

    def warning(self) -> str | None:
        """Return why images are slow here; None if they are not."""
        return None

    def has_overlays(self) -> bool:
        """Try to mount an image below the changes of a conversation; return whether that works."""
        return False

    def trust_overlays(self) -> None:  # noqa: B027 - engines have their own storage
        """Do not try what another process has found here by `has_overlays`."""

    @abstractmethod
    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """Return the sandbox of one conversation; waits until its image is available.

        Raises `ImageError` if the image is missing, damaged or cannot be used; `HostError`; and
        `SandboxError`.
        """

    def remove_leftovers(self) -> int:
        """Remove containers that no conversation uses; return how many there were.

        Raises `SandboxError`.
        """
        return 0


class FileState(NamedTuple):
    """The state of a file, to see whether it was changed."""

    kind: str
    """The kind, as in `FileEntry`."""
    size: int
    mark: str
    """The target of a link; who may execute a file, and the time of its contents; `UNREADABLE` for
    a directory with unknown entries."""
    changed_ns: int = 0
    """The ctime of a file, which no command can set, in nanoseconds; else 0."""

    @property
    def is_executable(self) -> bool:
        """Whether a file may be run."""
        return not self.mark.startswith("-")

    @property
    def is_for_others_only(self) -> bool:
        """Whether others may run a file, but not its owner. git looks at the owner only."""
        return self.mark.startswith("o")

    @property
    def has_odd_target(self) -> bool:
        """Whether the file is a link whose target is not UTF-8."""
        return self.kind == "link" and UNNAMED in self.mark

    @property
    def is_unreadable(self) -> bool:
        """Whether the file is a directory with unknown entries."""
        return self.kind == "dir" and self.mark == UNREADABLE


class FileSource(Protocol):
    """A tree of files to copy from."""

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """Return the contents of small files beneath `top`. Raises `ToolError`."""

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """Return at most the first `max_bytes` of a file. Raises `ToolError`."""

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """Return the `checksum` of each file beneath `top`; "" for a file that cannot be read."""


class ImageFiles(FileSource):
    """The files in an image; see `Files`. A request waits until a running command has ended."""

    def __init__(self, kept: Workspace, sandbox: ImageSandbox) -> None:
        """`kept` stores the changes in the image. Call this in the sandbox's event loop."""
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
        """Do the same as `read_bytes` in the event loop."""
        pieces: list[bytes] = []
        offset = 0
        while offset < max_bytes:
            size = min(PART_BYTES, max_bytes - offset)
            reply = await self.ask(path, op="read", offset=offset, size=size)
            piece = _content(reply.contents[0][1]) if reply.contents else b""
            pieces.append(piece)
            offset += len(piece)
            if len(piece) < size:
                break
        return b"".join(pieces)

    def write_bytes(self, path: str, data: bytes) -> None:
        """See `Files`."""
        for start in range(0, len(data) or 1, PART_BYTES):
            self._ask(
                path,
                op="write",
                content=base64.b64encode(data[start : start + PART_BYTES]).decode(),
                is_first=start == 0,
                is_last=start + PART_BYTES >= len(data),
            )

    def listing(self, path: str = ".") -> list[FileEntry]:
        """See `Files`."""
        return list(self._entries("list", path))

    def walk(self, path: str = ".") -> Iterator[FileEntry]:
        """See `Files`."""
        return self._entries("walk", path)

    def tree(self, path: str, *, with_git: bool = False) -> dict[str, FileState]:
        """Return the files beneath a directory by path; those in `.git` only with `with_git`.

        Names are those of `exact_text`.
        """
        entries = self._marked_entries("tree", path, with_git=with_git)
        return {entry.path: _state(entry, mark) for entry, mark in entries}

    def copy_from(self, source: FileSource, top: str, states: Mapping[str, FileState]) -> None:
        """Copy files and links of `source` beneath `top`, with their permission to execute."""
        group: list[str] = []
        size = 0
        for path, state in states.items():
            if size + state.size > PART_BYTES or len(group) == _BATCH:
                self._copy_group(top, {path: states[path] for path in group}, source)
                group, size = [], 0
            group.append(path)
            size += state.size
        self._copy_group(top, {path: states[path] for path in group}, source)

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """See `FileSource`; the contents must fit into one reply."""
        try:
            reply = self._ask(top, op="read_all", paths=paths)
        except PathError:
            for path in paths:  # find the path with the error, and raise one that names it
                self.read_bytes(f"{top}/{path}", 1)
            raise
        if [number for number, _ in reply.contents] != [*range(len(paths))]:
            raise SandboxError(_INVALID_REPLY)
        return {paths[number]: _content(content) for number, content in reply.contents}

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """See `FileSource`."""
        found: list[str] = []
        while len(found) < len(paths):
            some = paths[len(found) : len(found) + _BATCH]
            marks = self._ask(top, op="checksums", paths=some).marks
            if not 0 < len(marks) <= len(some):
                raise SandboxError(_INVALID_REPLY)
            found += marks
        return found

    def _copy_group(self, top: str, states: Mapping[str, FileState], source: FileSource) -> None:
        """Copy as many small files as fit into one request, or one large file."""
        files = [path for path, state in states.items() if state.kind == "file"]
        small = [path for path in files if states[path].size <= PART_BYTES]
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
        """See `Files`. The server leaves out binary files and files without a literal."""
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
                        raise SandboxError(_INVALID_REPLY)
                    file_path = batch[number]
                    if encoded is None:  # too large for the reply
                        yield file_path, self.read_bytes(file_path, max_bytes)
                    else:
                        yield file_path, _content(encoded)
                if not 0 < reply.seen <= len(batch):
                    raise SandboxError(_INVALID_REPLY)
                batch = batch[reply.seen :]

    def _entries(self, op: str, path: str) -> Iterator[FileEntry]:
        return (entry for entry, _ in self._marked_entries(op, path))

    def _marked_entries(self, op: str, path: str, **more: Any) -> Iterator[tuple[FileEntry, str]]:
        after: str | None = None
        while True:
            reply = self._ask(path, op=op, after=after, **more)
            for (name, kind, size), mark in zip_longest(reply.entries, reply.marks):
                yield FileEntry(name, kind, max(size, 0)), mark
            if not reply.more or not reply.entries:
                return
            name, kind, _ = reply.entries[-1]
            last = f"{name}/" if kind == "dir" else name
            if after is not None and last <= after:
                raise SandboxError(_INVALID_REPLY)
            after = last

    def _ask(self, path: str, **request: Any) -> Reply:
        return self._wait(self.ask(path, **request))

    def _wait(self, answer: Coroutine[Any, Any, Answer]) -> Answer:
        return asyncio.run_coroutine_threadsafe(answer, self._loop).result()

    async def run_on_files(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        directory: str,
        entries: Sequence[Mapping[str, Any]],
        result: str,
        timeout_s: float,
    ) -> tuple[Reply, bytes]:
        """Write files into a directory, run a command, and read its result file, in one request.

        Returns the reply, and the file's content, cut at `PART_BYTES`; b"" if the command failed.
        Raises `PathError`, `SandboxError` and `HostError`.
        """
        put = {"path": directory, "entries": entries}
        read = {"path": result, "offset": 0, "size": PART_BYTES}
        request = {"argv": argv, "cwd": cwd, "env": env, "put": put, "read": read}
        reply = await self._sandbox.ask_command(request, timeout_s=timeout_s)
        if reply.error is not None:
            raise self._error(reply.error, directory if reply.exit_code is None else result)
        return reply, _content(reply.contents[0][1]) if reply.contents else b""

    async def ask(self, path: str, **request: Any) -> Reply:
        """Make one request about a path. Raises `PathError`, `SandboxError` and `HostError`."""
        check_path(path, str.encode)  # requests are JSON
        reply = await self._sandbox.ask_files({**request, "path": path})
        if reply.error is not None:
            raise self._error(reply.error, path)
        return reply

    def _error(self, number: int, path: str) -> Exception:
        """Return the exception for an error number from inside."""
        # A small file system inside may be full, and files in /proc fail as broken disks do.
        if number in HOST_ERRNOS and (failed := self._disk_failure()) is not None:
            return HostError(f"workspace: {describe_errno(failed)}")
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
        """Write a file to this machine's disk; return the error number, or None if it works."""
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
        raise SandboxError(_INVALID_REPLY) from error


def _content(encoded: bytes | None) -> bytes:
    try:
        return binascii.a2b_base64(encoded or b"", strict_mode=True)
    except ValueError as error:
        raise SandboxError(_INVALID_REPLY) from error
