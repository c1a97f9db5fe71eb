"""Durable files: whole lines appended, tails repaired, whole files replaced.

What a process kill can do: nothing to lines whose append returned. What a power loss can do:
drop lines appended after the last `sync`. A failed write or sync is never treated as done; the
file is then closed for good, because the kernel may have dropped the pages that it failed to
write.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from runs.errors import EnvironmentStop, RunDirError, RunLocked
from runs.store.checksum import is_whole

_BLOCK = 1 << 16

_PLAIN_FILES = (
    *("run.json", "records.jsonl", "records.idx", "dataset.idx", "failures.jsonl", "batches.jsonl"),
    *("run.log", "lock", "summary.json", "statistics.json", "verdicts.jsonl", "budget.jsonl"),
    "exports/manifest.json",
)


class StorageError(EnvironmentStop):
    """The disk refused a write: full, over quota, failing, or taken away."""


def storage_error(path: Path, error: OSError) -> StorageError:
    """What to say of a file or directory that the disk refused, and what to do next."""
    return StorageError(
        f"{path}: cannot write: {error.strerror or error}. What was finished before is safe; "
        "make room or mend the disk, then run the same command again to go on."
    )


class AppendFile:
    """A file that only grows, by whole lines. Not for use by several threads at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            created = not path.exists()
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self.size = os.fstat(self._fd).st_size
            if created:
                sync_directory(path.parent)
        except OSError as error:
            raise storage_error(path, error) from error
        self._broken: StorageError | None = None

    def append(self, lines: bytes) -> None:
        """Write `lines` (ending in a newline); once this returns a process kill keeps them.

        Raises `StorageError`; what was written of `lines` is then cut off again if possible.
        """
        if self._broken is not None:
            raise self._broken
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # the tail repair of the next start does it then
                os.ftruncate(self._fd, self.size)
            self._broken = storage_error(self.path, error)
            raise self._broken from error
        self.size += len(lines)

    def sync(self) -> None:
        """Make all appended lines survive a power loss. Raises `StorageError`."""
        if self._broken is not None:
            raise self._broken
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._broken = storage_error(self.path, error)
            raise self._broken from error

    def check_is_there(self) -> None:
        """Raise `StorageError` if the file was removed, replaced or cut: what it held is lost.

        A file that has no name any more takes everything and keeps nothing.
        """
        found = os.fstat(self._fd)
        if found.st_nlink == 0:
            what = "removed or replaced"
        elif found.st_size != self.size:
            what = f"cut or changed (it has {found.st_size:,} bytes instead of {self.size:,})"
        else:
            return
        msg = (
            f"{self.path}: it was {what} while the run wrote to it. What it held is lost unless "
            "you put it back; then run the same command again to go on."
        )
        raise StorageError(msg)

    def was_removed(self) -> bool:
        """Whether the file has no name any more, as after a removal or a replacement."""
        return os.fstat(self._fd).st_nlink == 0

    def put_back(self) -> None:
        """Write a file that was removed anew, whole: what is open can still be read.

        Raises `StorageError`.
        """
        try:
            content = Path(f"/proc/self/fd/{self._fd}").read_bytes()
            replace_file(self.path, content)
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.dup2(fd, self._fd, inheritable=False)  # a thread may be syncing it
            os.close(fd)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; appended lines stay."""
        os.close(self._fd)
        self._fd = -1  # a later write must not reach whatever gets this number next


def repair_tail(path: Path, quarantine: Path) -> int:
    """Set aside what follows the last newline of `path`; return how many bytes that was.

    A line is appended by one write that ends in its newline, so a line without one was cut off
    by a crash and nothing was done yet with what it says. Where nothing but the newline is
    missing, the line counts, and gets it.
    """
    torn = tail_of(path)
    if not torn:
        return 0
    with path.open("r+b") as file:
        keep = file.seek(0, os.SEEK_END) - len(torn)
        if is_whole(torn):
            file.write(b"\n")
            torn = b""
        else:
            set_aside(quarantine, f"{path.name}.{keep}.torn", torn)
            file.truncate(keep)
        file.flush()
        os.fsync(file.fileno())
    return len(torn)


def tail_of(path: Path) -> bytes:
    """What follows the last newline of a file; nothing where there is no such file."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return b""
    with path.open("rb") as file:
        keep = _end_of_last_line(file.fileno(), size)
        return os.pread(file.fileno(), size - keep, keep)


def keep_readable(path: Path, quarantine: Path, is_readable: Callable[[bytes], bool]) -> list[str]:
    """Set aside the lines of a file that are not readable; name them, as `failures.jsonl:7`."""
    named = [f"{path.name}: its end"] if repair_tail(path, quarantine) else []
    kept = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return named
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if is_readable(line):
            kept.append(line + b"\n")
        else:
            set_aside(quarantine, f"{path.name}.line{number}", line + b"\n")
            named.append(f"{path.name}:{number}")
    if b"".join(kept) != content:
        replace_file(path, b"".join(kept))
    return named


def set_aside(quarantine: Path, name: str, content: bytes) -> Path:
    """Keep unreadable bytes under a name of their own in the quarantine directory."""
    quarantine.mkdir(exist_ok=True)
    path = quarantine / name
    number = 1
    while path.exists():
        number += 1
        path = quarantine / f"{name}.{number}"
    replace_file(path, content)
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Put `content` at `path` so that a crash leaves the old file or the new one, whole."""
    try:
        temporary = temporary_for(path)
        try:
            with open_temporary(temporary, path) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise storage_error(path, error) from error


def temporary_for(path: Path) -> Path:
    """Where to write what is to take the place of `path`; one name per process.

    What a crash leaves of such files is removed by the next start.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def open_temporary(temporary: Path, path: Path) -> BinaryIO:
    """Open what will take the place of `path`: for its owner alone, or with the mode it has."""
    file = temporary.open("wb", buffering=1 << 20)
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0o600
    os.fchmod(file.fileno(), stat.S_IMODE(mode))
    return file


def refuse_strange_files(run_dir: Path) -> None:
    """Raise `RunDirError` if what must be a plain file of a run is something else.

    A pipe would be waited for without end; behind a link to nothing (a disk that is not mounted)
    a run would begin anew.
    """
    for name in _PLAIN_FILES:
        file = run_dir / name
        if os.path.lexists(file) and not file.is_file():
            what = "a link to nothing" if file.is_symlink() else "not a plain file"
            msg = (
                f"{file}: {what}; put the file of this run back in its place, or remove what "
                "stands there if there was none"
            )
            raise RunDirError(msg)


@contextlib.contextmanager
def alone_in(directory: Path, refusal: str) -> Iterator[None]:
    """Raise `RunLocked`, which says `refusal`, while another process is in here for `directory`.

    The directory is locked, not a file in it: files are replaced.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunLocked(refusal) from None
        yield
    finally:
        os.close(fd)


def training_file_of(run_dir: Path) -> Path:
    """Where the training file of the run in a directory lies: beside the directory."""
    return run_dir.parent / f"{run_dir.name}.jsonl"


def listed(directory: Path) -> list[Path]:
    """What is in a directory, sorted; nothing where there is none."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def sync_directory(path: Path) -> None:
    """Make creations, renames and deletions in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _end_of_last_line(fd: int, size: int) -> int:
    """The offset just after the last newline, 0 where there is none."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
