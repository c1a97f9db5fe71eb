"""A bound on the number of a task's processes, by a control group, where one can be made.

Mostly that is as root, whom no other bound on processes holds. What cannot be done is left undone:
a group is an addition to a sandbox and never a reason for there to be none.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PREFIX = "trajectories"
_REMOVAL_ATTEMPTS = 100
_JOIN = 'echo $$ 2>/dev/null >"$1/cgroup.procs"; shift; exec "$@"'


class Group:
    """The control group of one task."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def joined(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in the group."""
        return ["/bin/sh", "-c", _JOIN, "sh", str(self._path), *argv]

    async def close(self) -> None:
        """Kill whatever is still in the group, and remove it."""
        for _ in range(_REMOVAL_ATTEMPTS):
            _kill_all(self._path)
            try:
                self._path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                await asyncio.sleep(0.01)


def make_group(max_processes: int) -> Group | None:
    """Return a new group that holds so many processes at most; None where there can be none."""
    parent = _parent()
    if parent is None:
        return None
    path = parent / f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir()
        (path / "pids.max").write_text(f"{max_processes}")
    except OSError:
        with contextlib.suppress(OSError):
            path.rmdir()
        return None
    return Group(path)


@cache
def _parent() -> Path | None:
    """The directory in which groups are made; what dead workers left there is ended."""
    for path in _candidates():
        if os.access(path, os.W_OK):
            for left in path.glob(f"{_PREFIX}-*-*"):
                owner = left.name.split("-")[1]
                if owner.isdigit() and not Path("/proc", owner).exists():
                    _kill_all(left)
                    with contextlib.suppress(OSError):
                        left.rmdir()
            return path
    return None


def _kill_all(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                # 0 stands for a process that cannot be seen from here, and means us to `kill`.
                if int(pid) > 0:
                    os.kill(int(pid), signal.SIGKILL)


def _candidates() -> Iterator[Path]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            if "pids" in controllers.split(","):
                yield _ROOT / "pids" / own.strip("/")
                yield _ROOT / "pids"
            elif not controllers:
                at = _ROOT / own.strip("/")
                for path in (at, *at.parents):
                    control = path / "cgroup.subtree_control"
                    if control.is_file() and "pids" in control.read_text().split():
                        yield path
