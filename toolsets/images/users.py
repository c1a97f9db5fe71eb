"""The users of an image: which numbers a name means, and where home is."""

from __future__ import annotations

from typing import NamedTuple

from toolsets.images.image_error import ImageError
from toolsets.images.store import UnpackedImage


class User(NamedTuple):
    """Who commands run as."""

    name: str
    uid: int
    gid: int
    home: str


def user_of(image: UnpackedImage, asked: str | None) -> User:
    """The user that `asked` means in an image, as `USER` in a Dockerfile; None: the image's own.

    Raises `ImageError` for a name that the image does not have.
    """
    wanted, _, group = (asked or image.user or "0").partition(":")
    known = _table(image, "/etc/passwd", 6)
    found = next((row for row in known if wanted in (row[0], row[2])), None)
    if found is None and not wanted.isdecimal():
        raise ImageError(f"user {wanted!r} is not in /etc/passwd of the image")
    try:
        uid, gid = (int(wanted), 0) if found is None else (int(found[2]), int(found[3]))
        if group:
            gid = int(group) if group.isdecimal() else _group(image, group)
    except ValueError as error:
        raise ImageError(f"/etc/passwd of the image: {wanted!r} has no numbers") from error
    home = found[5] if found is not None and found[5].startswith("/") else "/"
    return User(wanted if found is None else found[0], uid, gid, home)


def _group(image: UnpackedImage, name: str) -> int:
    for row in _table(image, "/etc/group", 3):
        if row[0] == name:
            return int(row[2])
    raise ImageError(f"group {name!r} is not in /etc/group of the image")


def _table(image: UnpackedImage, path: str, columns: int) -> list[list[str]]:
    text = (image.read(path) or b"").decode("utf-8", "replace")
    rows = (line.split(":") for line in text.splitlines())
    return [row for row in rows if len(row) >= columns]
