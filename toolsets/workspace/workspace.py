"""The files of one task; no path leads outside their directory.

Every path is walked name by name from an open directory, and the kernel never follows a symlink:
the file that was checked is the file that is used, even while a command changes the tree. Files are
not synced: a workspace does not outlive its machine.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, ToolError, describe_errno
from toolsets.workspace.removal import remove_tree

_MAX_PATH_CHARS = 4096
_MAX_DEPTH = 255
_MAX_LINKS = 40
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Without O_NONBLOCK, opening a FIFO without a writer would block forever.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Kind = Literal["file", "dir", "link", "other"]

_BASELINE = "baseline"

TEMPORARY = ".tmp-"
"""Prefix of files that are being written, before they are moved into a workspace."""


class PathError(ToolError):
    """A path that cannot be used in the workspace."""

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        """`is_missing`: a path inside an image does not exist."""
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file or directory in the workspace."""

    path: str
    """The path relative to the workspace."""
    kind: Kind
    size_bytes: int


OPAQUE = "user.overlay.opaque"
"""The attribute of an overlay's directory that hides the directory below it."""

HOME = "/workspace"
"""The path of a workspace in sandboxes, unless an image has its own."""


class Workspace:
    """File access confined to `root`, which is created when first needed.

    Paths are relative, or absolute beneath `root` or one of `aliases`, the paths of the workspace
    in sandboxes. Symlinks are followed while they stay inside. Methods are thread-safe.
    """

    start_dir = "."
    """The working directory of new shells and interpreters, relative to the root."""

    def __init__(self, root: Path, aliases: tuple[str, ...] = (HOME,)) -> None:
        self.root = root.absolute()
        self.aliases = aliases
        self._closed = False

    @property
    def home(self) -> str:
        """The workspace's path for the model, if there is no sandbox."""
        return self.aliases[0] if self.aliases else str(self.root)

    def make(self) -> None:
        """Create the directory unless it exists; raises `PathError` once closed.

        Raises `HostError` if the directory above it has vanished.
        """
        if self._closed:
            raise PathError("the workspace is closed")
        try:
            self.root.mkdir(mode=0o700, exist_ok=True)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise HostError(
                f"{self.root.parent}: the directory of the workspaces has vanished"
            ) from error

    def baseline(self) -> int | None:
        """Return the size in bytes of an image's files at the start; None until it is known."""
        try:
            return int((self.root / _BASELINE).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def keep_baseline(self, size: int) -> None:
        """Store the size at the start in bytes, for sandboxes that continue."""
        (self.root / _BASELINE).write_text(str(size), encoding="ascii")

    def close(self) -> None:
        """Refuse all further access: a late thread must not create the directory again."""
        self._closed = True

    def remove(self) -> None:
        """Remove the directory and everything in it."""
        remove_tree(self.root)

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """Return the first `max_bytes` of a regular file.

        Files with several hard links are allowed: no link can lead out of a sandbox, and clones
        of repositories have links inside it.
        """
        with _Walk(self, path) as walk:
            descriptor = walk.open_file()
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            pieces = []
            while max_bytes > 0 and (piece := file.read(max_bytes)):
                pieces.append(piece)
                max_bytes -= len(piece)
        return b"".join(pieces)

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write `data` into a regular file, creating it and its parents as needed.

        If this process dies, the file has the old or the new content, never a part. It is not
        synced. The file is replaced, not changed: other hard links to it keep the old content.
        """
        with _Walk(self, path) as walk:
            name, mode = walk.to_writable()
            # Beside the workspace: what a crash leaves must not show up in it.
            temporary = self.root.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
            with _readable_errors(path):
                descriptor = os.open(temporary, _CREATE, mode)
            try:
                with _readable_errors(path):
                    with os.fdopen(descriptor, "wb") as file:
                        os.fchmod(file.fileno(), mode)
                        file.write(data)
                    os.rename(temporary, name, dst_dir_fd=walk.directory)
            except BaseException:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise

    def listing(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of one directory, sorted by name."""
        with _Walk(self, path) as walk:
            walk.to_directory()
            return _entries(walk.directory, walk.names)

    def walk(self, path: str = ".") -> Iterator[FileEntry]:
        """Yield every entry beneath a directory, sorted by path, without following symlinks.

        Directories that vanish, cannot be opened or are too deep yield nothing. The path of a file
        yields one entry.
        """
        with _Walk(self, path) as walk:
            last = walk.to_file_or_directory()
            if last is not None:
                yield last
                return
            pending = list(reversed(_entries(walk.directory, walk.names)))
        while pending:
            entry = pending.pop()
            yield entry
            if entry.kind == "dir":
                with contextlib.suppress(PathError), _Walk(self, entry.path) as walk:
                    walk.to_directory(follow=False)
                    pending.extend(reversed(_entries(walk.directory, walk.names)))

    def walk_files(self, path: str = ".") -> Iterator[str]:
        """Yield the paths of the regular files beneath a directory, sorted."""
        return (entry.path for entry in self.walk(path) if entry.kind == "file")

    def contents(
        self, path: str, is_wanted: Callable[[str], bool], *literals: bytes, max_bytes: int
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the wanted files beneath a directory with the first `max_bytes` of each.

        Ignores `literals`; see `Files`.
        """
        for entry in self.walk_files(path):
            if is_wanted(entry):
                # Skips a file that was removed or replaced since it was listed.
                with contextlib.suppress(PathError):
                    yield entry, self.read_bytes(entry, max_bytes)

    @cached_property
    def prefixes(self) -> tuple[list[str], ...]:
        """The absolute paths of the workspace, each as a list of names."""
        known = [*self.aliases, str(self.root), os.path.realpath(self.root)]
        # Longest first: the real root may be beneath a directory with the name of an alias.
        return tuple(sorted((_names(prefix) for prefix in known), key=len, reverse=True))


class _Walk:
    """Walks from the root to one file or directory, one name at a time.

    Only the current directory is open. For a step up it walks again from the root along real
    directories, so a directory that was moved outside leads nowhere.
    """

    def __init__(self, workspace: Workspace, path: str) -> None:
        check_path(path, os.fsencode)
        self.names: list[str] = []
        self.directory = -1
        self._workspace = workspace
        self._path = path
        self._links = 0
        self._pending = self._inside(path)

    def __enter__(self) -> _Walk:
        self._workspace.make()
        with _readable_errors(self._path):
            self.directory = os.open(self._workspace.root, _DIRECTORY)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self.directory)

    def to_directory(self, *, follow: bool = True) -> None:
        """Walk all the way to a directory."""
        while self._pending:
            self._step(self._pending.pop(), make=False, follow=follow)

    def open_file(self) -> int:
        """Walk all the way to a regular file; return its descriptor, open for reading."""
        while True:
            name = self._to_parent(make=False)
            try:
                descriptor = os.open(name, _READ, dir_fd=self.directory)
            except OSError as error:
                if error.errno == errno.ELOOP and self._follow(name):
                    continue
                # A socket gives ENXIO, a device without a driver ENODEV.
                if error.errno in (errno.ENXIO, errno.ENODEV):
                    raise self._not_regular() from None
                raise _readable(error, self._path) from error
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISREG(mode):
                return descriptor
            os.close(descriptor)
            raise self._not_regular(mode)

    def to_writable(self) -> tuple[str, int]:
        """Walk to the parent of a file to write, creating it; return the file's name and mode."""
        while True:
            name = self._to_parent(make=True)
            status = self._status(name)
            if status is None:
                return name, 0o644
            if stat.S_ISREG(status.st_mode):
                return name, stat.S_IMODE(status.st_mode) & 0o777
            if not self._follow(name):
                raise self._not_regular(status.st_mode)

    def to_file_or_directory(self) -> FileEntry | None:
        """Walk all the way; return the entry of a file, or None at a directory."""
        while self._pending:
            name = self._pending[0] if len(self._pending) == 1 else ""
            status = self._status(name) if name not in ("", "..") else None
            if status is not None and stat.S_ISREG(status.st_mode):
                return _entry("/".join([*self.names, name]), status)
            self._step(self._pending.pop(), make=False, follow=True)
        return None

    def _to_parent(self, *, make: bool) -> str:
        while len(self._pending) > 1 or self._pending == [".."]:
            self._step(self._pending.pop(), make=make, follow=True)
        if not self._pending:
            raise PathError(f"path {self._path!r} is a directory")
        return self._pending.pop()

    def _step(self, name: str, *, make: bool, follow: bool) -> None:
        if name == "..":
            self._step_up()
            return
        if len(self.names) >= _MAX_DEPTH:
            raise PathError(f"path {self._path!r} is too deep")
        if make:
            with contextlib.suppress(FileExistsError), _readable_errors(self._path):
                os.mkdir(name, dir_fd=self.directory)
        try:
            deeper = os.open(name, _DIRECTORY, dir_fd=self.directory)
        except OSError as error:
            # A symlink opened this way gives ENOTDIR or ELOOP, depending on the system.
            is_link = error.errno in (errno.ENOTDIR, errno.ELOOP)
            if is_link and follow and self._follow(name):
                return
            raise _readable(error, self._path) from error
        self._enter(deeper)
        self.names.append(name)

    def _step_up(self) -> None:
        if not self.names:
            raise self._outside()
        parents = self.names[:-1]
        self._to_root()
        for name in parents:
            self._step(name, make=False, follow=False)

    def _follow(self, name: str) -> bool:
        """Replace a symlink by the names of its target; False if `name` is not a symlink."""
        try:
            target = os.readlink(name, dir_fd=self.directory)
        except OSError:
            return False
        self._links += 1
        if self._links > _MAX_LINKS:
            raise PathError(f"path {self._path!r} passes through too many symlinks")
        self._pending.extend(self._inside(target))
        if target.startswith("/"):
            self._to_root()
        return True

    def _inside(self, path: str) -> list[str]:
        """Return the names to walk, last first; an absolute path must be below the root."""
        names = _names(path)
        if path.startswith("/"):
            for prefix in self._workspace.prefixes:
                if names[: len(prefix)] == prefix:
                    return names[len(prefix) :][::-1]
            raise self._outside()
        return names[::-1]

    def _to_root(self) -> None:
        with _readable_errors(self._path):
            self._enter(os.open(self._workspace.root, _DIRECTORY))
        self.names = []

    def _enter(self, directory: int) -> None:
        os.close(self.directory)
        self.directory = directory

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _readable(error, self._path) from error

    def _outside(self) -> PathError:
        return PathError(f"path {self._path!r} leads outside the workspace")

    def _not_regular(self, mode: int = 0) -> PathError:
        what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
        return PathError(f"path {self._path!r} is {what}")


def check_path(path: str, encode: Callable[[str], bytes]) -> None:
    """Raise `PathError` for a text that cannot be a path, or that `encode` refuses."""
    if "\0" in path:
        raise PathError("a path cannot contain a NUL character")
    if not path:
        raise PathError("the path is empty")
    if len(path) > _MAX_PATH_CHARS:
        raise PathError(f"the path is longer than {_MAX_PATH_CHARS} characters")
    try:
        encode(path)
    except UnicodeEncodeError:
        raise PathError(f"path {path!r} is not valid text") from None


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name not in ("", ".")]


def _entries(directory: int, names: list[str]) -> list[FileEntry]:
    """Return the entries of an open directory in the order of the paths beneath them."""
    entries = []
    with os.scandir(directory) as scan:
        for item in scan:
            # Skips an entry that vanished since it was listed.
            with contextlib.suppress(OSError):
                status = item.stat(follow_symlinks=False)
                entries.append(_entry("/".join([*names, item.name]), status))
    # "a.txt" sorts before "a/b": directories are compared with a slash at their end.
    return sorted(
        entries, key=lambda entry: f"{entry.path}/" if entry.kind == "dir" else entry.path
    )


def _entry(path: str, status: os.stat_result) -> FileEntry:
    if stat.S_ISREG(status.st_mode):
        return FileEntry(path, "file", status.st_size)
    if stat.S_ISDIR(status.st_mode):
        return FileEntry(path, "dir", 0)
    return FileEntry(path, "link" if stat.S_ISLNK(status.st_mode) else "other", 0)


@contextlib.contextmanager
def _readable_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        raise _readable(error, path) from error


def _readable(error: OSError, path: str) -> PathError:
    """Describe an error with the model's path, without paths of this machine."""
    if error.errno in HOST_ERRNOS:
        raise HostError(f"workspace: {describe_errno(error.errno)}") from error
    if error.errno == errno.ENOENT:
        return PathError(f"path {path!r} does not exist")
    if error.errno in (errno.ENOTDIR, errno.ELOOP):
        return PathError(f"path {path!r} is not a directory, or passes through a file")
    return PathError(f"path {path!r}: {os.strerror(error.errno or 0)}")
