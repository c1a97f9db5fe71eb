"""Sandboxes on the loopback service, and waiting for what must happen."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from toolsets.sandbox.base import Limits, Sandbox, SandboxSettings
from toolsets.sandbox.factory import make_sandbox
from toolsets.workspace.workspace import Workspace

PATIENCE_S = 60.0

Result = TypeVar("Result")


def use(
    root: Path,
    act: Callable[[Sandbox], Coroutine[Any, Any, Result]],
    settings: SandboxSettings | None = None,
) -> Result:
    """Give a sandbox around the workspace `root` to `act`, and stop it."""
    root.parent.mkdir(parents=True, exist_ok=True)

    async def used() -> Result:
        sandbox = make_sandbox("e2b", Workspace(root), Limits(timeout_s=30), settings)
        try:
            return await act(sandbox)
        finally:
            await sandbox.stop()

    return asyncio.run(used())


def wait_until(is_so: Callable[[], object], what: str) -> None:
    """Wait until something is so; fail if it never is."""
    give_up = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up, f"never: {what}"
        time.sleep(0.02)


def children_of(pid: int, *options: str) -> list[int]:
    """The processes that a process has started and not yet waited for."""
    found = subprocess.run(["pgrep", "-P", str(pid), *options], capture_output=True, check=False)
    return [int(line) for line in found.stdout.split()]


def keepers_of(pid: int) -> list[int]:
    """The keepers that a process has started."""
    return children_of(pid, "-f", "batch_trajectories_e2b.keeper")
