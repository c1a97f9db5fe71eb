"""Unpacks the layers of an image as one directory tree that is safe on this machine.

No entry leads outside the tree: parents are resolved within it as a container would see them, and
the last name of a path is never followed. Set-user-id bits are dropped. Devices, pipes and sockets
are left out, with all their names. Holes of files take no disk. All files belong to this user.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import orjson

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno
from toolsets.images.names import ImageError
from toolsets.workspace.removal import remove_tree

TREE, STATE = "rootfs", "state.json"
MAX_BYTES = 64 << 30
"""Maximum size of an image's layers, uncompressed."""
_MAX_ENTRIES = 5_000_000
_MAX_HEADER_BYTES = 1 << 20
_MAX_LINKS = 40
_MAX_DEPTH = 200
_PIECE_BYTES = 1 << 20
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_HIDDEN, _OPAQUE, _INTERNAL = ".wh.", ".wh..wh..opq", ".wh..wh."
MAGIC_GZIP, MAGIC_ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class Unpacking:
    """A tree into which layers are unpacked, the lowest first. Nothing else may write there.

    A file is never changed after it was written, so trees can share files by hard links.
    """

    def __init__(self, root: Path, base: Path | None = None) -> None:
        """`base` is a directory with a tree that `keep` described; it is continued in `root`."""
        root.mkdir(mode=0o700)
        self._root = root
        self._modes: dict[str, int] = {"": 0o755}
        """Modes of directories. They are set at the end, as a read-only one could not be filled."""
        self._parents: dict[str, str] = {}
        self._left_out: set[str] = set()
        """Paths of devices, pipes and sockets: hard links to these are left out, too."""
        self._bytes = self._entries = 0
        if base is not None:
            state = orjson.loads((base / STATE).read_bytes())
            self._modes, self._left_out = state["modes"], set(state["left_out"])
            self._bytes, self._entries = state["bytes"], state["entries"]
            _link_tree(base / TREE, root)

    def keep(self, directory: Path) -> None:
        """Write the state of this tree into the directory that has it as `TREE`.

        Other trees can then continue it.
        """
        state = {
            "modes": self._modes,
            "left_out": sorted(self._left_out),
            "bytes": self._bytes,
            "entries": self._entries,
        }
        (directory / STATE).write_bytes(orjson.dumps(state))

    def add(self, layer: IO[bytes], diff_id: str) -> None:
        """Unpack a layer; raises `HostError`, and `ImageError` if its digest differs."""
        with _open_uncompressed(layer) as stream:
            counted = _HashedStream(stream, MAX_BYTES - self._bytes)
            try:
                with tarfile.open(fileobj=counted, mode="r|", tarinfo=_Member) as archive:
                    self._add_members(archive)
                # What follows the last member is part of the digest, too.
                while counted.read(_PIECE_BYTES):
                    pass
            except UnicodeError as error:
                raise ImageError(f"the layer {diff_id} has a name that is not text") from error
            except RecursionError as error:
                raise ImageError(f"the layer {diff_id} has too many headers in a row") from error
            except (tarfile.TarError, EOFError, zlib.error, ValueError, OverflowError) as error:
                raise ImageError(f"the layer {diff_id} is damaged: {error}") from error
            except OSError as error:
                if error.errno in HOST_ERRNOS:
                    raise HostError(f"an image: {describe_errno(error.errno)}") from error
                raise ImageError(f"the layer {diff_id} cannot be unpacked: {error}") from error
        self._bytes += counted.total
        if f"sha256:{counted.hash.hexdigest()}" != diff_id:
            raise ImageError(f"the layer {diff_id} is damaged: its digest differs")

    def finish(self) -> None:
        """Make the directories that a container needs, and set the modes of directories."""
        for name in ("dev", "proc", "sys", "tmp", "etc"):
            path = self._root / name
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                if name == "tmp" or name == "etc":
                    continue
                raise ImageError(f"/{name} of the image is not a directory")
            if not path.exists():
                path.mkdir()
                self._modes[name] = 0o1777 if name == "tmp" else 0o755
        for made, mode in sorted(self._modes.items(), reverse=True):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                directory = self._root / made
                if not directory.is_symlink():
                    directory.chmod(mode)

    def _add_members(self, archive: tarfile.TarFile) -> None:
        made: set[str] = set()
        while (member := archive.next()) is not None:
            archive.members.clear()  # type: ignore[attr-defined]  # saves memory
            self._entries += 1
            if self._entries > _MAX_ENTRIES:
                raise ImageError(f"the image has more than {_MAX_ENTRIES} entries")
            *parents, name = _names(member.name) or [""]
            if not name:
                if member.isdir():
                    self._modes[""] = _mode(member)
                continue
            parent = self._parent(parents, made)
            if name == _OPAQUE:
                self._hide_content(parent, made)
            elif name.startswith(_INTERNAL):
                continue
            elif name.startswith(_HIDDEN):
                hidden = name.removeprefix(_HIDDEN)
                if hidden in ("", ".", ".."):
                    raise ImageError(f"the layer has an entry {name!r}, which no layer may have")
                self._hide(_join(parent, hidden), made)
            else:
                self._add_member(archive, member, _join(parent, name), made)

    def _add_member(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, made: set[str]
    ) -> None:
        full = self._root / path
        if member.isdir():
            if full.is_symlink() or not full.is_dir():
                self._remove(path)
                full.mkdir(mode=0o700)
            self._modes[path] = _mode(member)
        elif member.isreg():
            self._remove(path)
            self._write(archive, member, full)
        elif member.issym():
            self._remove(path)
            full.symlink_to(member.linkname)
        elif member.islnk():
            *parents, name = _names(member.linkname) or [""]
            source = _join(self._parent(parents, None), name)
            if source == path:
                return
            if source in self._left_out:
                self._leave_out(path, made)
                return
            status = self._status(source) or 0
            if not name or not (stat.S_ISREG(status) or stat.S_ISLNK(status)):
                raise ImageError(f"{member.name!r} is a link to {member.linkname!r}, not a file")
            self._remove(path)
            os.link(self._root / source, full, follow_symlinks=False)
        else:
            self._leave_out(path, made)
            return
        self._left_out.discard(path)
        made.add(path)

    def _leave_out(self, path: str, made: set[str]) -> None:
        """Remove the file at the path of a device, a pipe or a socket of the image."""
        self._remove(path)
        self._left_out.add(path)
        made.add(path)

    def _write(self, archive: tarfile.TarFile, member: tarfile.TarInfo, full: Path) -> None:
        extracted: Any = archive.extractfile(member)
        content = extracted.raw  # without a buffer, which cannot seek in a stream
        with os.fdopen(os.open(full, _CREATE, 0o600), "wb", buffering=0) as file:
            for start, size in _content_parts(member):
                content.seek(start)
                file.seek(start)
                left = size
                while left and (piece := content.read(min(left, _PIECE_BYTES))):
                    left -= len(piece)
                    if piece.count(0) == len(piece):
                        file.seek(len(piece), os.SEEK_CUR)  # zeros compress well, and take no disk
                    else:
                        file.write(piece)
            file.truncate(member.size)
            os.fchmod(file.fileno(), _mode(member))
            with contextlib.suppress(OverflowError, ValueError):
                # Tools compare times; a time that the system cannot hold is left out.
                os.utime(file.fileno(), (member.mtime, member.mtime))

    def _parent(self, names: list[str], made: set[str] | None) -> str:
        """Return the real directory of a path; if `made` is given, make it and note it there."""
        path = "/".join(names)
        if (known := self._parents.get(path)) is None:
            known = self._resolve(names, make=made is not None)
            self._parents[path] = known
        while made is not None and known not in made:
            made.add(known)
            known = known.rpartition("/")[0]
        return self._parents[path]

    def _resolve(self, names: list[str], *, make: bool) -> str:
        path = resolve(self._root, names, on_missing=self._make if make else None)
        if len(path.split("/")) > _MAX_DEPTH:
            raise ImageError("the image has a directory that is too deep")
        return path

    def _make(self, path: str) -> None:
        (self._root / path).mkdir(mode=0o700)
        self._modes.setdefault(path, 0o755)

    def _status(self, path: str) -> int | None:
        try:
            return os.lstat(self._root / path).st_mode
        except FileNotFoundError:
            return None

    def _remove(self, path: str) -> None:
        """Remove the file or directory at `path`."""
        mode = self._status(path)
        if mode is None:
            return
        if stat.S_ISDIR(mode):
            remove_tree(self._root / path)
            self._parents.clear()
        else:
            (self._root / path).unlink()
            if stat.S_ISLNK(mode):
                self._parents.clear()

    def _hide(self, path: str, made: set[str]) -> None:
        """Remove the files of lower layers at `path`."""
        if path not in made:
            self._remove(path)
        elif stat.S_ISDIR(self._status(path) or 0):
            self._hide_content(path, made)

    def _hide_content(self, path: str, made: set[str]) -> None:
        for child in list((self._root / path).iterdir()):
            self._hide(_join(path, child.name), made)


def _link_tree(source: Path, target: Path) -> None:
    """Copy a tree of directories, with hard links to its files."""
    pending = [(str(source), str(target))]
    while pending:
        there, here = pending.pop()
        with os.scandir(there) as entries:
            for entry in entries:
                at = f"{here}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(at, 0o700)  # noqa: PTH102 - objects for every file of an image are slow
                    pending.append((entry.path, at))
                    continue
                try:
                    os.link(entry.path, at, follow_symlinks=False)
                except OSError as error:
                    if error.errno not in (errno.EMLINK, errno.EPERM, errno.ENOTSUP):
                        raise
                    shutil.copy2(entry.path, at, follow_symlinks=False)


def resolve(
    root: Path, names: list[str], *, on_missing: Callable[[str], object] | None = None
) -> str:
    """Return the real path beneath `root`, as a process confined to `root` would find it.

    `on_missing` is called with the path of each missing directory. None: the names after a missing
    one are kept as they are.
    """
    done: list[str] = []
    pending = names[::-1]
    links = 0
    while pending:
        name = pending.pop()
        if name == "..":
            done = done[:-1]
            continue
        path = "/".join([*done, name])
        try:
            mode = os.lstat(root / path).st_mode
        except FileNotFoundError:
            if on_missing is not None:
                on_missing(path)
            done.append(name)
            continue
        if stat.S_ISLNK(mode):
            links += 1
            if links > _MAX_LINKS:
                raise ImageError(f"/{'/'.join(names)} of the image passes through too many links")
            target = str((root / path).readlink())
            if target.startswith("/"):
                done = []
            pending += [part for part in target.split("/") if part not in ("", ".")][::-1]
        elif pending and not stat.S_ISDIR(mode):
            raise ImageError(f"/{path} of the image is not a directory")
        else:
            done.append(name)
    return "/".join(done)


def read_inside(root: Path, path: str) -> bytes | None:
    """Return the first MiB of a regular file of an unpacked image; None without one."""
    try:
        real = resolve(root, _names(path))
        fd = os.open(root / real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ImageError):
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read(1 << 20) if stat.S_ISREG(os.fstat(fd).st_mode) else None


def _names(path: str) -> list[str]:
    names = [name for name in path.split("/") if name not in ("", ".")]
    if ".." in names or "\0" in path:
        raise ImageError(f"the layer has the path {path[:200]!r}, which leads outside")
    return names


def _join(parent: str, name: str) -> str:
    return f"{parent}/{name}" if parent else name


def _mode(member: tarfile.TarInfo) -> int:
    """Return the mode without set-user-id and set-group-id bits."""
    return member.mode & (0o1777 if member.isdir() else 0o777)


class _Member(tarfile.TarInfo):
    """A header of a member with a limited size, because tarfile reads it into memory."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        if self.type in (b"x", b"g", b"X", b"L", b"K") and self.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("a header is too long")
        return super()._proc_member(archive)  # type: ignore[misc,no-any-return]

    def _proc_sparse(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Read the old form of a file with holes, whose list has blocks of its own."""
        with _limit_header_bytes(archive):
            return super()._proc_sparse(archive)  # type: ignore[misc,no-any-return]

    def _proc_gnusparse_10(
        self, member: tarfile.TarInfo, headers: Mapping[str, str], archive: tarfile.TarFile
    ) -> None:
        """Read the newest form of a file with holes, whose content begins with the list."""
        with _limit_header_bytes(archive):
            super()._proc_gnusparse_10(member, headers, archive)  # type: ignore[misc]


def _content_parts(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    """Return offset and size of each part of a file between its holes."""
    sparse = getattr(member, "sparse", None)
    if sparse is None:
        return [(0, member.size)]
    if member.size > MAX_BYTES:
        raise ImageError(
            f"the layer has the file {member.name[:200]!r} of {member.size} bytes; at most "
            f"{MAX_BYTES >> 30} GiB are unpacked"
        )
    end = 0
    for start, size in sparse:
        if start == size == 0:
            continue  # a header of the old form has four places, of which this one is not used
        if start < end or size < 0 or start + size > member.size:
            raise ImageError(f"the layer has a bad list of holes of {member.name[:200]!r}")
        end = start + size
    return [(start, size) for start, size in sparse if size]


@contextlib.contextmanager
def _limit_header_bytes(archive: tarfile.TarFile) -> Iterator[None]:
    """Limit the number of bytes that are read for a header, which is kept in memory."""
    stream: Any = archive.fileobj
    read, left = stream.read, _MAX_HEADER_BYTES

    def read_less(size: int) -> bytes:
        nonlocal left
        left -= size
        if left < 0:
            raise tarfile.ReadError("a header is too long")
        content: bytes = read(size)
        if len(content) < size:
            raise tarfile.ReadError("unexpected end of data")
        return content

    stream.read = read_less
    try:
        yield
    finally:
        del stream.read


class _HashedStream(io.RawIOBase):
    """A stream that is hashed and counted while it is read."""

    def __init__(self, stream: IO[bytes], max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self.hash = hashlib.sha256()
        self.total = 0

    def read(self, size: int = -1) -> bytes:
        piece = self._stream.read(min(size, _PIECE_BYTES) if size >= 0 else _PIECE_BYTES)
        self.total += len(piece)
        if self.total > self._max_bytes:
            raise ImageError(f"the layers are larger than {MAX_BYTES >> 30} GiB")
        self.hash.update(piece)
        return piece


@contextlib.contextmanager
def _open_uncompressed(layer: IO[bytes]) -> Iterator[IO[bytes]]:
    magic = layer.read(4)
    layer.seek(0)
    if magic.startswith(MAGIC_GZIP):
        with gzip.open(layer) as stream:
            yield stream  # type: ignore[misc]
    elif magic == MAGIC_ZSTD:
        import pyarrow as pa  # only here: it takes a while to import

        with pa.input_stream(layer, compression="zstd") as stream:
            yield stream
    else:
        yield layer
