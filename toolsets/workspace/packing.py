"""Packs the files of a workspace into one file that is named by its content, and unpacks it.

Equal workspaces give the same file. It keeps names, contents, modes and links, and the marks of
removed files in a layer above an image
(https://docs.kernel.org/filesystems/overlayfs.html#whiteouts-and-opaque-directories), but not
owners, times, pipes, sockets and devices.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import stat
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from hashlib import file_digest
from pathlib import Path

from toolsets.workspace.workspace import OPAQUE, TEMPORARY

_OPAQUE_HEADER = f"SCHILY.xattr.{OPAQUE}"
"""The key of the opaque mark in a header of tar."""


class TooLarge(Exception):
    """A workspace has more bytes than the limit."""


def pack(root: Path, store: Path, *, max_bytes: int, without: Collection[str] = ()) -> str:
    """Pack the files below `root` into `store`; return the name of the new file.

    The name is the SHA-256 of its content. Files and directories at the top whose names are in
    `without` are left out. Raises `OSError`, and `TooLarge` if the files have more than `max_bytes`
    together. A file in `store` is complete and survives a power loss. It is written beside `root`
    first; the next start removes what a crash left there.
    """
    store.mkdir(mode=0o700, exist_ok=True)
    left = max_bytes
    with tempfile.NamedTemporaryFile(dir=root.parent, prefix=TEMPORARY, delete=False) as file:
        made = Path(file.name)
        try:
            # Nothing in the bytes depends on the time or place of packing.
            with (
                gzip.GzipFile("", "wb", compresslevel=1, fileobj=file, mtime=0) as zip,
                tarfile.open(fileobj=zip, mode="w|", format=tarfile.PAX_FORMAT) as tar,
            ):
                for path, status in _entries(root, without):
                    entry = _make_entry(path, os.fsdecode(path.relative_to(root)), status)
                    if entry is None:
                        continue
                    left -= entry.size
                    if left < 0:
                        raise TooLarge(f"its files have more than {max_bytes:,} bytes")
                    if entry.isreg():
                        with path.open("rb") as content:
                            tar.addfile(entry, content)
                    else:
                        tar.addfile(entry)
            file.flush()
            os.fsync(file.fileno())
            with made.open("rb") as packed:
                name = file_digest(packed, "sha256").hexdigest()
            made.replace(store / name)
        except BaseException:
            made.unlink(missing_ok=True)
            raise
    directory = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return name


def unpack(store: Path, name: str, root: Path) -> None:
    """Unpack a file of `pack` into the empty or absent directory `root`.

    Raises `OSError` and `tarfile.TarError`, also if the file was changed or would write elsewhere.
    """
    with (store / name).open("rb") as packed:
        if file_digest(packed, "sha256").hexdigest() != name:
            raise tarfile.ReadError(f"{store / name}: its content is not that of its name")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = root.resolve()
    modes: list[tuple[Path, int]] = []
    with tarfile.open(store / name, "r:gz") as tar:
        # Links may lead anywhere, as before; the paths that are written are checked below.
        tar.extraction_filter = lambda entry, path: entry
        for entry in tar:
            path = base / entry.name
            if ".." in path.parts or not _is_free(base, path):
                raise tarfile.ExtractError(f"{store / name}: {entry.name!r} is outside of it")
            if entry.ischr():
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
                continue
            tar.extract(entry, base, set_attrs=False)
            if (mark := entry.pax_headers.get(_OPAQUE_HEADER)) is not None:
                os.setxattr(path, OPAQUE, mark.encode())
            if not entry.issym():
                modes.append((path, entry.mode))
    for path, mode in reversed(modes):  # a directory may be read-only: its files come first
        path.chmod(mode)


def _is_free(base: Path, path: Path) -> bool:
    return path.parent.resolve().is_relative_to(base) and not os.path.lexists(path)


def _make_entry(path: Path, name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """Return the header of a file for the tar; None if the file is left out."""
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        with contextlib.suppress(OSError):  # usually there is no mark
            entry.pax_headers = {_OPAQUE_HEADER: os.getxattr(path, OPAQUE).decode()}
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif stat.S_ISREG(status.st_mode):
        entry.size = status.st_size
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(0, 0):
        entry.type = tarfile.CHRTYPE  # a whiteout: the layer removes this file of its image
    else:
        return None
    return entry


def _entries(root: Path, without: Collection[str] = ()) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield everything below `root`, sorted by name, each directory before its files."""
    with os.scandir(root) as found:
        entries = sorted(found, key=lambda entry: os.fsencode(entry.name))
    for entry in entries:
        if entry.name in without:
            continue
        path = Path(entry.path)
        status = entry.stat(follow_symlinks=False)
        yield path, status
        if stat.S_ISDIR(status.st_mode):
            yield from _entries(path)
