"""Commands run in a container of their own, from an image that the run or the row names.

The engine is asked through its command line, which Podman speaks too. The image needs `python3`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack

from toolsets.sandbox.base import Limits, SandboxError
from toolsets.sandbox.cgroup import Group
from toolsets.sandbox.channel import Launch
from toolsets.sandbox.served import ServedSandbox
from toolsets.workspace.workspace import Workspace

HOME = "/workspace"

_INSTALL = "install Docker, or Podman with its `docker` command"
_ENGINE = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONFIG", "DOCKER_CONTEXT", "XDG_RUNTIME_DIR")
"""What the command line needs of the environment to find the engine; the container gets nothing."""


class DockerSandbox(ServedSandbox):
    """Runs a task's commands in one container around the workspace.

    The container has no network unless that is allowed, no capabilities, limited memory and
    processes, and is removed when it is stopped or this process dies: its server ends with its
    standard input. Commands run as the user of this process, so that the workspace stays theirs.
    """

    name = "docker"

    def __init__(self, workspace: Workspace, limits: Limits, *, image: str) -> None:
        """`image` is one that the engine has; it is not pulled."""
        super().__init__(workspace, limits)
        self._image = image

    @property
    def home(self) -> str:
        """The workspace is in the same place for every task."""
        return HOME

    def group(self) -> Group | None:
        """The engine limits processes and memory."""
        return None

    @property
    def watches_memory(self) -> bool:
        """The engine does."""
        return False

    def launch(self, argv: Sequence[str], stack: ExitStack) -> Launch:
        """See `ServedSandbox`."""
        docker = shutil.which("docker")
        if docker is None:
            raise SandboxError(f"the sandbox is gone: docker was not found; {_INSTALL}")
        return Launch(
            argv=[docker, *self._options(), self._image, *argv],
            env={name: os.environ[name] for name in _ENGINE if name in os.environ},
            cwd="/",
        )

    def _options(self) -> list[str]:
        limits = self._limits
        return [
            *("run", "--rm", "--interactive", "--init", "--pull", "never"),
            *("--network", "bridge" if limits.network else "none"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *("--memory", f"{limits.memory_mb}m", "--pids-limit", str(limits.processes)),
            *("--user", f"{os.getuid()}:{os.getgid()}"),
            *("--tmpfs", f"/tmp:rw,exec,size={limits.tmp_mb}m"),
            *("--volume", f"{self._workspace.root}:{HOME}", "--workdir", HOME),
            *("--env", f"HOME={HOME}", "--env", "LANG=C.UTF-8", "--env", "MPLBACKEND=Agg"),
            *("--entrypoint", ""),
        ]


def docker_problem(image: str | None) -> str | None:
    """Return None where the engine answers and has the image, else what to do about it.

    With `image` None only the engine is asked.
    """
    docker = shutil.which("docker")
    if docker is None:
        return f"sandbox docker: the program docker was not found; {_INSTALL}"
    asked = [docker, "version"]
    if image is not None:
        asked = [docker, "image", "inspect", "--format", "{{.Id}}", image]
    try:
        done = subprocess.run(
            asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"sandbox docker: {error}"
    if done.returncode == 0:
        return None
    said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
    if image is None:
        return f"sandbox docker: the engine does not answer: {said[-1][:300]}"
    return f"sandbox docker: image {image!r}: {said[-1][:300]} (docker pull {image}?)"
