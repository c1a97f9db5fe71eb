"""What a run directory has and its mirror has not.

Found by sizes and times of files: nothing that writes to a run knows of its mirror. Read in this
order: first which journals there are and what is in them, then records and logs, then what those
name. A journal is removed once its records are durable, so a mirror without it has the records, and
money that a journal shows as spent is in the budget log, which is read later.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple
from zlib import crc32

from batch_trajectories.runs.mirror.parts import DIRECTORIES, Extent, Piece, is_name
from batch_trajectories.runs.store.files import listed

PROGRESS = "progress.json"
"""Changes every second, so it is sent only with other files."""

_DERIVED = (".idx", ".html")
_GROWING = (".jsonl", ".log")
"""Of files to which only whole lines are appended."""

_BLOCK = 1 << 20


class Unsent(NamedTuple):
    """What a part would bring."""

    pieces: list[Piece]
    gone: list[str]
    is_all: bool
    """Nothing is left for a further part."""


class _Seen(NamedTuple):
    """A file when it was looked at last."""

    inode: int
    mtime_ns: int
    size: int


class Tail:
    """Follows the files of a run directory."""

    def __init__(
        self, run_dir: Path, extents: dict[str, Extent], outside: Mapping[str, Path]
    ) -> None:
        """`extents` is what the mirror has; `outside` are files elsewhere, by name."""
        self._run_dir = run_dir
        self._outside = outside
        self.extents = extents
        self._seen: dict[str, _Seen] = {}

    def unsent(self, room: int) -> Unsent:
        """What the mirror has not, up to `room` bytes. Raises `OSError`."""
        pieces: list[Piece] = []
        there = set()
        left, is_all = room, True
        for name, path in self._files():
            there.add(name)
            if name == PROGRESS and not pieces:
                continue
            try:
                piece, is_whole = self._unsent_of(name, path, left)
            except FileNotFoundError:
                continue  # a journal whose last task has ended; the next look finds it gone
            is_all = is_all and is_whole
            if piece is not None:
                pieces.append(piece)
                left -= len(piece.content)
        gone = [name for name in self.extents if name not in there] if is_all else []
        return Unsent(pieces, gone, is_all)

    def sent(self, unsent: Unsent) -> None:
        """The mirror has it now."""
        self.extents.update({piece.name: piece.extent for piece in unsent.pieces})
        for name in unsent.gone:
            self.extents.pop(name)
            self._seen.pop(name, None)

    def _files(self) -> Iterator[tuple[str, Path]]:
        """The files that the mirror is to have; journals are listed before others are read."""
        yield from self._inside(DIRECTORIES[0])
        for path in listed(self._run_dir):
            is_ours = is_name(path.name) and path.suffix not in _DERIVED
            if is_ours and not path.is_dir() and path.name not in (PROGRESS, *self._outside):
                yield path.name, path
        for directory in DIRECTORIES[1:]:
            yield from self._inside(directory)
        yield from self._outside.items()
        yield PROGRESS, self._run_dir / PROGRESS

    def _inside(self, directory: str) -> Iterator[tuple[str, Path]]:
        for path in listed(self._run_dir / directory):
            if is_name(name := f"{directory}/{path.name}"):
                yield name, path

    def _unsent_of(self, name: str, path: Path, room: int) -> tuple[Piece | None, bool]:
        """A piece of a file, None if nothing is new; and whether it is all that is."""
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
                if not matches or _checksum_of(fd, extent.size) != extent.crc32:
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
    """Whether what the mirror has of a file is still its beginning, as far as can be seen."""
    if before is None or before.inode != now.inode:
        return False
    if is_growing:
        return now.size >= before.size >= extent.size
    return before == now  # larger than a part, and sent in several


def _checksum_of(fd: int, size: int) -> int:
    """The CRC-32 of the first bytes of a file."""
    checksum = place = 0
    while place < size:
        block = os.pread(fd, min(_BLOCK, size - place), place)
        if not block:
            return -1
        checksum = crc32(block, checksum)
        place += len(block)
    return checksum
