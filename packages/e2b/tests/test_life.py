"""Machines live as long as they are used, and no longer."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helping import PATIENCE_S, keepers_of, use, wait_until
from loopback import KEY, Fault, Loopback

from batch_trajectories.basics.errors import SandboxLost
from toolsets.sandbox.base import Sandbox


def child(root: Path, act: str) -> subprocess.Popen[bytes]:
    """Start another process that does `act` with a sandbox."""
    source = f"""
import asyncio, os, pathlib, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from helping import use
async def act(sandbox):
    {act}
root = pathlib.Path({str(root)!r})
use(root, act)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen([sys.executable, "-c", source], env=environment)


def test_a_machine_starts_with_the_first_call_and_ends_with_its_sandbox(
    service: Loopback, root: Path
) -> None:
    async def act(sandbox: Sandbox) -> None:
        assert service.made == []
        await sandbox.exec(["true"])
        assert len(service.machines) == 1

    use(root, act)
    assert service.machines == {}
    assert len(service.killed) == 1


def test_its_metadata_tell_what_it_is_for_and_no_secret(service: Loopback, root: Path) -> None:
    use(root, lambda one: one.exec(["true"]))
    [made] = service.made
    assert made["metadata"]["made_by"] == "batch-trajectories"
    assert made["metadata"]["workspace"] == "one"
    assert KEY not in str(made)
    assert made["allow_internet_access"] is False


def test_it_is_renewed_while_it_is_used(
    service: Loopback, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_LIFETIME_S", "6")

    async def act(sandbox: Sandbox) -> str:
        await sandbox.run("shell", "X=1")
        await asyncio.sleep(8)  # as a model that thinks
        return (await sandbox.run("shell", "echo $X")).stdout

    assert use(root, act) == "1\n"
    assert len(service.renewals) >= 3
    assert len(service.made) == 1


@pytest.mark.parametrize("when", ["during a call", "between calls", "while it is made"])
def test_it_ends_with_a_worker_that_is_killed(service: Loopback, root: Path, when: str) -> None:
    wait = "await asyncio.sleep(600)"
    call = "await sandbox.run('shell', 'echo x > there; sleep 600')"
    act = f"await sandbox.exec(['true']); {wait}" if when == "between calls" else call
    if when == "while it is made":
        service.faults = [Fault("POST /v2/sandboxes", 503, after=True, times=99)]
    process = child(root, act)
    wait_until(lambda: service.machines, "a machine")
    if when == "between calls":
        wait_until(lambda: any("Connect" in one or "Input" in one for one in service.requests), "")
    process.kill()
    process.wait()
    if when == "while it is made":
        service.faults = []
    wait_until(lambda: not service.machines, "the machine has ended")


def test_it_ends_after_its_lifetime_if_nobody_is_left_to_end_it(
    service: Loopback, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("E2B_LIFETIME_S", "6")
    process = child(root, "await sandbox.run('shell', 'sleep 600')")
    wait_until(lambda: service.machines, "a machine")
    for pid in [*keepers_of(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    begun = time.monotonic()
    wait_until(lambda: not service.machines, "the machine has ended")
    assert time.monotonic() - begun < PATIENCE_S
    assert service.killed == [], "nobody asked for its end"


def test_the_next_keeper_ends_what_a_killed_one_has_left(service: Loopback, root: Path) -> None:
    process = child(root, "await sandbox.run('shell', 'sleep 600')")
    living = child(root.with_name("two"), "await sandbox.run('shell', 'sleep 600')")
    wait_until(lambda: len(service.machines) == 2, "two machines")
    for pid in [*keepers_of(process.pid), process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    assert len(service.machines) == 2
    use(root.with_name("three"), lambda one: one.exec(["true"]))
    wait_until(lambda: len(service.machines) == 1, "the orphan has ended")
    [left] = service.machines.values()
    assert left.body["metadata"]["workspace"] == "two"
    living.kill()
    living.wait()
    wait_until(lambda: not service.machines, "the last machine has ended")


def test_a_keeper_that_was_killed_costs_its_machines_and_is_replaced(
    service: Loopback, root: Path
) -> None:
    async def act(sandbox: Sandbox) -> str:
        await sandbox.run("shell", "echo kept > file")
        for pid in keepers_of(os.getpid()):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxLost):
            await sandbox.run("shell", "true")
        return (await sandbox.run("shell", "cat file")).stdout

    assert use(root, act) == "kept\n"
    wait_until(lambda: not service.machines, "the new keeper has ended the old one's machine")


def test_the_command_line_and_the_environment_of_the_machine_show_no_key(
    service: Loopback, root: Path
) -> None:
    async def act(sandbox: Sandbox) -> str:
        result = await sandbox.exec(["sh", "-c", "env; cat /proc/*/cmdline /proc/*/environ"])
        lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, check=True).stdout
        return result.stdout + lines.decode()

    assert KEY not in use(root, act)
