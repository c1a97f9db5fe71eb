"""Memory that is shared counts as well, the first process is out of reach, and refusals are sorted:
what a task did to itself is a result, what the machine lacks is not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.running import PATIENCE_S, ROOT
from tests.toolsets.test_sandbox import BOTH, needs_bwrap, run, workspace
from toolsets.sandbox import served
from toolsets.sandbox.base import Limits, SandboxError
from toolsets.sandbox.cgroup import Group, can_bound_memory, can_limit_cpus, make_group
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

__all__ = ["workspace"]  # a fixture

LIMITS = Limits(timeout_s=20, memory_mb=200)

# Each would take 1.5 GB, in pieces that are within the limits of files, and then stays.
SHARED = """
import mmap, time
held = [mmap.mmap(-1, 100 << 20) for _ in range(15)]
for block in held:
    for at in range(0, len(block), 4096): block[at] = 1
print("got it"); time.sleep(10)
"""
MEMFD = """
import os, time
for _ in range(15):
    file = os.memfd_create("x")
    for _ in range(100): os.write(file, bytes(1 << 20))
print("got it"); time.sleep(10)
"""
MANY = """
import os, time
for _ in range(15):
    if os.fork() == 0:
        x = bytearray(b"1") * (100 << 20); time.sleep(10); os._exit(0)
time.sleep(1); print("got it"); time.sleep(10)
"""
TAKING = {"shared": SHARED, "memfd": MEMFD, "many processes": MANY}


@pytest.fixture(params=["a control group", "none"])
def bounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a control group where one can be made, and as where none can."""
    if request.param == "none":
        monkeypatch.setattr(served, "make_group", lambda *_: None)
    elif not can_bound_memory():
        pytest.skip("no control group for memory can be made here")


@BOTH
@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.usefixtures("bounded")
@pytest.mark.slow
def test_memory_is_limited_whichever_way_it_is_allocated(
    name: str, taking: str, workspace: Workspace
) -> None:
    async def greedy() -> str:
        sandbox = make_sandbox(name, workspace, LIMITS)
        try:
            with pytest.raises(SandboxError, match="used more memory than its limit of 200 MB"):
                await sandbox.run("python", TAKING[taking])
            return (await sandbox.run("shell", "echo again")).stdout
        finally:
            await sandbox.stop()

    assert asyncio.run(greedy()) == "again\n"


@BOTH
@pytest.mark.usefixtures("bounded")
def test_memory_within_the_limit_is_given(name: str, workspace: Workspace) -> None:
    """Also where processes share it: what they all see counts once."""
    code = """
import mmap, os, time
block = mmap.mmap(-1, 100 << 20)
for at in range(0, len(block), 4096): block[at] = 1
children = []
for _ in range(8):
    if (pid := os.fork()) == 0:
        sum(block[at] for at in range(0, len(block), 4096)); time.sleep(0.5); os._exit(0)
    children.append(pid)
print([os.waitpid(pid, 0)[1] for pid in children])
"""
    result = run(name, workspace, "python3", "-c", code, limits=LIMITS)
    assert result.stdout == f"{[0] * 8}\n"


ATTACKS = {
    "ptrace": "libc.ptrace(16, 1, 0, 0)",  # PTRACE_ATTACH
    "seize": "libc.ptrace(0x4206, 1, 0, 0)",
    "memory": "os.open('/proc/1/mem', os.O_RDWR)",
    "environment": "os.open('/proc/1/environ', os.O_RDONLY)",
    "descriptors": "os.readlink('/proc/1/fd/0')",
    "its errors": "os.open('/proc/1/fd/2', os.O_WRONLY)",
    "its socket": "os.open('/proc/1/fd/3', os.O_RDWR)",
    "pidfd_getfd": "[libc.syscall(438, os.pidfd_open(1), fd, 0) for fd in range(9)]",
    "process_vm_writev": "libc.process_vm_readv(1, ctypes.byref(iov), 1, ctypes.byref(far), 1, 0)",
}


@needs_bwrap
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_first_process_is_out_of_reach(attack: str, workspace: Workspace) -> None:
    code = f"""
import ctypes, os
class Iov(ctypes.Structure): _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
buffer = ctypes.create_string_buffer(8)
iov, far = Iov(ctypes.addressof(buffer), 8), Iov(0x400000, 8)
libc = ctypes.CDLL(None, use_errno=True)
try:
    got = {ATTACKS[attack]}
except OSError as error:
    print("refused", error.errno)
else:
    told = got if isinstance(got, list) else [got]
    print("refused" if all(one == -1 for one in told) else "open", ctypes.get_errno())
"""
    result = run("bwrap", workspace, "python3", "-c", code)
    # EPERM or EACCES, rather than a call that this system does not know.
    assert result.stdout in ("refused 1\n", "refused 13\n"), result


@needs_bwrap
def test_nothing_of_the_host_is_open_in_the_first_process(workspace: Workspace) -> None:
    """Seen from outside, where it can be inspected: it is not a file."""

    async def look() -> list[str]:
        sandbox = make_sandbox("bwrap", workspace, Limits())
        try:
            await sandbox.run("shell", "true")
            return [
                str(link.readlink())
                for pid in first_of_sandboxes(str(workspace.root))
                for link in Path(f"/proc/{pid}/fd").iterdir()
            ]
        finally:
            await sandbox.stop()

    if os.getuid() != 0:
        pytest.skip("only root can look into it")
    links = asyncio.run(look())
    assert links
    assert not [link for link in links if link.startswith("/") and link != "/dev/null"]


def first_of_sandboxes(workspace: str) -> Iterator[int]:
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            places = status.read_text().partition("\nNSpid:")[2].partition("\n")[0].split()
            mounts = (status.parent / "mountinfo").read_text()
        except OSError:
            continue
        if len(places) > 1 and places[-1] == "1" and workspace in mounts:
            yield int(status.parent.name)


@BOTH
def test_a_control_group_that_was_removed_is_done_without(
    name: str, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a process that has another /proc, and so takes its owner for dead."""
    made = []

    def removed(*limits: Any) -> Group | None:
        group = make_group(*limits)
        for path in group.paths if group is not None else ():
            path.rmdir()
            made.append(path)
        return group

    monkeypatch.setattr(served, "make_group", removed)
    assert run(name, workspace, "echo", "up").stdout == "up\n"
    if not made:
        pytest.skip("no control groups can be made here")


def test_only_groups_of_dead_processes_of_the_same_namespace_are_removed() -> None:
    """In another namespace, the process with that number may live."""
    if (made := make_group(None, 200)) is None:
        pytest.skip("no control groups can be made here")
    asyncio.run(made.close())
    parent = made.paths[0].parent
    prefix, namespace, *_ = made.paths[0].name.split("-")
    nobody = 10_000_000 + os.getpid()  # more than there can be
    of_the_dead = parent / f"{prefix}-{namespace}-{nobody}-0"
    of_another = parent / f"{prefix}-{int(namespace) + 1}-{nobody}-0"
    for path in (of_the_dead, of_another):
        path.mkdir()
    try:
        code = "from toolsets.sandbox.cgroup import can_bound_memory as can; assert can()"
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
        assert not of_the_dead.exists()
        assert of_another.exists()
    finally:
        for path in (of_the_dead, of_another):
            with contextlib.suppress(FileNotFoundError):
                path.rmdir()


# A run in a group of processes that is as full as the test says, or as a user with a limit.


WORK = """
import asyncio, os, sys
from pathlib import Path
from batch_trajectories.basics.errors import HostError
from toolsets.sandbox.base import Limits, SandboxError
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

name, root, group, limit, command, *more = sys.argv[1:]
async def main():
    sandbox = make_sandbox(name, Workspace(Path(root)), Limits(timeout_s=20, processes=100))
    try:
        await sandbox.run("shell", "true")
        Path(group, "pids.max").write_text(limit)
        try:
            print("result", (await sandbox.run("shell", command)).stdout)
        except (HostError, SandboxError) as error:
            print(type(error).__name__, error)
    finally:
        Path(group, "pids.max").write_text("max")
        await sandbox.stop()
Path(group, "cgroup.procs").write_text(str(os.getpid()))
if more: # as where no groups can be made for tasks
    from toolsets.sandbox import served
    served.make_group = lambda *_: None
asyncio.run(main())
"""


@BOTH
@pytest.mark.parametrize(
    "grouped",
    [
        pytest.param(True, id="own group"),
        pytest.param(False, id="no group", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_running_out_of_processes_is_a_failure_of_the_machine(
    name: str, grouped: bool, crowded: Path, tmp_path: Path
) -> None:
    """The command itself runs, in the shell that is there, and prints that it gets no process."""
    command = "for n in 1 2 3; do sleep 5 & done 2>/dev/null; ls; echo went on"
    argv = [name, str(tmp_path / "ws"), str(crowded), "2", command, *([] if grouped else ["x"])]
    assert work(argv).startswith("HostError processes or memory were refused")


@pytest.mark.slow
@BOTH
def test_reaching_the_task_s_own_process_limit_is_a_result(
    name: str, crowded: Path, tmp_path: Path
) -> None:
    command = "i=0; while [ $i -lt 150 ]; do sleep 5 & i=$((i+1)); done 2>/dev/null; echo went on"
    done = work([name, str(tmp_path / "ws"), str(crowded), "1000", command])
    assert done.startswith(("result", "SandboxError the sandbox ran too many processes"))


def work(argv: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WORK, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    return done.stdout or done.stderr


def quotas() -> list[tuple[str, bool]]:
    """The limits on CPU time of groups that this process made, and whether something is inside."""
    return [
        (file.read_text().split()[0], bool((group / "cgroup.procs").read_text()))
        # Path.glob would fail where another test removes a group meanwhile.
        for group in map(Path, (path for path, _, _ in os.walk("/sys/fs/cgroup")))
        if re.fullmatch(rf"trajectories-.*-{os.getpid()}-.*", group.name)
        for file in (group / "cpu.max", group / "cpu.cfs_quota_us")
        if file.exists()
    ]


@needs_bwrap
@pytest.mark.parametrize(("cpus", "quota"), [(0.5, "50000"), (2, "200000"), (None, None)])
def test_cpus_are_limited_by_the_control_group(
    workspace: Workspace, cpus: float | None, quota: str | None
) -> None:
    if not can_limit_cpus():
        pytest.skip("no control group for CPUs can be made here")

    async def use() -> list[tuple[str, bool]]:
        sandbox = make_sandbox("bwrap", workspace, Limits(cpus=cpus))
        try:
            await sandbox.run("shell", "true")
            return quotas()
        finally:
            await sandbox.stop()

    listed = asyncio.run(use())
    assert listed in ([], [("max", True)]) if quota is None else listed == [(quota, True)]
    assert quotas() == []
