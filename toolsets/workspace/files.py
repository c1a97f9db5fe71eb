"""The interface to the files of a conversation, for file tools, rows and checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

from toolsets.workspace.workspace import FileEntry


class Files(Protocol):
    """Files in a directory of this machine (`Workspace`), or in an image (`ImageFiles`).

    Methods may block, so they are called in a thread. They raise `PathError` for paths that cannot
    be used, and `HostError`.
    """

    root: Path
    """The directory of this machine with the conversation's files, or its changes of an image."""
    start_dir: str
    """The working directory of new shells and interpreters, relative to the workspace."""

    @property
    def home(self) -> str:
        """The workspace's path for the model, if there is no sandbox."""

    def make(self) -> None:
        """Create `root` unless it exists."""

    def close(self) -> None:
        """Refuse all further access."""

    def remove(self) -> None:
        """Remove all files, or all changes of the image."""

    def read_bytes(self, path: str, max_bytes: int) -> bytes:
        """Return the first `max_bytes` of a regular file."""

    def write_bytes(self, path: str, data: bytes) -> None:
        """Write a regular file; others see the old or the new content, never a part."""

    def listing(self, path: str = ".") -> list[FileEntry]:
        """Return the entries of one directory, sorted by name."""

    def walk(self, path: str = ".") -> Iterator[FileEntry]:
        """Yield every entry beneath a directory, sorted by path, without following symlinks."""

    def contents(
        self, path: str, is_wanted: Callable[[str], bool], *literals: bytes, max_bytes: int
    ) -> Iterator[tuple[str, bytes]]:
        """Yield the wanted files beneath a directory with the first `max_bytes` of each.

        Files with none of the bytes `literals` may be left out.
        """


def is_named(path: str, pattern: str) -> bool:
    """Whether a path matches a pattern; a pattern without a slash is for the file name alone."""
    return fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern)
