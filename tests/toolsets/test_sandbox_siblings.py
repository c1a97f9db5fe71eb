"""Sandboxes that one fork server has forked share nothing but what they cannot change.

Each attack is made from one sandbox while another one runs, and it is checked that the attack
itself works: where both ends are in one sandbox it succeeds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.helpers.running import ROOT
from tests.toolsets.test_sandbox import needs_bwrap
from toolsets.sandbox.base import Limits, Sandbox, SandboxError
from toolsets.sandbox.factory import make_sandbox
from toolsets.sandbox.inside.processes import descendants
from toolsets.workspace.workspace import Workspace

pytestmark = needs_bwrap
T = TypeVar("T")


async def two(tmp_path: Path, act: Callable[[Sandbox, Sandbox], Awaitable[T]]) -> T:
    """Give two sandboxes of one server to `act`."""
    both = [make_sandbox("bwrap", Workspace(tmp_path / n), Limits(timeout_s=20)) for n in "ab"]
    try:
        return await act(*both)
    finally:
        for sandbox in both:
            await sandbox.stop()


async def out(sandbox: Sandbox, code: str) -> str:
    result = await sandbox.run("python", code)
    assert (result.exit_code, result.stderr) == (0, ""), result
    return result.stdout.strip()


# What one sandbox sets up, and what another then tries; the attack prints "open" or why not.
ATTACKS = {
    "processes": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '77777'])",
        "import glob\n"
        "names = [open(path, 'rb').read() for path in glob.glob('/proc/[0-9]*/cmdline')]\n"
        "print('open' if any(b'77777' in name for name in names) else 'not there')",
    ),
    "files of /tmp": (
        "open('/tmp/mark', 'w').write('x')",
        "import os\nprint('open' if os.path.exists('/tmp/mark') else 'not there')",
    ),
    "shared memory of POSIX": (
        "from multiprocessing.shared_memory import SharedMemory\n"
        "mine = SharedMemory('mark', create=True, size=8)",
        "import os\nprint('open' if os.path.exists('/dev/shm/mark') else 'not there')",
    ),
    "shared memory of System V": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nassert libc.shmget(4711, 4096, 0o1666) >= 0",
        "import ctypes\n"
        "print('open' if ctypes.CDLL(None).shmget(4711, 4096, 0o666) >= 0 else 'not there')",
    ),
    "the loopback device": (
        "import socket\nserver = socket.create_server(('127.0.0.1', 4711))",
        "import socket\n"
        "code = socket.socket().connect_ex(('127.0.0.1', 4711))\n"
        "print('open' if code == 0 else 'not there')",
    ),
    "abstract sockets": (
        "import socket\nserver = socket.socket(socket.AF_UNIX)\n"
        "server.bind('\\0mark'); server.listen()",
        "import socket\n"
        "code = socket.socket(socket.AF_UNIX).connect_ex('\\0mark')\n"
        "print('open' if code == 0 else 'not there')",
    ),
    "terminals": (
        "import os, pty\nends = pty.openpty()\nassert os.ttyname(ends[1]) == '/dev/pts/0'",
        "import os\nprint('open' if os.path.exists('/dev/pts/0') else 'not there')",
    ),
    "the host's name": (
        "import socket\nname = socket.gethostname()",
        "import ctypes\n"
        "print('open' if ctypes.CDLL(None).sethostname(b'x', 1) == 0 else 'not allowed')",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_sandbox_does_not_reach_another_of_its_server(attack: str, tmp_path: Path) -> None:
    setup, attempt = ATTACKS[attack]

    async def act(one: Sandbox, other: Sandbox) -> tuple[str, str]:
        await out(one, setup)
        return await out(other, attempt), await out(one, attempt)

    from_outside, from_inside = asyncio.run(two(tmp_path, act))
    assert from_outside in ("not there", "not allowed")
    assert from_inside == ("not allowed" if from_outside == "not allowed" else "open")


# What a sandbox could have kept of the fork server: its place, its descriptors, its privileges.
LEFT = {
    "the workspaces of others": "ls / /workspace/.. /tmp; cat /workspace/../b/secret",
    "the directory of all workspaces": "cat /proc/self/mountinfo /proc/1/mountinfo",
    "its working directory": "readlink /proc/1/cwd; ls -A .; ls -A ..",
    "mounts": "umount /workspace; umount -l /proc; mount --bind / /tmp; ls /workspace",
    "namespaces": "unshare -U true && echo open; unshare -p true && echo open; nsenter -at1 true",
    "memory": "python3 -c \"open('/proc/1/mem', 'rb')\"; cat /proc/1/environ",
}


@pytest.mark.parametrize("left", LEFT)
def test_nothing_is_left_of_the_fork_server(left: str, tmp_path: Path) -> None:
    async def act(one: Sandbox, other: Sandbox) -> str:
        await other.run("shell", "echo canary-7f3a > secret")
        result = await one.run("shell", LEFT[left])
        return result.stdout + result.stderr

    seen = asyncio.run(two(tmp_path, act))
    assert "canary" not in seen
    assert "open" not in seen.split()
    # The workspace itself is named where mounts are listed, as with a bubblewrap of its own.
    assert f"{tmp_path} " not in seen
    assert "secret" not in seen.replace("b/secret", "")


LOOK = """
import json, os, re, socket
mounts = {}
for line in open("/proc/self/mountinfo"):
    fields, kind = line.split(" - ")
    place, options = fields.split()[4:6]
    assert place not in mounts, "one hides another"
    mounts[place] = [options.split(","), kind.split()[0], sorted(kind.split()[2].split(","))]
status = open("/proc/self/status").read()
print(json.dumps({
    "mounts": mounts,
    "privileges": re.findall("(Cap.*|NoNewPrivs|Seccomp|Groups):\\t(.*)", status),
    "files": {at: sorted(os.listdir(at)) for at in ("/", "/etc", "/dev", "/tmp", "/var", "/root")},
    "limits": re.findall("(Max .*?)  +(.*?) ", open("/proc/self/limits").read()),
    "user": [os.getuid(), os.getgid(), os.getgroups(), os.umask(0)],
    "name": socket.gethostname(),
    "environment": dict(os.environ),
    "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],
    "cgroup": open("/proc/self/cgroup").read(),
    "users": open("/proc/self/uid_map").read().split()[0::2],
}))
"""


@pytest.mark.parametrize("by", ["a command", "the interpreter"])
def test_a_forked_sandbox_is_what_bubblewrap_makes_by_itself(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter is not a new program, so its privileges are those of the server."""

    async def look(name: str) -> dict[str, Any]:
        sandbox = make_sandbox("bwrap", Workspace(tmp_path / name), Limits(timeout_s=20))
        try:
            if by == "a command":
                result = await sandbox.exec(["python3", "-I", "-c", LOOK])
            else:
                result = await sandbox.run("python", LOOK)
            assert result.stderr == ""
            return dict(json.loads(result.stdout))
        finally:
            await sandbox.stop()

    forked = asyncio.run(look("forked"))
    # The kernel's default for what is bound there, and stricter where we set it.
    forked["mounts"]["/proc/sys"][0].remove("noexec")
    monkeypatch.delattr("toolsets.sandbox.bwrap.BwrapSandbox.template")
    assert asyncio.run(look("alone")) == forked


def test_no_sandbox_can_write_settings_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root of the machine could, without any capability; what is tried would change nothing."""
    code = """
for name in ("sys/kernel/core_pattern", "sys/vm/overcommit_memory", "sys/kernel/hostname"):
    try:
        open("/proc/" + name, "r+").close()
    except OSError as error:
        print("refused", error.errno)
    else:
        print("open", name)
"""

    async def attempt() -> str:
        sandbox = make_sandbox("bwrap", Workspace(tmp_path / "ws"), Limits(timeout_s=20))
        try:
            return await out(sandbox, code)
        finally:
            await sandbox.stop()

    for launched in (False, True):
        if launched:
            monkeypatch.delattr("toolsets.sandbox.bwrap.BwrapSandbox.template")
        assert "open" not in asyncio.run(attempt())


def kill(pids: set[tuple[int, int]]) -> None:
    """Kill processes and wait until they have ended: those beneath one are not found without it."""
    handles = []
    for pid, _ in pids:
        with contextlib.suppress(ProcessLookupError):  # ended with its namespace
            handles.append(os.pidfd_open(pid))
            signal.pidfd_send_signal(handles[-1], signal.SIGKILL)
    for handle in handles:
        assert select.select([handle], [], [], 30)[0]
        os.close(handle)


def test_a_fork_server_that_was_killed_is_replaced(tmp_path: Path) -> None:
    """Its sandboxes end with it, and say so; the next one gets another server."""

    async def act(one: Sandbox, other: Sandbox) -> tuple[str, str]:
        before = set(descendants())  # other tests have processes that must live on
        await one.run("shell", "true")
        kill(set(descendants()) - before)
        with pytest.raises(SandboxError, match="the sandbox ended, with all that ran in it"):
            await one.run("shell", "true")
        return (await other.run("shell", "echo up")).stdout, (await one.exec(["echo", "up"])).stdout

    assert asyncio.run(two(tmp_path, act)) == ("up\n", "up\n")


def test_what_a_fork_server_had_been_sent_when_it_was_killed_is_sent_to_another(
    tmp_path: Path,
) -> None:
    async def act(one: Sandbox, other: Sandbox) -> str:
        before = set(descendants())
        await one.run("shell", "true")
        found = set(descendants()) - before
        for pid, _ in found:
            os.kill(pid, signal.SIGSTOP)  # it takes no more requests
        command = asyncio.create_task(other.run("shell", "echo up"))
        for _ in range(10):  # turns of the event loop: sending takes one
            await asyncio.sleep(0)
        assert not command.done()
        kill(found)
        return (await command).stdout

    assert asyncio.run(two(tmp_path, act)) == "up\n"


def test_where_none_can_be_forked_each_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where a security module grants programs in bubblewrap no capabilities."""
    monkeypatch.setattr("toolsets.sandbox.bwrap.FORK_SERVER", ["--uid", "0", "--gid", "0"])

    async def act(one: Sandbox, other: Sandbox) -> list[str]:
        return [await out(sandbox, "print('up')") for sandbox in (one, other)]

    assert asyncio.run(two(tmp_path, act)) == ["up", "up"]
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.endswith("none can be forked here: Operation not permitted")


def test_a_fork_that_the_machine_refuses_is_its_failure(crowded: Path, tmp_path: Path) -> None:
    code = f"""
import asyncio, os
from pathlib import Path
from tests.toolsets.test_sandbox_siblings import two
group = Path({str(crowded)!r})
async def act(one, other):
    await one.run("shell", "true")
    (group / "pids.max").write_text((group / "pids.current").read_text())
    try:
        print("result", await other.run("shell", "true"))
    except Exception as error:
        print(type(error).__name__, error)
    finally:
        (group / "pids.max").write_text("max")
(group / "cgroup.procs").write_text(str(os.getpid()))
asyncio.run(two(Path({str(tmp_path)!r}), act))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    start = "HostError a sandbox did not start: "
    assert done.stdout.startswith(start), done.stdout + done.stderr
    assert "Resource temporarily unavailable" in done.stdout
