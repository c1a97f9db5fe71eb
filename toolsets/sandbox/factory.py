"""The sandboxes by name: which there are, whether they work here, and how to make one.

A sandbox that does not work is refused; another never replaces it.
"""

from __future__ import annotations

from toolsets.sandbox.base import ExecResult, Extras, Limits, Sandbox, SandboxError
from toolsets.sandbox.bwrap import BwrapSandbox, bwrap_problem
from toolsets.sandbox.docker import DockerSandbox, docker_problem
from toolsets.sandbox.fork_servers import FORK_SERVERS
from toolsets.sandbox.local import LocalSandbox
from toolsets.workspace.workspace import Workspace

__all__ = [
    "FORK_SERVERS",
    "SANDBOXES",
    "ExecResult",
    "Extras",
    "Limits",
    "Sandbox",
    "SandboxError",
    "make_sandbox",
    "sandbox_problem",
]

SANDBOXES = ("bwrap", "docker", "local")
"""The names of the sandboxes."""


def sandbox_problem(name: str, *, image: str | None = None) -> str | None:
    """Return None if the sandbox works here, else one sentence that says what to do.

    `image` is what docker is to run.
    """
    if name not in SANDBOXES:
        return f"unknown sandbox {name!r}; known: {', '.join(SANDBOXES)}"
    if name == "docker":
        return docker_problem(image)
    return bwrap_problem() if name == "bwrap" else None


def make_sandbox(
    name: str,
    workspace: Workspace,
    limits: Limits,
    *,
    image: str | None = None,
    extras: Extras | None = None,
) -> Sandbox:
    """Return a sandbox around `workspace`; raises `SandboxError` if it does not work here.

    Whether the image exists is checked when the sandbox starts.
    """
    if name == "docker" and extras is not None:
        raise SandboxError("sandbox docker: it cannot run an agent of this machine; use bwrap")
    if name == "docker" and image is not None:
        return DockerSandbox(workspace, limits, image=image)
    if name == "docker":
        raise SandboxError("sandbox docker: no image was named")
    if problem := sandbox_problem(name):
        raise SandboxError(problem)
    if name == "local":
        return LocalSandbox(workspace, limits, extras)
    # The last one isolates: a name without a line of its own must not end without isolation.
    return BwrapSandbox(workspace, limits, extras)
