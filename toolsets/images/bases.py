"""Layers between an image and what conversations change: how many of them begin.

A base lies beside the layers of the conversations as `NAME.base`, complete or not at all. A
conversation that begins above one says so in a file beside its own layer, which a resume reads.
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

_MOST_UNUSED = 16
_SUFFIX, _BELOW = ".base", "below"
_VOLATILE = "work/incompat/volatile"
"""As `inside.namespaces` has it: where the kernel marks a mount that waits for no disk."""


def use_base(layer: Path, name: str) -> bool:
    """Let a conversation begin above a base; False where there is none of this name.

    `layer` is the conversation's directory, which must exist.
    """
    base = layer.with_name(f"{name}{_SUFFIX}")
    with _alone(layer.parent):
        if not base.exists():
            return False
        (layer / _BELOW).write_text(base.name)
        os.utime(base)
    return True


def base_of(layer: Path) -> str | None:
    """The name of the directory with the base of a conversation; None if it has none."""
    try:
        return (layer / _BELOW).read_text()
    except FileNotFoundError:
        return None


def keep_base(made: Path, name: str) -> None:
    """Make the layer in a directory a base, unless another process has just made that.

    Bases that no conversation uses go, but for those that were used last.
    """
    remove_work(made)
    _sync(made)
    with _alone(made.parent):
        base = made.with_name(f"{name}{_SUFFIX}")
        if not base.exists():
            made.rename(base)
    remove_tree(made)
    remove_bases(made.parent, left=_MOST_UNUSED)


def remove_work(layer: Path) -> None:
    """Remove what is the kernel's own beside a layer that is no longer mounted."""
    work = layer / "work"
    with suppress(OSError):  # anything else there is removed below
        (work / "work").chmod(0o700)
        mark = work / _VOLATILE
        (mark / "dirty").unlink()
        for directory in (mark, mark.parent, mark.parent.parent, work):
            directory.rmdir()
        return
    remove_tree(work)


def _sync(directory: Path) -> None:
    """Have the disk hold all that its file system has; raises `OSError`.

    An overlay is mounted so that nothing waits for this, and a base outlives a power loss.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(fd) < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(fd)


def remove_bases(layers: Path, left: int = 0) -> None:
    """Remove the bases that no conversation uses, but for those so many that were used last."""
    with _alone(layers):
        used = {path.read_text() for path in layers.glob(f"*/{_BELOW}")}
        unused = [path for path in layers.glob(f"*{_SUFFIX}") if path.name not in used]
        unused.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        gone = [layers / f"{TEMPORARY}{secrets.token_hex(8)}" for _ in unused[left:]]
        for path, new in zip(unused[left:], gone, strict=True):
            path.rename(new)
    for path in gone:
        remove_tree(path)


@contextmanager
def _alone(layers: Path) -> Iterator[None]:
    """Hold the lock of the directory of all layers."""
    fd = os.open(layers, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
