"""The sandboxes by name: which there are, whether they work here, and how to make one.

A sandbox that does not work is refused; another never replaces it.
"""

from __future__ import annotations

from pathlib import Path

from toolsets.images.store import ImageStore
from toolsets.sandbox.base import ExecResult, Limits, Sandbox, SandboxError
from toolsets.sandbox.bwrap import BwrapSandbox, bwrap_problem
from toolsets.sandbox.docker import DockerSandbox, docker_problem
from toolsets.sandbox.fork_servers import FORK_SERVERS
from toolsets.sandbox.image import ImageSpec
from toolsets.sandbox.image_bwrap import BwrapImageSandbox, layering_of, overlay_problem
from toolsets.sandbox.image_files import ImageSandbox
from toolsets.sandbox.local import LocalSandbox
from toolsets.workspace.workspace import Workspace

__all__ = [
    "FORK_SERVERS",
    "SANDBOXES",
    "ExecResult",
    "ImageSandboxes",
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
    name: str, workspace: Workspace, limits: Limits, *, image: str | None = None
) -> Sandbox:
    """Return a sandbox around `workspace`; raises `SandboxError` if it does not work here.

    Whether the image exists is checked when the sandbox starts.
    """
    if name == "docker" and image is not None:
        return DockerSandbox(workspace, limits, image=image)
    if name == "docker":
        raise SandboxError("sandbox docker: no image was named")
    if problem := sandbox_problem(name):
        raise SandboxError(problem)
    if name == "local":
        return LocalSandbox(workspace, limits)
    # The last one isolates: a name without a line of its own must not end without isolation.
    return BwrapSandbox(workspace, limits)


class ImageSandboxes:
    """Makes the sandboxes of conversations that work in images."""

    def __init__(self, name: str, *, images: Path | None, layers: Path) -> None:
        """`images` is where bwrap finds them; `layers` is where workspaces are."""
        self._name = name
        self._layers = layers
        self._store = None if images is None else ImageStore(images)

    def problem(self) -> str | None:
        """Return None if images can be used here, else one sentence that says what to do."""
        if problem := sandbox_problem(self._name):
            return problem
        if self._store is None:
            return "--workspace=image needs --images=DIR"
        return self._store.problem()

    def layering(self) -> str:
        """How conversations share an image, in words for the user."""
        if self._store is None:
            return "containers"
        if layering_of(self._layers, self._store.unpacked) == "overlay":
            return "overlays of the kernel"
        why = overlay_problem(self._layers, self._store.unpacked)
        return f"copies, since the kernel mounts no overlays for {self._layers} ({why})"

    def make(self, workspace: Workspace, limits: Limits, spec: ImageSpec) -> ImageSandbox:
        """Return the sandbox of one conversation; waits until its image is there.

        Raises `ImageError` where the image is missing, damaged or cannot be used, and `HostError`.
        """
        if self._store is None:
            raise SandboxError("--workspace=image needs --images=DIR")
        image = self._store.unpack(spec.reference)
        return BwrapImageSandbox(workspace, limits, image=image, spec=spec)
