"""Users of an image: its /etc/passwd and /etc/group."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from toolsets.images.layers import read_inside
from toolsets.images.names import ImageError
from toolsets.images.store import UnpackedImage


class User(NamedTuple):
    """Who commands run as."""

    name: str
    uid: int
    gid: int
    home: str


def user_of(image: UnpackedImage, name: str | None) -> User:
    """The user that `name` means in an image, as `USER` in a Dockerfile; None: the image's own.

    Raises `ImageError` for a name that the image does not have.
    """
    return _user_in(image.rootfs, name or image.user or "0")


@lru_cache(1024)  # many conversations ask for the same
def _user_in(rootfs: Path, name: str) -> User:
    wanted, _, group = name.partition(":")
    known = _table(rootfs, "/etc/passwd", 6)
    entry = next((row for row in known if wanted in (row[0], row[2])), None)
    if entry is None and not wanted.isdecimal():
        raise ImageError(f"user {wanted!r} is not in /etc/passwd of the image")
    try:
        uid, gid = (int(wanted), 0) if entry is None else (int(entry[2]), int(entry[3]))
        if group:
            gid = int(group) if group.isdecimal() else _group(rootfs, group)
    except ValueError as error:
        raise ImageError(f"/etc/passwd of the image: {wanted!r} has no numbers") from error
    home = entry[5] if entry is not None and entry[5].startswith("/") else "/"
    return User(wanted if entry is None else entry[0], uid, gid, home)


def _group(rootfs: Path, name: str) -> int:
    for row in _table(rootfs, "/etc/group", 3):
        if row[0] == name:
            return int(row[2])
    raise ImageError(f"group {name!r} is not in /etc/group of the image")


def _table(rootfs: Path, path: str, columns: int) -> list[list[str]]:
    text = (read_inside(rootfs, path) or b"").decode("utf-8", "replace")
    rows = (line.split(":") for line in text.splitlines())
    return [row for row in rows if len(row) >= columns]
