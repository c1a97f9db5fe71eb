"""The files that a run directory has and its mirror lacks.

They are found by sizes and times, because no writer of a run knows of the mirror. The order of
reading is: first the list of journals and their content, then records and logs, then the files that
these name. A journal is removed once its records are durable, so a mirror without the journal has
the records. Money that a journal shows as spent is in the budget log, which is read later.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.records.files import DamagedLine, add_checksum, list_directory, read_object
from batch_trajectories.records.names import (
    BATCHES,
    INFLIGHT,
    LOCK_FILE,
    MIRROR_NOTE,
    QUARANTINE,
    RETAINED_WORKSPACES,
)

# What a part of a mirror holds: a line of JSON, then the bytes of its pieces.
#
# {"format", "fence", "holder", "is_end", "is_new", "at", "pieces", "gone", "crc32"}
#
# `fence` is the number of the start that wrote the part, 1 more than that of the start before it.
# `holder` names its process (see `mirror`). `is_end`: it has given the lease back. `is_new`:
# files of earlier parts do not count. A piece is {"name", "at", "size", "crc32"}: bytes of a file
# from `at`, and the CRC-32 of the file up to their end; one at 0 begins the file again. `gone`
# names files that were removed. Parts are applied in order; of each part, the pieces first.

FORMAT = 1

DIRECTORY = "parts"

DIRECTORIES = (INFLIGHT, BATCHES, RETAINED_WORKSPACES, QUARANTINE)
"""The directories of a run that are mirrored, the journals first."""

_NAME = re.compile(rf"(?:(?:{'|'.join(DIRECTORIES)})/)?\w[\w.-]*")


class Extent(NamedTuple):
    """The part of a file that the mirror has: its size and CRC-32."""

    size: int = 0
    crc32: int = 0


class Piece(NamedTuple):
    """A range of bytes of a file."""

    name: str
    at: int
    content: bytes
    crc32: int
    """The CRC-32 of the file from its beginning to the end of the piece."""

    @property
    def extent(self) -> Extent:
        """The part of the file that the mirror has after this piece."""
        return Extent(self.at + len(self.content), self.crc32)


class LogPart(NamedTuple):
    """A part of the log: one object in the bucket."""

    fence: int
    holder: Mapping[str, Any]
    at: float
    """The time of creation in epoch seconds, for people only: no decision depends on it."""
    pieces: Sequence[Piece] = ()
    gone: Sequence[str] = ()
    is_end: bool = False
    is_new: bool = False


def part_name(number: int) -> str:
    """Return the name of a part in its directory."""
    return f"{number:012}"


def pack_part(part: LogPart) -> bytes:
    """Return the content of a part's object."""
    header = part._asdict() | {
        "format": FORMAT,
        "pieces": [
            {"name": p.name, "at": p.at, "size": len(p.content), "crc32": p.crc32}
            for p in part.pieces
        ],
    }
    return add_checksum(orjson.dumps(header)) + b"".join(piece.content for piece in part.pieces)


RESTORE = (
    "restore it from a backup or an earlier version of the object, or continue the run in the "
    "directory where it is"
)
"""The next step if a part is damaged or missing."""


def unpack_part(content: bytes, where: str) -> LogPart:
    """Return the part in an object. Raises `RunDirError` if it is damaged or of a later version."""
    head, _, rest = content.partition(b"\n")
    try:
        header = read_object(head + b"\n")
    except DamagedLine as error:
        raise RunDirError(f"{where}: damaged: {error}; {RESTORE}") from None
    if header.pop("format", None) != FORMAT:
        raise RunDirError(f"{where}: written by another version of this program; use that one")
    pieces, offset = [], 0
    try:
        for piece in header.pop("pieces"):
            size = piece.pop("size")
            pieces.append(Piece(content=rest[offset : offset + size], **piece))
            offset += size
        part = LogPart(**{**header, "pieces": pieces})
    except (KeyError, TypeError):
        raise RunDirError(f"{where}: damaged: not the header of a part; {RESTORE}") from None
    if offset != len(rest):
        raise RunDirError(f"{where}: damaged: {len(rest):,} bytes instead of {offset:,}; {RESTORE}")
    for name in (*(piece.name for piece in pieces), *part.gone):
        if not is_name(name):
            raise RunDirError(f"{where}: {name!r} is no file of a run")
    return part


def is_name(name: str) -> bool:
    """Whether a file of a run with this name can be in a mirror."""
    return _NAME.fullmatch(name) is not None and name not in (LOCK_FILE, MIRROR_NOTE)


def extend_extents(extents: dict[str, Extent], part: LogPart, where: str) -> dict[str, Extent]:
    """Return how much of each file the mirror has with a part, and with `extents` before.

    Raises `RunDirError` if a piece does not follow, or was changed.
    """
    now = {} if part.is_new else extents
    for piece in part.pieces:
        before = now.get(piece.name, Extent()) if piece.at else Extent()
        if piece.at != before.size or crc32(piece.content, before.crc32) != piece.crc32:
            raise RunDirError(
                f"{where}: damaged: {piece.name} does not continue at {piece.at:,}; {RESTORE}"
            )
        now[piece.name] = piece.extent
    for name in part.gone:
        now.pop(name, None)
    return now


PROGRESS = "progress.json"
"""A file that changes every second, so it is sent only together with others."""

_DERIVED = (".idx", ".html")
_GROWING = (".jsonl", ".log")
"""The endings of files to which only whole lines are appended."""

_BLOCK = 1 << 20


class Unsent(NamedTuple):
    """The changes for the next part."""

    pieces: list[Piece]
    gone: list[str]
    is_all: bool
    """Whether no change is left for a further part."""


class _Seen(NamedTuple):
    """The state of a file when it was last looked at."""

    inode: int
    mtime_ns: int
    size: int


class Tail:
    """Follows the files of a run directory."""

    def __init__(
        self, run_dir: Path, extents: dict[str, Extent], outside: Mapping[str, Path]
    ) -> None:
        """`extents` is what the mirror has; `outside` are files of other directories, by name."""
        self._run_dir = run_dir
        self._outside = outside
        self.extents = extents
        self._seen: dict[str, _Seen] = {}

    def find_unsent(self, room: int) -> Unsent:
        """Return the changes that the mirror lacks, up to `room` bytes. Raises `OSError`."""
        pieces: list[Piece] = []
        there = set()
        left, is_all = room, True
        for name, path in self._files():
            there.add(name)
            if name == PROGRESS and not pieces:
                continue
            try:
                piece, is_whole = self._next_piece(name, path, left)
            except FileNotFoundError:
                continue  # a journal whose last task has ended; the next call finds it removed
            is_all = is_all and is_whole
            if piece is not None:
                pieces.append(piece)
                left -= len(piece.content)
        gone = [name for name in self.extents if name not in there] if is_all else []
        return Unsent(pieces, gone, is_all)

    def mark_sent(self, unsent: Unsent) -> None:
        """Note that the mirror has these changes now."""
        self.extents.update({piece.name: piece.extent for piece in unsent.pieces})
        for name in unsent.gone:
            self.extents.pop(name)
            self._seen.pop(name, None)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield the files for the mirror; the journals are listed before other files are read."""
        yield from self._files_in(DIRECTORIES[0])
        for path in list_directory(self._run_dir):
            is_ours = is_name(path.name) and path.suffix not in _DERIVED
            if is_ours and not path.is_dir() and path.name not in (PROGRESS, *self._outside):
                yield path.name, path
        for directory in DIRECTORIES[1:]:
            yield from self._files_in(directory)
        yield from self._outside.items()
        yield PROGRESS, self._run_dir / PROGRESS

    def _files_in(self, directory: str) -> Iterator[tuple[str, Path]]:
        for path in list_directory(self._run_dir / directory):
            if is_name(name := f"{directory}/{path.name}"):
                yield name, path

    def _next_piece(self, name: str, path: Path, room: int) -> tuple[Piece | None, bool]:
        """Return the next piece of a file, and whether no piece is left after it.

        The piece is None if the mirror has the whole file.
        """
        status = path.stat()
        seen = _Seen(status.st_ino, status.st_mtime_ns, status.st_size)
        before = self._seen.get(name)
        extent = self.extents.get(name)
        if not S_ISREG(status.st_mode) or (seen == before and extent and extent.size == seen.size):
            return None, True
        is_growing = path.suffix in _GROWING
        with path.open("rb") as file:
            fd = file.fileno()
            if extent is not None and not _continues(before, seen, extent, is_growing=is_growing):
                matches = seen.size >= extent.size if is_growing else seen.size == extent.size
                if not matches or _compute_checksum(fd, extent.size) != extent.crc32:
                    extent = None
            self._seen[name] = seen
            start = extent or Extent()
            end = min(seen.size, start.size + room)
            content = os.pread(fd, end - start.size, start.size)
            if is_growing and (newline := content.rfind(b"\n")) >= 0:
                content = content[: newline + 1]
            elif is_growing and end == seen.size:
                content = b""  # the rest of the line is still being written
        if extent is not None and not content:
            return None, end == seen.size
        piece = Piece(name, start.size, content, crc32(content, start.crc32))
        return piece, end == seen.size


def _continues(before: _Seen | None, now: _Seen, extent: Extent, *, is_growing: bool) -> bool:
    """Whether the part of a file that the mirror has is unchanged, as far as times tell."""
    if before is None or before.inode != now.inode:
        return False
    if is_growing:
        return now.size >= before.size >= extent.size
    return before == now  # larger than a part, and sent in several


def _compute_checksum(fd: int, size: int) -> int:
    """Return the CRC-32 of the first `size` bytes of a file; -1 if it is shorter."""
    checksum = place = 0
    while place < size:
        block = os.pread(fd, min(_BLOCK, size - place), place)
        if not block:
            return -1
        checksum = crc32(block, checksum)
        place += len(block)
    return checksum
