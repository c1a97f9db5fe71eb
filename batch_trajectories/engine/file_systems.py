"""File systems of run directories: whether they keep locks, and which lie across a network."""

from __future__ import annotations

import errno
import fcntl
import os
import re
from pathlib import Path

_ACROSS_A_NETWORK = frozenset(
    {
        *("9p", "afs", "beegfs", "ceph", "cifs", "gfs2", "glusterfs", "gpfs", "lustre", "nfs"),
        *("nfs4", "ocfs2", "orangefs", "pvfs2", "smb3", "smbfs", "virtiofs"),
    }
)
"""Types in /proc/self/mountinfo. Those of FUSE begin with `fuse`."""

_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
"""Errors of flock on file systems without locks, such as Lustre mounted without `flock`."""

_OCTAL = re.compile(r"\\([0-7]{3})")


def explain_missing_locks(fd: int, path: Path) -> str | None:
    """The reason why the lock that `fd` has on the file `path` keeps nobody out; None if it does.

    Opens the file a second time, whose lock must be refused.
    """
    other = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    finally:
        os.close(other)
    return "it gives the same lock twice"


def describe_lock_error(error: OSError) -> str | None:
    """Describe an error of flock that means a file system without locks; None for another one."""
    if error.errno in _NO_LOCKS:
        return f"it refuses locks: {error.strerror}"
    return None


def find_network_type(path: Path, mounts: str | None = None) -> str | None:
    """The type of the file system of a path if it lies across a network or in user space.

    None if it is on this machine, or unknown. `mounts` is the content of /proc/self/mountinfo,
    which proc(5) describes; None reads it.
    """
    if mounts is None:
        try:
            mounts = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        except OSError:  # not on Linux
            return None
    place = path.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    place = place.resolve()
    kind, longest = "", -1
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda code: chr(int(code[1], 8)), fields.split(" ")[4]))
        # Of two mounts at one place, the later covers the earlier.
        if place.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = rest.split(" ")[0], len(point.parts)
    is_fuse = kind == "fuse" or kind.startswith("fuse.")
    return kind if kind in _ACROSS_A_NETWORK or is_fuse else None
