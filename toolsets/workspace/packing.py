"""Packs the files of a workspace into one file that is named by its content, and unpacks them.

Equal workspaces are one file. Names, contents, modes and links are kept, and what a layer above an
image marks as removed (https://docs.kernel.org/filesystems/overlayfs.html#whiteouts-and-opaque-\
directories); owners, times, pipes, sockets and devices are not.
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

_IN_HEADER = f"SCHILY.xattr.{OPAQUE}"
"""How tar writes an attribute of a file."""


class TooLarge(Exception):
    """A workspace has more bytes than are kept."""


def pack(root: Path, store: Path, *, max_bytes: int, without: Collection[str] = ()) -> str:
    """Pack the files below `root` into `store`; returns the name of the file there.

    Files and directories at its top are left out that have a name in `without`.

    The name is the SHA-256 of its content. Raises `TooLarge` where files have more than `max_bytes`
    in all, and `OSError`. A file in `store` is whole and survives a power loss; it is written
    beside `root`, where the next start removes what a crash leaves.
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
                    entry = _entry_of(path, os.fsdecode(path.relative_to(root)), status)
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

    Raises `OSError` and `tarfile.TarError`, also for a file that was changed or would write
    elsewhere.
    """
    with (store / name).open("rb") as packed:
        if file_digest(packed, "sha256").hexdigest() != name:
            raise tarfile.ReadError(f"{store / name}: its content is not that of its name")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    base = root.resolve()
    modes: list[tuple[Path, int]] = []
    with tarfile.open(store / name, "r:gz") as tar:
        # Links may lead anywhere, as they did; only what is written is checked, below.
        tar.extraction_filter = lambda entry, path: entry
        for entry in tar:
            path = base / entry.name
            if ".." in path.parts or not _is_new_in(base, path):
                raise tarfile.ExtractError(f"{store / name}: {entry.name!r} is outside of it")
            if entry.ischr():
                os.mknod(path, stat.S_IFCHR, os.makedev(0, 0))
                continue
            tar.extract(entry, base, set_attrs=False)
            if (mark := entry.pax_headers.get(_IN_HEADER)) is not None:
                os.setxattr(path, OPAQUE, mark.encode())
            if not entry.issym():
                modes.append((path, entry.mode))
    for path, mode in reversed(modes):  # a directory may be read-only: its files come first
        path.chmod(mode)


def _is_new_in(base: Path, path: Path) -> bool:
    return path.parent.resolve().is_relative_to(base) and not os.path.lexists(path)


def _entry_of(path: Path, name: str, status: os.stat_result) -> tarfile.TarInfo | None:
    """How a file is described in the tar; None where it is not kept."""
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(status.st_mode)
    if stat.S_ISDIR(status.st_mode):
        entry.type = tarfile.DIRTYPE
        with contextlib.suppress(OSError):  # most have none, and not all file systems have any
            entry.pax_headers = {_IN_HEADER: os.getxattr(path, OPAQUE).decode()}
    elif stat.S_ISLNK(status.st_mode):
        entry.type, entry.linkname = tarfile.SYMTYPE, str(path.readlink())
    elif stat.S_ISREG(status.st_mode):
        entry.size = status.st_size
    elif stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(0, 0):
        entry.type = tarfile.CHRTYPE  # a layer does not have this file of its image
    else:
        return None
    return entry


def _entries(root: Path, without: Collection[str] = ()) -> Iterator[tuple[Path, os.stat_result]]:
    """All below `root`, each directory before what is in it, by name."""
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
