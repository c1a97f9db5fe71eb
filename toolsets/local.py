"""Commands run as plain processes of this machine, only where that was chosen by name."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from toolsets.execution import ExecResult, Limits
from toolsets.interpreter import python_bin
from toolsets.process import Spawn, check_argv, input_file, run_process
from toolsets.rlimits import limited
from toolsets.workspace import Workspace

# The watchdog reads a pipe that this process holds open, so it wakes when this process dies,
# however it dies, and takes the group along. It is started through a second subshell to be no
# child of the command, which may wait for its children.
_WATCHED = (
    "exec 3<&0; "
    "( ( read -r _ <&3; kill -KILL 0 ) </dev/null >/dev/null 2>&1 & ); "
    'input=$1; shift; exec "$@" <"$input" 3<&-'
)


class LocalSandbox:
    """Runs commands without isolation, in a cleared environment and under resource limits.

    A command can read and write whatever this user can, use the network, see the processes of
    this user and read their environment. Its process group is killed when it ends, when time is
    up and when this process dies; a child that starts a session of its own survives. The watch
    on this process also fails while a fork of it lives on. /tmp is the machine's.
    """

    name = "local"

    def __init__(self, workspace: Workspace, limits: Limits) -> None:
        self._workspace = workspace
        self._limits = limits

    @property
    def home(self) -> str:
        """The real path of the workspace."""
        return str(self._workspace.root)

    async def exec(
        self, argv: Sequence[str], *, timeout_s: float | None = None, stdin: bytes = b""
    ) -> ExecResult:
        """Run one command in the workspace."""
        check_argv(argv)
        self._workspace.make()
        with input_file(stdin) as file:
            watched = ["/bin/sh", "-c", _WATCHED, "sh", f"/dev/fd/{file.fileno()}"]
            spawn = Spawn(
                argv=[*watched, *limited(argv, self._limits)],
                env=self._env(),
                cwd=self.home,
                stdin=asyncio.subprocess.PIPE,
                pass_fds=[file.fileno()],
            )
            return await run_process(
                spawn,
                timeout_s=self._limits.command_timeout_s(timeout_s),
                output_bytes=self._limits.output_bytes,
            )

    async def stop(self) -> None:
        """Nothing outlives an `exec`, so there is nothing to release."""

    def _env(self) -> dict[str, str]:
        return {
            "PATH": f"{python_bin()}:{os.environ.get('PATH', os.defpath)}",
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "USER": os.environ.get("USER", "user"),
        }
