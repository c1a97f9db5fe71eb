"""Layers and other blobs that were fetched, each once by its digest.

The processes of all runs share the directory. A download holds a lock on the file that it writes
to; others wait for it and use the result. A killed download continues where it was. A blob has its
name only when it is complete, checked and on the disk.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from batch_trajectories.basics.errors import HostError, describe_errno, machine_failure
from toolsets.images.names import DIGEST, ImageError

_POLL_S = 0.1
_SPARE_BYTES = 512 << 20
"""Bytes that a download leaves free on the disk."""
_PIECE_BYTES = 1 << 20


class BlobStore:
    """The blobs of a directory."""

    def __init__(
        self, root: Path, *, parallel: int, max_bytes: int | None, is_ahead: bool = False
    ) -> None:
        """`is_ahead`: downloads leave some of the `parallel` ones to what is needed at once."""
        self.root = root
        self._max_bytes = max_bytes
        slots = list(range(parallel))
        self._slots = slots[: max(1, parallel - parallel // 3)] if is_ahead else slots[::-1]
        self.fetched_bytes = 0
        """Bytes that this store has received."""

    def path(self, digest: str) -> Path:
        """The path of a complete blob."""
        return self.root / "sha256" / _hex(digest)

    def has(self, digest: str) -> bool:
        """Whether a blob is complete."""
        return self.path(digest).exists()

    def make(self) -> None:
        """Make the directories. Raises `OSError`."""
        for name in ("sha256", "partial", "slots"):
            (self.root / name).mkdir(mode=0o755, parents=True, exist_ok=True)

    def put(self, content: bytes) -> str:
        """Store a small blob; return its digest. Raises `OSError`."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if not self.has(digest):
            write_durably(self.path(digest), content)
        return digest

    async def fetch(
        self, digest: str, size: int, download: Callable[[PartialBlob], Awaitable[None]]
    ) -> None:
        """Have a blob here. `download` appends what is missing, in as many attempts as it needs.

        Raises `ImageError`, `HostError`, and what `download` raises.
        """
        if self.has(digest):
            return
        try:
            async with self._lock(digest, size) as fd:
                if fd is None:
                    return  # another process had it meanwhile
                async with self._slot():
                    partial = PartialBlob(self, fd, digest, size)
                    await asyncio.to_thread(partial.open)
                    try:
                        self._check_room(digest, size - partial.offset)
                    except ImageError:
                        self._partial(digest, size).unlink()  # or it would take its room for ever
                        raise
                    await download(partial)
                    await asyncio.to_thread(partial.finish)
                    self._partial(digest, size).replace(self.path(digest))
                    await asyncio.to_thread(_sync_directory, self.path(digest).parent)
        except OSError as error:
            if (message := machine_failure(error)) is not None:
                raise HostError(message) from error
            raise ImageError(f"{self.root}: {error}") from error

    def _partial(self, digest: str, size: int) -> Path:
        # The name says how much room the download will take.
        return self.root / "partial" / f"{_hex(digest)}-{size}"

    @asynccontextmanager
    async def _lock(self, digest: str, size: int) -> AsyncIterator[int | None]:
        """Hold the lock of a download; yield its file, None once the blob is complete."""
        path = self._partial(digest, size)
        while True:
            if self.has(digest):
                yield None
                return
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if _try_lock(fd) and _is_at(fd, path):
                    yield fd
                    return
            finally:
                os.close(fd)
            await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def _slot(self) -> AsyncIterator[None]:
        """Be one of the downloads that all processes together may do at a time."""
        while True:
            for number in self._slots:
                path = self.root / "slots" / str(number)
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
                try:
                    if _try_lock(fd):
                        yield
                        return
                finally:
                    os.close(fd)
            await asyncio.sleep(_POLL_S)

    def _check_room(self, digest: str, needed: int) -> None:
        """Raise `ImageError` or `HostError` if a download does not fit."""
        status = os.statvfs(self.root)
        if status.f_bavail * status.f_frsize < needed + _SPARE_BYTES:
            raise HostError(
                f"{self.root}: {needed:,} bytes of an image and a reserve of "
                f"{_SPARE_BYTES >> 20} MiB: {describe_errno(errno.ENOSPC)}"
            )
        if self._max_bytes is not None and (used := self.reserved_bytes()) > self._max_bytes:
            raise ImageError(
                f"layer {digest}: with it, {self.root} would have {used / 1e9:.3g} GB; max_gb of "
                f"--registry allows {self._max_bytes / 1e9:.3g} GB"
            )

    def reserved_bytes(self) -> int:
        """The size of all blobs, and of all that downloads have begun with."""
        total = 0
        with os.scandir(self.root / "sha256") as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    total += entry.stat().st_size
        with os.scandir(self.root / "partial") as entries:
            total += sum(int(entry.name.partition("-")[2] or 0) for entry in entries)
        return total


class PartialBlob:
    """A download that has begun. It receives bytes in order, and knows how many it has."""

    def __init__(self, store: BlobStore, fd: int, digest: str, size: int) -> None:
        self._store = store
        self._fd = fd
        self.digest = digest
        self.size = size
        self.offset = 0
        """Number of bytes that are there."""
        self._hash = hashlib.sha256()

    def open(self) -> None:
        """Read what an earlier download left. Raises `OSError`."""
        if os.fstat(self._fd).st_size > self.size:
            self.restart()
            return
        while piece := os.pread(self._fd, _PIECE_BYTES, self.offset):
            self._hash.update(piece)
            self.offset += len(piece)

    def restart(self) -> None:
        """Drop everything."""
        os.ftruncate(self._fd, 0)
        self.offset = 0
        self._hash = hashlib.sha256()

    def append(self, piece: bytes) -> None:
        """Write the next bytes. Raises `HostError`, `ImageError` for more than the size."""
        if self.offset + len(piece) > self.size:
            self.restart()
            raise ImageError(
                f"layer {self.digest}: the registry sends more than its {self.size} bytes"
            )
        try:
            view = memoryview(piece)
            while view:
                written = os.pwrite(self._fd, view, self.offset)
                self._hash.update(view[:written])
                self.offset += written
                self._store.fetched_bytes += written
                view = view[written:]
        except OSError as error:
            # Not as an error of the connection, which would be tried again.
            message = machine_failure(error) or str(error)
            raise HostError(f"{self._store.root}: {message}") from error

    @property
    def is_right(self) -> bool:
        """Whether all bytes are there and have the digest."""
        return self.offset == self.size and f"sha256:{self._hash.hexdigest()}" == self.digest

    def finish(self) -> None:
        """Wait until the bytes are on the disk. Raises `OSError`."""
        os.fchmod(self._fd, 0o644)
        os.fsync(self._fd)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that is complete or absent, even after a power loss. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _hex(digest: str) -> str:
    assert DIGEST.fullmatch(digest)
    return digest.removeprefix("sha256:")


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether a file still has its name: the download that had it may have ended."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.lstat())
    return False
