"""The files of a workspace that is stacked layers, read from outside of its sandbox.

Such a workspace is an overlay: of the layers that have a path, the uppermost one counts
(https://docs.kernel.org/filesystems/overlayfs.html). Two workspaces above one image differ only
where one of their own layers has something, so that comparing them takes no walk of the image.
Nothing may run in either.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.image_files import FileSource, FileState
from toolsets.sandbox.inside.file_requests import checksum, exact_text, mark_of_file
from toolsets.workspace.workspace import OPAQUE

_MAX_COMPARED = 20_000
_MAX_DEPTH = 255
"""As `inside.file_requests` has it."""
_GIT = ".git"


class NotComparable(Exception):
    """Only the sandboxes themselves can tell what these workspaces have."""


class Differences(NamedTuple):
    """What two workspaces have where they may differ, by the path in the directory compared."""

    ended: dict[str, FileState]
    begun: dict[str, FileState]
    files: LayerFiles
    """The files of the first one."""
    before: LayerFiles
    """The files of the second one."""


class _Found(NamedTuple):
    """What a workspace has at a path."""

    state: FileState
    layers: tuple[str, ...]
    """Of a directory, those that are merged; of a file, its own path."""


def differences(ended: Sequence[Path], begun: Sequence[Path], top: str) -> Differences:
    """Compare a directory of two workspaces, each given by its layers, the uppermost first.

    What is in directories called `.git` is left out. Raises `NotComparable`, also where the sandbox
    itself could not read something, which it then does not have.
    """
    try:
        sides = [_directory(layers, top) for layers in (ended, begun)]
        comparison = _Comparison(top)
        comparison.compare(sides[0], sides[1], "")
    except OSError as error:
        raise NotComparable(str(error)) from error
    return comparison.result


class _Comparison:
    def __init__(self, top: str) -> None:
        self.result = Differences({}, {}, LayerFiles(top), LayerFiles(top))
        self._left = _MAX_COMPARED

    def compare(self, ended: tuple[str, ...], begun: tuple[str, ...], before: str) -> None:
        """Add what differs in a directory, which has these layers on each side."""
        shared = 0
        while shared < min(len(ended), len(begun)) and ended[-1 - shared] == begun[-1 - shared]:
            shared += 1
        own = {*ended[: len(ended) - shared], *begun[: len(begun) - shared]}
        names = {entry.name for directory in own for entry in Path(directory).iterdir()}
        for name in sorted(names):
            self._left -= 1
            if self._left < 0 or before.count("/") >= _MAX_DEPTH:
                raise NotComparable("there are too many files")
            if exact_text(name) != name:
                raise NotComparable(f"{name!r} is not UTF-8")
            path = before + name
            layers = []
            for side, of_side, files in (
                (ended, self.result.ended, self.result.files),
                (begun, self.result.begun, self.result.before),
            ):
                found = _found(side, name)
                if found is not None:
                    of_side[path] = found.state
                layers.append(found.layers if found and found.state.kind == "dir" else ())
                if found is not None and found.state.kind == "file":
                    files.paths[path] = found.layers[0]
            if name != _GIT and layers[0] != layers[1]:
                self.compare(layers[0], layers[1], f"{path}/")


class LayerFiles(FileSource):
    """Files of a workspace by their paths in a directory of it."""

    def __init__(self, top: str) -> None:
        self._top = top
        self.paths: dict[str, str] = {}
        """Where each file is out here."""

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """See `FileSource`."""
        return {path: self.read_bytes(f"{top}/{path}", -1) for path in paths}

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """See `FileSource`."""
        try:
            with self._opened(path.removeprefix(f"{self._top}/")) as file:
                return file.read(max_bytes)
        except OSError as error:
            raise SandboxError(f"{path}: {error.strerror}") from error

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """See `FileSource`."""
        del top
        found = []
        for path in paths:
            try:
                with self._opened(path) as file:
                    found.append(checksum(file))
            except OSError:
                found.append("")
        return found

    def _opened(self, path: str) -> BinaryIO:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.fdopen(os.open(self.paths[path], flags), "rb")


def _directory(layers: Sequence[Path], path: str) -> tuple[str, ...]:
    """The layers that are merged at a directory. Raises `NotComparable`, and `OSError`."""
    at = tuple(map(str, layers))
    for name in filter(None, path.split("/")):
        found = _found(at, name)
        if found is None or found.state.kind != "dir":
            raise NotComparable(f"{path} is not a directory")
        at = found.layers
    return at


def _found(directories: Sequence[str], name: str) -> _Found | None:
    """What directories that are merged have under a name; None where that is nothing."""
    first: FileState | None = None
    merged: list[str] = []
    for directory in directories:
        path = f"{directory}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            break  # a mark: it was removed here
        if not stat.S_ISDIR(status.st_mode):
            if first is None:
                return _Found(_state(path, status), (path,))
            break
        if status.st_mode & 0o500 != 0o500:
            raise NotComparable(f"{name!r} cannot be read")
        first = first or FileState("dir", 0, "")
        merged.append(path)
        with suppress(OSError):
            opaque = os.getxattr(path, OPAQUE, follow_symlinks=False)
            if opaque != b"y":
                raise NotComparable(f"{name!r} is marked as {opaque!r}")
            break
    return None if first is None else _Found(first, tuple(merged))


def _state(path: str, status: os.stat_result) -> FileState:
    """As `inside.file_requests` says it of a file."""
    if stat.S_ISREG(status.st_mode):
        if not status.st_mode & 0o400:
            raise NotComparable(f"{path} cannot be read")
        return FileState("file", status.st_size, mark_of_file(status), status.st_ctime_ns)
    if stat.S_ISLNK(status.st_mode):
        return FileState("link", 0, exact_text(os.readlink(path)))  # noqa: PTH115
    return FileState("other", 0, "")
