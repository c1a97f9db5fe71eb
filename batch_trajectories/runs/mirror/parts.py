"""What a part of a mirror holds: a line of JSON, then the bytes of its pieces.

    {"format", "fence", "holder", "is_end", "is_new", "at", "pieces", "gone", "crc32"}

`fence` is the number of the start that wrote the part, 1 more than that of the start before it.
`holder` names its process (see `mirror`). `is_end`: it has given the lease back. `is_new`: files of
earlier parts do not count. A piece is {"name", "at", "size", "crc32"}: bytes of a file from `at`,
and the CRC-32 of the file up to their end; one at 0 begins the file again. `gone` names files that
were removed. Parts are applied in order, of a part first the pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import orjson

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.runs.store.checksum import DamagedLine, read_object, with_checksum
from batch_trajectories.runs.store.files import MIRROR_NOTE

FORMAT = 1

DIRECTORY = "parts"

DIRECTORIES = ("inflight", "batches", "kept_workspaces", "quarantine")
"""The directories of a run that are mirrored, the journals first."""

_NAME = re.compile(rf"(?:(?:{'|'.join(DIRECTORIES)})/)?\w[\w.-]*")


class Extent(NamedTuple):
    """How much of a file the mirror has."""

    size: int = 0
    crc32: int = 0


class Piece(NamedTuple):
    """Bytes of a file, beginning at an offset."""

    name: str
    at: int
    content: bytes
    crc32: int
    """Of the file up to their end."""

    @property
    def extent(self) -> Extent:
        """How much of the file the mirror has then."""
        return Extent(self.at + len(self.content), self.crc32)


class LogPart(NamedTuple):
    """An object of the log."""

    fence: int
    holder: Mapping[str, Any]
    at: float
    """When it was made: epoch seconds by its writer's clock, on which nothing depends."""
    pieces: Sequence[Piece] = ()
    gone: Sequence[str] = ()
    is_end: bool = False
    is_new: bool = False


def name_of(number: int) -> str:
    """The name of a part in its directory."""
    return f"{number:012}"


def pack_part(part: LogPart) -> bytes:
    """The content of the object of a part."""
    header = part._asdict() | {
        "format": FORMAT,
        "pieces": [
            {"name": p.name, "at": p.at, "size": len(p.content), "crc32": p.crc32}
            for p in part.pieces
        ],
    }
    return with_checksum(orjson.dumps(header)) + b"".join(piece.content for piece in part.pieces)


def unpack_part(content: bytes, where: str) -> LogPart:
    """The part in an object. Raises `RunDirError` if it is damaged or of a later version."""
    head, _, rest = content.partition(b"\n")
    try:
        header = read_object(head + b"\n")
    except DamagedLine as error:
        raise RunDirError(f"{where}: damaged: {error}") from None
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
        raise RunDirError(f"{where}: damaged: not the header of a part") from None
    if offset != len(rest):
        raise RunDirError(f"{where}: damaged: {len(rest):,} bytes instead of {offset:,}")
    for name in (*(piece.name for piece in pieces), *part.gone):
        if not is_name(name):
            raise RunDirError(f"{where}: {name!r} is no file of a run")
    return part


def is_name(name: str) -> bool:
    """Whether a file of a run with this name can be in a mirror."""
    return _NAME.fullmatch(name) is not None and name not in ("lock", MIRROR_NOTE)


def extents_after(extents: dict[str, Extent], part: LogPart, where: str) -> dict[str, Extent]:
    """How much of each file the mirror has with a part, if it had `extents` before.

    Raises `RunDirError` where pieces do not follow, or were changed.
    """
    now = {} if part.is_new else extents
    for piece in part.pieces:
        before = now.get(piece.name, Extent()) if piece.at else Extent()
        if piece.at != before.size or crc32(piece.content, before.crc32) != piece.crc32:
            raise RunDirError(f"{where}: damaged: {piece.name} does not continue at {piece.at:,}")
        now[piece.name] = piece.extent
    for name in part.gone:
        now.pop(name, None)
    return now
