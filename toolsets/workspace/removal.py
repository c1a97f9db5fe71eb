"""Removes a directory tree, even if an agent's commands made it hard to remove."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 20
_MAX_PASSES = 1_000_000
"""More passes than any tree that commands make needs; a limit in case a process keeps adding
files."""


def remove_tree(root: Path) -> None:
    """Remove `root` and everything in it, at any depth, without following symlinks.

    Names need not be text, and directories may be read-only. Processes may still be adding files:
    after some attempts, raises the last `OSError`.
    """
    for attempt in range(_ATTEMPTS):
        try:
            parent = os.open(root.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            _remove_entry(parent, os.fsencode(root.name))
            return
        except FileNotFoundError:
            continue
        except OSError:
            if attempt == _ATTEMPTS - 1:
                raise
        finally:
            os.close(parent)


def _remove_entry(parent: int, name: bytes) -> None:
    try:
        mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        top = _open(parent, name)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(name, dir_fd=parent)
    else:
        os.unlink(name, dir_fd=parent)


def _empty(top: int) -> None:
    """Remove everything in an open directory.

    Moves nested directories up into `top`, so a tree of any depth takes three open directories and
    no recursion.
    """
    for _ in range(_MAX_PASSES):
        names = _names(top)
        if not names:
            return
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                if not _try_remove(top, name):
                    _move_up(top, name)


def _move_up(top: int, name: bytes) -> None:
    middle = _open(top, name)
    try:
        for inner in _names(middle):
            if not _try_remove(middle, inner):
                # Moving a directory changes its "..", which needs write permission for it.
                os.close(_open(middle, inner))
                fresh = b".lifted-" + secrets.token_hex(8).encode()
                os.rename(inner, fresh, src_dir_fd=middle, dst_dir_fd=top)
    finally:
        os.close(middle)
    os.rmdir(name, dir_fd=top)


def _try_remove(parent: int, name: bytes) -> bool:
    """Remove a file or an empty directory; return False if that is not possible yet."""
    try:
        os.unlink(name, dir_fd=parent)
    except (IsADirectoryError, PermissionError):
        try:
            os.rmdir(name, dir_fd=parent)
        except OSError:
            return False
    return True


def _open(parent: int, name: bytes) -> int:
    """Open a directory after making it fully accessible to its owner."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with contextlib.suppress(OSError):
            # Through the handle: the path may have become a symlink.
            Path(f"/proc/self/fd/{handle}").chmod(0o700)
    finally:
        os.close(handle)
    return os.open(name, _DIRECTORY, dir_fd=parent)


def _names(directory: int) -> list[bytes]:
    return [os.fsencode(name) for name in os.listdir(directory)]
