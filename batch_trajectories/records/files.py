"""Durable files: append whole lines, repair tails, replace whole files.

A killed process loses no line whose `append` returned. A power loss can take the lines appended
after the last `sync`. A failed write or sync never counts as done, and nothing more is written to
that file: the kernel may have dropped the pages that it failed to write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from operator import eq
from pathlib import Path
from shutil import copyfile
from typing import Any, BinaryIO
from zlib import crc32

import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import (
    EnvironmentStop,
    RunDirError,
    RunLocked,
    help_for_write,
)
from batch_trajectories.records.names import (
    BATCHES,
    BATCHES_FILE,
    BUDGET_FILE,
    CHECKS,
    CONTROL_FILE,
    DATASET_INDEX,
    EXPORTS,
    FAILURES_FILE,
    INFLIGHT,
    JUDGE_BUDGET_FILE,
    LABELS_FILE,
    LOCK_FILE,
    LOG_FILE,
    MANIFEST_FILE,
    MIRROR_NOTE,
    QUARANTINE,
    RECORDS_FILE,
    RECORDS_INDEX,
    RETAINED_WORKSPACES,
    RUN_FILE,
    SCORES_FILE,
    SHARED_NOTE,
    STATISTICS_FILE,
    SUMMARY_FILE,
    TEACHER_BUDGET_FILE,
    TEACHER_FILE,
    VERDICTS_FILE,
    WORKSPACES,
)

# JSON lines with a checksum as their last member, to detect damage.
#
# {"id":"p1", … ,"schema_version":2,"crc32":"5f3a9c01"}
#
# The checksum is the CRC-32 of all bytes before it. It detects every change within 32 adjacent
# bits, and all but one in four billion of the others. It does not protect against forgery. It
# costs a few percent of an export; SHA-256 would cost twice as much.
#
# Lines of earlier versions have no checksum and stay readable. A line that ends almost like a
# checksum counts as one whose checksum was damaged.

CHECKSUM_KEY = "crc32"
_MEMBER = b',"crc32":"'
"""The beginning of the member with the checksum."""
_CLOSE = b'"}\n'
_DIGITS = 8
_CHECKSUM_LENGTH = len(_MEMBER) + _DIGITS + len(_CLOSE)
_MIN_EQUAL_BYTES = len(_MEMBER) - 2
"""A line that has so many bytes of `_MEMBER` in place had a checksum, which was damaged."""
_BLANK = b" \t\r\n"
_CHANGED = "it was changed since it was written: its checksum does not match"


class DamagedLine(ValueError):
    """A line differs from what was written."""


def add_checksum(line: bytes) -> bytes:
    """Add a checksum to a JSON object, which must not be empty, and a newline."""
    body = line[:-1]
    return b'%b,"crc32":"%08x"}\n' % (body, crc32(body))


def strip_checksum(line: bytes) -> bytes:
    """Remove the checksum that `add_checksum` added. A line without one stays as it is."""
    end = _line_end(line) - _CHECKSUM_LENGTH
    return line[:end] + b"}\n" if line.startswith(_MEMBER, end) else line


def verify_checksum(line: bytes) -> bool:
    """Whether a line has a checksum. Raises `DamagedLine` if it does not match."""
    end = len(line) if line.endswith(_CLOSE) else _line_end(line)
    tail = end - _CHECKSUM_LENGTH
    has_checksum = line.startswith(_MEMBER, tail)
    if has_checksum:
        written = line[tail + len(_MEMBER) : end - len(_CLOSE)]
        if b"%08x" % crc32(memoryview(line)[:tail]) != written:
            raise DamagedLine(_CHANGED)
    elif _is_damaged_member(line[max(tail, 0) :]):
        raise DamagedLine(_CHANGED)
    return has_checksum


def _is_damaged_member(end: bytes) -> bool:
    """Whether the end of a line differs from the member of a checksum in only a few bytes."""
    equal_bytes: int = sum(map(eq, end, _MEMBER))
    return equal_bytes >= _MIN_EQUAL_BYTES


def read_object(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, without its checksum.

    Raises `DamagedLine` if the line is not as it was written.
    """
    has_checksum = verify_checksum(line)
    try:
        parsed = exact_json.loads(line)
    except exact_json.JSONDecodeError as error:
        raise DamagedLine(f"not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise DamagedLine("not a JSON object")
    if parsed.pop(CHECKSUM_KEY, None) is not None and not has_checksum:
        raise DamagedLine(_CHANGED)
    content: dict[str, Any] = parsed
    return content


def is_whole(line: bytes) -> bool:
    """Whether a line is a JSON object, and its checksum matches if it has one."""
    try:
        read_object(line)
    except DamagedLine:
        return False
    return True


def _line_end(line: bytes) -> int:
    """The length of a line with one newline and no other blanks at its end."""
    return len(line) if line.endswith(_CLOSE) else len(line.rstrip(_BLANK)) + 1


_BLOCK_BYTES = 1 << 16

_PLAIN_FILES = (
    RUN_FILE,
    RECORDS_FILE,
    RECORDS_INDEX,
    DATASET_INDEX,
    FAILURES_FILE,
    BATCHES_FILE,
    LOG_FILE,
    LOCK_FILE,
    SUMMARY_FILE,
    STATISTICS_FILE,
    VERDICTS_FILE,
    BUDGET_FILE,
    SCORES_FILE,
    JUDGE_BUDGET_FILE,
    TEACHER_FILE,
    TEACHER_BUDGET_FILE,
    LABELS_FILE,
    CONTROL_FILE,
    f"{EXPORTS}/{MANIFEST_FILE}",
    MIRROR_NOTE,
    SHARED_NOTE,
)

_WORKER_DIRECTORIES = (INFLIGHT, WORKSPACES)
_DIRECTORIES = (
    *_WORKER_DIRECTORIES,
    BATCHES,
    EXPORTS,
    f"{EXPORTS}/dataset",
    QUARANTINE,
    RETAINED_WORKSPACES,
    CHECKS,
)


def repair_command(place: str | Path) -> str:
    """The command that repairs a run, in backquotes; `place` is one of its files or lines."""
    return f"`verify {Path(place).parent} --repair`"


def has_batches(run_dir: Path) -> bool:
    """Whether a start of this run has used the Batch API; see `batch_api.batch_log`."""
    return (run_dir / BATCHES_FILE).exists()


class StorageError(EnvironmentStop):
    """The disk refused a write: it is full, over quota, failing or gone."""


def storage_error(path: Path, error: OSError) -> StorageError:
    """The error for a file or directory that cannot be written, with what to do next."""
    return StorageError(
        f"{path}: cannot write: {error.strerror or error}. Finished work is safe; "
        f"{help_for_write(error)}, then run the same command again to continue."
    )


def open_no_follow(path: Path, flags: int) -> int:
    """Open a file of a run for writing; return its descriptor.

    Raises `RunDirError` for a symbolic link: a run directory from elsewhere could have it write
    any file of this user.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise RunDirError(_link_refusal(path)) from None
        raise


def make_directory(path: Path, *, is_inside: bool = True, parents: bool = False) -> None:
    """Create a directory unless it is there; only its owner may write there.

    `is_inside`: it is part of a run, so a link in its place raises `RunDirError`.
    """
    for above in reversed(path.parents) if parents else ():
        above.mkdir(mode=0o755, exist_ok=True)
    if is_inside and path.is_symlink():
        raise RunDirError(_link_refusal(path))
    path.mkdir(mode=0o700, exist_ok=True)


def _link_refusal(path: Path) -> str:
    return (
        f"{path}: a symbolic link, which nothing is written through; put the file or directory "
        "itself there, or remove the link"
    )


class AppendFile:
    """A file that only grows, by whole lines. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            created = not path.exists()
            self._fd = open_no_follow(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                self.size = os.fstat(self._fd).st_size
                if created:
                    sync_directory(path.parent)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise storage_error(path, error) from error
        self._synced: int | None = None
        """Size of the file at the last sync; None before the first."""
        self._broken: StorageError | None = None

    def append(self, lines: bytes) -> None:
        """Append `lines` (ending in a newline); once this returns, they survive a process kill.

        Raises `StorageError`, after cutting off a partial write if possible.
        """
        if self._broken is not None:
            raise self._broken
        rest = memoryview(lines)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # else the next start repairs the tail
                os.ftruncate(self._fd, self.size)
            self._broken = storage_error(self.path, error)
            raise self._broken from error
        self.size += len(lines)

    def sync(self) -> None:
        """Make all appended lines survive a power loss. Raises `StorageError`."""
        if self._broken is not None:
            raise self._broken
        if (size := self.size) == self._synced:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self._broken = storage_error(self.path, error)
            raise self._broken from error
        self._synced = size  # what another thread has appended since needs another sync

    def check_exists(self) -> None:
        """Raise `StorageError` if the file was removed, replaced or cut: its content is lost.

        Writes to a file without a name succeed but keep nothing.
        """
        status = os.fstat(self._fd)
        if status.st_nlink == 0:
            what = "removed or replaced"
        elif status.st_size != self.size:
            what = f"cut or changed (it has {status.st_size:,} bytes instead of {self.size:,})"
        else:
            return
        raise StorageError(
            f"{self.path}: it was {what} while the run wrote to it. Its content is lost unless "
            "you put it back; then run the same command again to continue."
        )

    def was_removed(self) -> bool:
        """Whether the file was removed or replaced, so it no longer has a name."""
        return os.fstat(self._fd).st_nlink == 0

    def put_back(self) -> None:
        """Restore a removed file: its content can still be read from the open descriptor.

        Raises `StorageError`.
        """
        try:
            content = Path(f"/proc/self/fd/{self._fd}").read_bytes()
            replace_file(self.path, content)
            fd = open_no_follow(self.path, os.O_WRONLY | os.O_APPEND)
            os.dup2(fd, self._fd, inheritable=False)  # a thread may be syncing it
            os.close(fd)
        except OSError as error:
            raise storage_error(self.path, error) from error

    def close(self) -> None:
        """Close the file; appended lines stay."""
        os.close(self._fd)
        self._fd = -1  # a later write must not reach the next file with this number


def repair_tail(path: Path, quarantine: Path) -> int:
    """Set aside the bytes after the last newline of `path`; return how many were set aside.

    A line is appended in one write that ends with its newline, so a line without one was cut off
    by a crash before its content was used. If only the newline is missing, it is added and the
    line counts.
    """
    torn = read_tail(path)
    if not torn:
        return 0
    with os.fdopen(open_no_follow(path, os.O_RDWR), "r+b") as file:
        whole_bytes = file.seek(0, os.SEEK_END) - len(torn)
        if is_whole(torn):
            file.write(b"\n")
            torn = b""
        else:
            set_aside(quarantine, f"{path.name}.{whole_bytes}.torn", torn)
            file.truncate(whole_bytes)
        file.flush()
        os.fsync(file.fileno())
    return len(torn)


def read_tail(path: Path) -> bytes:
    """The bytes after the last newline of a file; empty if the file does not exist."""
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return b""
    with path.open("rb") as file:
        whole_bytes = _end_of_last_line(file.fileno(), size)
        return os.pread(file.fileno(), size - whole_bytes, whole_bytes)


def set_unreadable_aside(
    path: Path, quarantine: Path, is_readable: Callable[[bytes], bool]
) -> list[str]:
    """Set aside the unreadable lines of a file; return their names, as `failures.jsonl:7`."""
    set_aside_names = [f"{path.name}: its end"] if repair_tail(path, quarantine) else []
    readable = []
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return set_aside_names
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        if is_readable(line):
            readable.append(line + b"\n")
        else:
            set_aside(quarantine, f"{path.name}.line{number}", line + b"\n")
            set_aside_names.append(f"{path.name}:{number}")
    if b"".join(readable) != content:
        replace_file(path, b"".join(readable))
    return set_aside_names


def set_aside(quarantine: Path, name: str, content: bytes) -> Path:
    """Write unreadable bytes to a new file in the quarantine directory."""
    make_directory(quarantine)
    path = quarantine / name
    number = 1
    while path.exists():
        number += 1
        path = quarantine / f"{name}.{number}"
    replace_file(path, content)
    return path


def replace_file(path: Path, content: bytes) -> None:
    """Replace the file at `path`; a crash leaves the whole old file or the whole new one."""
    try:
        temporary = temporary_path(path)
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


def replace_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace the file at `path` by a value as indented JSON, as `replace_file` does."""
    replace_file(path, orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a derived JSON file; None if the file is missing or unreadable.

    Only a plain file is read: a pipe or a device in a run directory from elsewhere has no end.
    """
    try:
        if not path.is_file():
            return None
        value = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None
    return value if isinstance(value, dict) else None


def temporary_path(path: Path) -> Path:
    """The path of the temporary file that will replace `path`; one per process.

    After a crash, the next start removes such files.
    """
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def longest_temporary_path(path: Path) -> Path:
    """The longest name of a temporary file for `path`, or for a part of it, in any process."""
    return path.with_name(f".{path.name}.{'9' * 7}-{'9' * 9}.tmp")


def open_temporary(temporary: Path, path: Path) -> BinaryIO:
    """Open the replacement of `path`, with the same mode; if it is new, for its owner alone."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = 0o600
    descriptor = open_no_follow(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    file = os.fdopen(descriptor, "wb", buffering=1 << 20)
    os.fchmod(file.fileno(), stat.S_IMODE(mode))
    return file


def refuse_strange_files(run_dir: Path) -> None:
    """Raise `RunDirError` if a file of a run is not a plain file.

    Reading a pipe would never end; with a dangling link (a disk that is not mounted) the run
    would start over. Links are read, but nothing is written through them: see `open_no_follow`.
    """
    for name in _PLAIN_FILES:
        file = run_dir / name
        if os.path.lexists(file) and not file.is_file():
            what = "not a plain file" if file.exists() else "a dangling link"
            raise RunDirError(
                f"{file}: {what}; put the file of this run back, or remove it if there was none"
            )
    for name in ("", "exports", "exports/dataset"):
        for entry in _scan_directory(run_dir / name):
            if not (entry.is_file() or entry.is_dir()) and Path(entry.path).exists():
                raise RunDirError(f"{entry.path}: a pipe or device, which no run has; remove it")


def refuse_links(run_dir: Path) -> None:
    """Raise `RunDirError` if a file or directory of a run to be written to is a symbolic link."""
    names = (*_PLAIN_FILES, *_DIRECTORIES)
    worker_entries = (
        entry for name in _WORKER_DIRECTORIES for entry in list_directory(run_dir / name)
    )
    for path in (*(run_dir / name for name in names), *worker_entries):
        if path.is_symlink():
            raise RunDirError(_link_refusal(path))


def find_outward_link(run_dir: Path) -> Path | None:
    """A symbolic link in a run directory that leads out of it; None if there is none.

    The author of a run decides where its links lead on the machine of its receiver.
    """
    inside = (entry for name in ("", *_DIRECTORIES) for entry in _scan_directory(run_dir / name))
    for entry in inside:
        if entry.is_symlink() and not _resolves_into(entry.path, run_dir):
            return Path(entry.path)
    return None


def _scan_directory(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as scan:
            return list(scan)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _resolves_into(path: str, run_dir: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run_dir))


@contextlib.contextmanager
def lock_for_append(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, creating the file if needed; waits for other writers.

    Raises `OSError`, and `RunDirError` for a symbolic link.
    """
    while True:
        fd = open_no_follow(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                yield
                return
        finally:
            os.close(fd)


def append_line(path: Path, line: Mapping[str, Any]) -> int:
    """Append a JSON object with a checksum, durably; return the new size of the file.

    Raises `OSError`, `StorageError`, and `RunDirError` for a symbolic link.
    """
    with lock_for_append(path):
        repair_tail(path, path.parent / QUARANTINE)
        file = AppendFile(path)
        try:
            if not file.size:
                sync_directory(path.parent)
            file.append(add_checksum(orjson.dumps(line)))
            file.sync()
            return file.size
        finally:
            file.close()


@contextlib.contextmanager
def lock_directory(directory: Path, refusal: str) -> Iterator[None]:
    """Lock `directory`; raise `RunLocked(refusal)` if another process has locked it.

    The lock is on the directory itself, because files in it are replaced.
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


def training_path(run_dir: Path) -> Path:
    """The training file of a run: beside its directory."""
    return run_dir.parent / f"{run_dir.name}.jsonl"


def is_training_file(dataset: Path, run_dir: Path) -> bool:
    """Whether a dataset lies where the training file of a run is written."""
    training = training_path(run_dir)
    return dataset.exists() and training.exists() and training.samefile(dataset)


def link_file(file: Path, directory: Path) -> None:
    """Hard-link an immutable file into `directory`; copy it if links do not work."""
    try:
        (directory / file.name).hardlink_to(file)
    except FileExistsError:
        return
    except OSError:  # another file system, or one without links
        copyfile(file, directory / file.name)


def list_directory(directory: Path) -> list[Path]:
    """The entries of a directory, sorted; none if it does not exist."""
    return sorted(directory.iterdir()) if directory.is_dir() else []


def sync_directory(path: Path) -> None:
    """Make creations, renames and deletions in a directory survive a power loss."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _end_of_last_line(fd: int, size: int) -> int:
    """The offset after the last newline, 0 if there is none."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK_BYTES)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0
