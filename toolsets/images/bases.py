"""Layers between an image and conversations' changes: the common beginning of many of them.

A base lies beside the layers of the conversations as `NAME.base`, complete or not at all. A
conversation that begins above a base names it in a file beside its own layer, which a resume reads.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toolsets.workspace.removal import remove_tree
from toolsets.workspace.workspace import TEMPORARY

_MAX_UNUSED_BASES = 16
_SUFFIX, _BELOW = ".base", "below"
_VOLATILE = "work/incompat/volatile"
"""The mark of a mount that does not wait for the disk; the same path as in `inside.namespaces`."""


def use_base(layer: Path, name: str) -> bool:
    """Let a conversation begin above a base; return False if the base does not exist.

    `layer` is the conversation's directory, which must exist.
    """
    base = layer.with_name(f"{name}{_SUFFIX}")
    with _hold_lock(layer.parent):
        if not base.exists():
            return False
        (layer / _BELOW).write_text(base.name)
        os.utime(base)
    return True


def find_base(layer: Path) -> str | None:
    """Return the name of the directory with a conversation's base; None if it has none."""
    try:
        return (layer / _BELOW).read_text()
    except FileNotFoundError:
        return None


def keep_base(made: Path, name: str) -> None:
    """Make the layer in a directory a base, unless another process has made it meanwhile.

    Removes unused bases, except those that were used last.
    """
    remove_work(made)
    _sync_file_system(made)
    with _hold_lock(made.parent):
        base = made.with_name(f"{name}{_SUFFIX}")
        if not base.exists():
            made.rename(base)
    remove_tree(made)
    remove_bases(made.parent, left=_MAX_UNUSED_BASES)


def remove_work(layer: Path) -> None:
    """Remove the kernel's own directory beside a layer that is no longer mounted."""
    work = layer / "work"
    with suppress(OSError):  # anything else there is removed below
        (work / "work").chmod(0o700)
        mark = work / _VOLATILE
        (mark / "dirty").unlink()
        for directory in (mark, mark.parent, mark.parent.parent, work):
            directory.rmdir()
        return
    remove_tree(work)


def _sync_file_system(directory: Path) -> None:
    """Write all changes of a directory's file system to the disk; raises `OSError`."""
    # Overlays are mounted without syncs, but a base must outlive a power loss.
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(fd)


def remove_bases(layers: Path, left: int = 0) -> None:
    """Remove the bases that no conversation uses, except the `left` that were used last."""
    with _hold_lock(layers):
        used = {path.read_text() for path in layers.glob(f"*/{_BELOW}")}
        unused = [path for path in layers.glob(f"*{_SUFFIX}") if path.name not in used]
        unused.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        gone = [layers / f"{TEMPORARY}{secrets.token_hex(8)}" for _ in unused[left:]]
        for path, new in zip(unused[left:], gone, strict=True):
            path.rename(new)
    for path in gone:
        remove_tree(path)


@contextmanager
def _hold_lock(layers: Path) -> Iterator[None]:
    """Hold the lock of the directory of all layers."""
    fd = os.open(layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
