"""Limits a task's processes, memory and CPUs by control groups, if groups can be made.

A limit that cannot be set is left out: a sandbox works without a group, limited by other means as
far as they reach. Groups that a crash left are removed when the next process makes one.
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
_JOIN = """\
while [ "$1" != -- ]; do echo $$ 2>/dev/null >"$1/cgroup.procs"; shift; done; shift; exec "$@"
"""
_PERIOD_US = 100_000
"""The period of CPU quotas, unless a group sets another."""
_MIN_QUOTA_US = 1000
_MEMORY_SPARE = 64 << 20
"""Bytes for the server and the shell, so that a process reaches its own limit before the group."""


class Group:
    """The control group of one task: a directory in each hierarchy of groups that is used."""

    def __init__(self, paths: Sequence[Path], *, limits_memory: bool) -> None:
        self.paths = paths
        self.limits_memory = limits_memory
        self._counters = [
            counter for path in paths for counter in _open_counters(path, known=_file_names(path))
        ]

    def join(self, argv: Sequence[str]) -> list[str]:
        """Return a command that runs `argv` in the group."""
        return ["/bin/sh", "-c", _JOIN, "sh", *map(str, self.paths), "--", *argv]

    def open(self) -> list[int]:
        """Open the files by which a process enters the group; return their descriptors."""
        groups = []
        for path in self.paths:
            # The group may be gone: an older version of this program with another /proc may have
            # taken it for the group of a dead process.
            with contextlib.suppress(FileNotFoundError):
                groups.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
        return groups

    def refusals(self) -> int:
        """Count refused processes and memory in the group, by its own limit or an outer one."""
        return sum(counter.value() for counter in self._counters)

    def was_full(self) -> bool:
        """Whether the group has ever had as many processes as its limit allows."""
        for path in self.paths:
            if (limit := _read_number(path / "pids.max")) is None:
                continue
            peak = _read_number(path / "pids.peak")  # older systems have no such file
            now = _read_number(path / "pids.current") or 0
            return now >= 0.75 * limit if peak is None else peak >= limit
        return False

    def was_out_of_memory(self) -> bool:
        """Whether a process was killed because the group reached its own memory limit."""
        for path in self.paths:
            if not _read_value(path / "memory.events", "oom_kill"):
                if not _read_value(path / "memory.oom_control", "oom_kill"):
                    continue
                # Version 1 does not say whose limit it was: compare the peak with our own limit.
                limit = _read_number(path / "memory.max_usage_in_bytes") or 0
                return limit >= 0.95 * (_read_number(path / "memory.limit_in_bytes") or 0)
            # The memory limit of an outer group is counted in that group alone.
            return _read_value(path / "memory.events", "oom") > 0
        return False

    def stop_counting(self) -> None:
        """Close the files that count refusals."""
        while self._counters:
            self._counters.pop().close()

    async def close(self) -> None:
        """Kill all processes that are still in the group, and remove it."""
        self.stop_counting()
        left = list(self.paths)
        for _ in range(_REMOVAL_ATTEMPTS):
            for path in [*left]:
                try:
                    path.rmdir()
                except FileNotFoundError:
                    left.remove(path)
                except OSError:
                    _kill_all(path)
                else:
                    left.remove(path)
            if not left:
                return
            await asyncio.sleep(0.01)


def make_group(
    max_processes: int | None, memory_mb: int, cpus: float | None = None
) -> Group | None:
    """Return a new group with those limits that can be set; None if none can."""
    memory = (memory_mb << 20) + _MEMORY_SPARE
    quota = None if cpus is None else max(_MIN_QUOTA_US, round(cpus * _PERIOD_US))
    wanted = {
        # First, as a process stays in the last group that it enters, if they differ.
        "cpu": {} if quota is None else {"cpu.max": quota, "cpu.cfs_quota_us": quota},
        "pids": {} if max_processes is None else {"pids.max": max_processes},
        "memory": {"memory.max": memory, "memory.limit_in_bytes": memory},
    }
    name = f"{_PREFIX}-{_process_namespace()}-{os.getpid()}-{secrets.token_hex(4)}"
    made: list[Path] = []
    limits_memory = False
    for controller, limits in wanted.items():
        parent = _parent(controller)
        if not limits or parent is None:
            continue
        path = parent / name
        try:
            if path not in made:
                path.mkdir()
            limited = [_set_limit(path, file, limit) for file, limit in limits.items()]
            if controller == "memory":
                limits_memory = any(limited)
                _set_limit(path, "memory.swap.max", 0)
                _set_limit(path, "memory.memsw.limit_in_bytes", memory)
        except OSError:
            if path not in made:
                with contextlib.suppress(OSError):
                    path.rmdir()
            continue
        if path not in made:
            made.append(path)
    return Group(made, limits_memory=limits_memory) if made else None


def _set_limit(group: Path, file: str, limit: int) -> bool:
    """Set a limit; return False if this kind of group does not have it."""
    if file not in _file_names(group):
        return False
    fd = os.open(f"{group}/{file}", os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, str(limit).encode())
    finally:
        os.close(fd)
    return True


_known_files: dict[Path, frozenset[str]] = {}
"""The names of the files in a group, by the directory in which groups are made."""


def _file_names(group: Path) -> frozenset[str]:
    """Return the names of the files in a group: all groups in one directory have the same."""
    if (files := _known_files.get(group.parent)) is None:
        files = _known_files[group.parent] = frozenset(file.name for file in group.iterdir())
    return files


def can_limit_cpus() -> bool:
    """Whether groups on this machine can limit CPU time."""
    return _parent("cpu") is not None


def can_bound_memory() -> bool:
    """Whether groups on this machine can limit memory."""
    group = make_group(None, 1)
    if group is None:
        return False
    group.stop_counting()
    for path in group.paths:
        with contextlib.suppress(OSError):
            path.rmdir()
    return group.limits_memory


def refusals_here() -> int:
    """Count refused processes and memory in the groups of this process itself."""
    return sum(counter.value() for counter in _own_counters())


class _Counter:
    """A counter in a file of counters. The file stays open, as it is read around each call."""

    def __init__(self, fd: int, prefix: bytes) -> None:
        self._fd, self._prefix = fd, b"\n" + prefix
        self._content, self._count = b"", 0

    def value(self) -> int:
        try:
            content = os.pread(self._fd, 4096, 0)
        except OSError:  # the group is gone
            return 0
        if content != self._content:  # rare
            self._content = content
            _, prefix, count = (b"\n" + content).partition(self._prefix)
            self._count = int(count.split(b"\n", 1)[0]) if prefix else 0
        return self._count

    def close(self) -> None:
        os.close(self._fd)


def _open_counters(group: Path, known: frozenset[str] | None = None) -> list[_Counter]:
    """Open the counters of refusals in a group; `known`: the names of its files, None: ask."""
    counters = []
    for names, prefix in (
        # In the files without "local", newer systems also count the groups beneath.
        (("pids.events.local", "pids.events"), b"max "),
        (("memory.events.local", "memory.events", "memory.oom_control"), b"oom_kill "),
    ):
        for name in names if known is None else filter(known.__contains__, names):
            with contextlib.suppress(FileNotFoundError):
                fd = os.open(f"{group}/{name}", os.O_RDONLY | os.O_CLOEXEC)
                counters.append(_Counter(fd, prefix))
                break
    return counters


def _read_value(file: Path, name: str) -> int:
    """Return the number after `name` in a file of lines `name number`; 0 if there is none."""
    with contextlib.suppress(OSError, ValueError):
        for line in file.read_text().splitlines():
            if line.partition(" ")[0] == name:
                return int(line.partition(" ")[2])
    return 0


def _read_number(file: Path) -> int | None:
    """Return the first number in a file, as `cpu.max` has two; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text().partition(" ")[0])
    return None


@cache
def _parent(controller: str) -> Path | None:
    """Return the directory in which groups are made; end there what dead workers left."""
    for path in _candidates(controller):
        if os.access(path, os.W_OK):
            # Only groups of this PID namespace: elsewhere the same number is another process.
            for left in path.glob(f"{_PREFIX}-{_process_namespace()}-*-*"):
                owner = left.name.split("-")[2]
                if owner.isdigit() and not Path("/proc", owner).exists():
                    _kill_all(left)
                    with contextlib.suppress(OSError):
                        left.rmdir()
            return path
    return None


def _process_namespace() -> int:
    """Return the number of the PID namespace of this process; 0 if it is unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/self/ns/pid").stat().st_ino
    return 0


def _kill_all(group: Path) -> None:
    with contextlib.suppress(OSError):
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                # pid 0 is outside our PID namespace; kill(0) would signal our own group.
                if int(pid) > 0:
                    os.kill(int(pid), signal.SIGKILL)


def _memberships() -> Iterator[tuple[str, str]]:
    """Yield the controllers of each hierarchy and the group of this process in it.

    The controllers are "" for the hierarchy of version 2, which has them all.
    """
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, own = line.split(":", 2)
            yield controllers, own.strip("/")


def _candidates(controller: str) -> Iterator[Path]:
    """Yield directories in which groups may be made, the group of this process first.

    Stops at a group with a limit: a group beyond it would escape that limit.
    """
    for controllers, own in _memberships():
        if controller in controllers.split(","):
            at = _ROOT / controller / own
            # A container sees its own group as the root.
            yield at if at.is_dir() else _ROOT / controller
        elif not controllers:
            at = _ROOT / own
            for path in (at, *at.parents):
                control = path / "cgroup.subtree_control"
                if control.is_file() and controller in control.read_text().split():
                    yield path
                if _read_number(path / f"{controller}.max") is not None:
                    return


@cache
def _own_counters() -> tuple[_Counter, ...]:
    """Return the counters of refusals in the groups of this process."""
    groups = []
    for controllers, own in _memberships():
        for controller in ("pids", "memory"):
            if controller in controllers.split(","):
                at = _ROOT / controller / own
                groups.append(at if at.is_dir() else _ROOT / controller)
        if not controllers:
            at = _ROOT / own
            groups.append(at if at.is_dir() else _ROOT)
    return tuple(counter for path in dict.fromkeys(groups) for counter in _open_counters(path))
