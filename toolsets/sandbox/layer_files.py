"""Reads the files of a workspace of stacked layers, an overlay, from outside of its sandbox.

Of the layers that have a path, the uppermost one counts
(https://docs.kernel.org/filesystems/overlayfs.html). Two workspaces above one image differ only in
their own layers, so a comparison does not walk the image. No command may run in them meanwhile.
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
"""The same limit as in `inside.file_requests`."""
_GIT = ".git"


class NotComparable(Exception):
    """The workspaces cannot be compared from outside, only through their sandboxes."""


class Differences(NamedTuple):
    """The files at the paths where two workspaces may differ, by path in the directory compared."""

    ended: dict[str, FileState]
    begun: dict[str, FileState]
    files: LayerFiles
    """The files of the first workspace."""
    before: LayerFiles
    """The files of the second workspace."""


class _Entry(NamedTuple):
    """A file or directory of a workspace."""

    state: FileState
    layers: tuple[str, ...]
    """The directories that are merged; for a file, its own path."""


def differences(ended: Sequence[Path], begun: Sequence[Path], top: str) -> Differences:
    """Compare a directory of two workspaces, each given by its layers, uppermost first.

    Leaves out the contents of directories called `.git`. Raises `NotComparable`, also if the
    sandbox itself could not read a file.
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
        """Add the differences in a directory, given by its layers on each side."""
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
            for side, states, files in (
                (ended, self.result.ended, self.result.files),
                (begun, self.result.begun, self.result.before),
            ):
                found = _find(side, name)
                if found is not None:
                    states[path] = found.state
                layers.append(found.layers if found and found.state.kind == "dir" else ())
                if found is not None and found.state.kind == "file":
                    files.paths[path] = found.layers[0]
            if name != _GIT and layers[0] != layers[1]:
                self.compare(layers[0], layers[1], f"{path}/")


class LayerFiles(FileSource):
    """Files of a workspace, by path in one of its directories."""

    def __init__(self, top: str) -> None:
        self._top = top
        self.paths: dict[str, str] = {}
        """The path of each file on this machine."""

    def read_all(self, top: str, paths: Sequence[str]) -> dict[str, bytes]:
        """See `FileSource`."""
        return {path: self.read_bytes(f"{top}/{path}", -1) for path in paths}

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """See `FileSource`."""
        try:
            with self._open(path.removeprefix(f"{self._top}/")) as file:
                return file.read(max_bytes)
        except OSError as error:
            raise SandboxError(f"{path}: {error.strerror}") from error

    def checksums(self, top: str, paths: Sequence[str]) -> list[str]:
        """See `FileSource`."""
        del top
        found = []
        for path in paths:
            try:
                with self._open(path) as file:
                    found.append(checksum(file))
            except OSError:
                found.append("")
        return found

    def _open(self, path: str) -> BinaryIO:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        return os.fdopen(os.open(self.paths[path], flags), "rb")


def _directory(layers: Sequence[Path], path: str) -> tuple[str, ...]:
    """Return the layers that are merged at a directory. Raises `NotComparable` and `OSError`."""
    at = tuple(map(str, layers))
    for name in filter(None, path.split("/")):
        found = _find(at, name)
        if found is None or found.state.kind != "dir":
            raise NotComparable(f"{path} is not a directory")
        at = found.layers
    return at


def _find(directories: Sequence[str], name: str) -> _Entry | None:
    """Return the file or directory of that name in merged directories; None without one."""
    first: FileState | None = None
    merged: list[str] = []
    for directory in directories:
        path = f"{directory}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue
        if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
            break  # a whiteout: the name was removed in this layer
        if not stat.S_ISDIR(status.st_mode):
            if first is None:
                return _Entry(_state(path, status), (path,))
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
    return None if first is None else _Entry(first, tuple(merged))


def _state(path: str, status: os.stat_result) -> FileState:
    """Return the state of a file as `inside.file_requests` does."""
    if stat.S_ISREG(status.st_mode):
        if not status.st_mode & 0o400:
            raise NotComparable(f"{path} cannot be read")
        return FileState("file", status.st_size, mark_of_file(status), status.st_ctime_ns)
    if stat.S_ISLNK(status.st_mode):
        return FileState("link", 0, exact_text(os.readlink(path)))  # noqa: PTH115
    return FileState("other", 0, "")
