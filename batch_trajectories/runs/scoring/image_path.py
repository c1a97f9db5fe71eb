"""A path inside a conversation's image, for reward functions: read through a sandbox."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, ClassVar

Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""Makes a request to the worker; see `runs.scoring.image_requests`."""


class ImagePath(PurePosixPath):
    """Reads like a `pathlib.Path`. The calls of a process are made one after the other."""

    ask: ClassVar[Ask]

    def read_bytes(self) -> bytes:
        """The content of a regular file. Raises `OSError`."""
        return base64.b64decode(self._asked("read")["content"])

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """The content of a text file. Raises `OSError` and `UnicodeDecodeError`."""
        return self.read_bytes().decode(encoding, errors)

    def is_file(self) -> bool:
        """Whether it is a regular file that the conversation's user can read."""
        with contextlib.suppress(OSError):
            self._asked("probe")
            return True
        return False

    def is_dir(self) -> bool:
        """Whether it is a directory that the conversation's user can read."""
        with contextlib.suppress(OSError):
            self._asked("listing")
            return True
        return False

    def exists(self) -> bool:
        """Whether it is one of both."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[ImagePath]:
        """What is in a directory, sorted by name. Raises `OSError`."""
        for name in self._asked("listing")["names"]:
            yield self / name.rpartition("/")[2]

    def rglob(self, pattern: str) -> Iterator[ImagePath]:
        """What is beneath a directory and matches a pattern without `**`. Raises `OSError`."""
        for name in self._asked("walk")["names"]:
            if (found := self / name).match(pattern):
                yield found

    def __fspath__(self) -> str:
        """Refused: `open` would look for the path on this machine."""
        raise TypeError(
            f"{self} is inside an image: use its read_text, read_bytes, iterdir or rglob"
        )

    def _asked(self, op: str) -> dict[str, Any]:
        reply = ImagePath.ask({"op": op, "path": str(self)})
        if "missing" in reply:
            raise FileNotFoundError(reply["missing"])
        if "error" in reply:
            raise OSError(reply["error"])
        return reply
