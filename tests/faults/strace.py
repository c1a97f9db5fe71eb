"""Faults in single system calls, by strace: what the N-th write, fsync, rename … of a process does.

Nothing in the program knows of it. First a run is recorded to learn which calls touch its
directory; then one run per call has that call fail, or is killed as it makes it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tests.helpers.running import PATIENCE_S, command, spawning

CALLS = (
    "openat",
    "write",
    "pwrite64",
    "ftruncate",
    "fsync",
    "fdatasync",
    "rename",
    "renameat",
    "unlink",
    "unlinkat",
    "mkdir",
)

Who = Literal["parent", "worker"]

# The first worker is traced by a process that is no parent of it; its helpers and later workers
# are as ever.
_WRAPPER = """#!/bin/sh
case "$*" in *spawn_main*)
    if mkdir {flag} 2>/dev/null; then exec strace -D {options} {python} "$@"; fi
esac
exec {python} "$@"
"""


class Point(NamedTuple):
    """One system call of a run: the `nth` of its name in a thread of a process."""

    who: Who
    call: str
    nth: int
    what: str
    """Its arguments, to be read by a person."""


def problem() -> str | None:
    """Why there can be no such faults here."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or "strace may not trace" if tried.returncode else None


def points(
    cwd: Path, who: Who, given: Mapping[str, object], args: Sequence[str] = ()
) -> list[Point]:
    """Run once in `cwd` and give the calls of `who` that touch what the run writes."""
    traced = run_traced(cwd, who, ["-y", "-o", str(cwd / "calls")], given, args)
    assert traced.returncode == 0, traced.stderr
    output = str(cwd / str(given.get("output_dir", "trajectories")))
    logs = sorted(cwd.glob("calls*"), key=lambda log: log.stat().st_size, reverse=True)
    collected: dict[tuple[str, int], Point] = {}
    for log in logs:
        seen: Counter[str] = Counter()
        for line in log.read_text().splitlines():
            if (matched := re.match(r"(\w+)\((.*)", line)) is None:
                continue
            call, rest = matched.groups()
            seen[call] += 1
            # The first files that a thread opens have the numbers of what its program imports.
            if (output in rest or '"trajectories' in rest) and (call != "openat" or log == logs[0]):
                point = Point(who, call, seen[call], rest[:100].replace(output, ""))
                collected.setdefault((call, seen[call]), point)
    return list(collected.values())


def run_with(
    cwd: Path, point: Point, fault: str, given: Mapping[str, object], args: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run with a fault at one call: `signal=KILL`, `error=ENOSPC` and so on."""
    inject = f"inject={point.call}:{fault}:when={point.nth}"
    return run_traced(cwd, point.who, ["-o", "/dev/null", "-e", inject], given, args)


def run_traced(
    cwd: Path,
    who: Who,
    options: Sequence[str],
    given: Mapping[str, object],
    args: Sequence[str] = (),
) -> subprocess.CompletedProcess[str]:
    """Run with strace around the main thread of the parent, or all threads of the first worker.

    `args` stand before the options that are `given`: another command than `run`, say.
    """
    line = command(*args, **given)
    options = [*options, "-e", "signal=none", "-e", f"trace={','.join(CALLS)}"]
    if who == "parent":
        line = ["strace", *options, *line]
    else:
        options = [*options, "-ff"]
        wrapper = cwd / "python-of-workers"
        flag = cwd / "traced"
        wrapper.write_text(
            _WRAPPER.format(flag=flag, options=" ".join(options), python=sys.executable)
        )
        wrapper.chmod(0o755)
        if flag.exists():
            flag.rmdir()
        python, option, code, *flags = spawning(line)
        code = f"import multiprocessing; multiprocessing.set_executable({str(wrapper)!r})\n{code}"
        line = [python, option, code, *flags]
    return subprocess.run(
        line, cwd=cwd, capture_output=True, text=True, timeout=PATIENCE_S, start_new_session=True
    )
