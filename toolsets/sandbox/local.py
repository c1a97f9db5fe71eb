"""Runs commands as plain processes of this machine, only if that was chosen by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from toolsets.sandbox.base import SandboxSettings
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.first_process import proc_problem
from toolsets.sandbox.fork_servers import SandboxTemplate
from toolsets.sandbox.programs import LOCALE, python_bin
from toolsets.sandbox.served import ServedSandbox


class LocalSandbox(ServedSandbox):
    """Runs commands without isolation, in a cleared environment and under resource limits.

    A command can read and write all files of this user, use the network, see the processes of this
    user and read their environment. When the sandbox is stopped or this process dies, its server
    kills every process that it started; on Linux also those in a session of their own. This fails
    only if a command has killed the server. /tmp is the machine's.
    """

    name = "local"
    is_isolated = False
    takes_extras = True

    @classmethod
    def problem(cls, settings: SandboxSettings) -> str | None:
        """See `Sandbox`."""
        del settings
        return (problem := proc_problem()) and f"sandbox local: {problem}"

    @property
    def home(self) -> str:
        """The real path of the workspace."""
        return str(self._workspace.root)

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        return Launch(argv=argv, env=self._env(), cwd=self.home)

    def template(self) -> SandboxTemplate | None:
        """See `ServedSandbox`."""
        if sys.platform != "linux" or self._extras is not None:
            return None
        shared = self._env() | {"HOME": "/"}
        return SandboxTemplate(
            key=("local", *shared.items()),
            is_confined=False,
            launch=lambda argv, _: Launch(argv=argv, env=shared, cwd="/"),
            request={"env": {"HOME": self.home}},
        )

    def _env(self) -> dict[str, str]:
        return {
            "PATH": f"{python_bin()}:{os.environ.get('PATH', os.defpath)}",
            "HOME": self.home,
            **LOCALE,
            "TERM": "dumb",
            "USER": os.environ.get("USER", "user"),
            "MPLBACKEND": "Agg",
        }
