"""The sandboxes by name: which there are, whether they work here, and how to make one.

A sandbox that does not work is refused; another never replaces it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from toolsets.images.image_error import ImageError
from toolsets.sandbox.base import ExecResult, Extras, Limits, Sandbox, SandboxError
from toolsets.sandbox.bwrap import BwrapSandbox, bwrap_problem
from toolsets.sandbox.docker import (
    DockerImageSandbox,
    DockerSandbox,
    Pull,
    docker_problem,
    engine_warning,
    image_config,
    image_digests,
    run_label,
)
from toolsets.sandbox.fork_servers import FORK_SERVERS
from toolsets.sandbox.image import ImageSpec
from toolsets.sandbox.local import LocalSandbox
from toolsets.workspace.workspace import Workspace

if TYPE_CHECKING:
    from toolsets.images.store import ImageStore
    from toolsets.sandbox.image_files import ImageSandbox

__all__ = [
    "FORK_SERVERS",
    "SANDBOXES",
    "ExecResult",
    "Extras",
    "ImageSandboxes",
    "Limits",
    "Sandbox",
    "SandboxError",
    "make_sandbox",
    "sandbox_problem",
]

SANDBOXES = ("bwrap", "docker", "local")
"""The names of the sandboxes."""

_NO_AGENTS = "sandbox docker: it cannot run agents that are commands; use bwrap"


def sandbox_problem(name: str, *, image: str | None = None, engine: str = "docker") -> str | None:
    """Return None if the sandbox works here, else one sentence that says what to do.

    `image` is what docker is to run.
    """
    if name not in SANDBOXES:
        return f"unknown sandbox {name!r}; known: {', '.join(SANDBOXES)}"
    if name == "docker":
        return docker_problem(image, engine)
    if (problem := _proc_problem()) is not None:
        return f"sandbox {name}: {problem}"
    return bwrap_problem() if name == "bwrap" else None


def _proc_problem() -> str | None:
    """What is wrong with /proc, by which both other sandboxes find their processes."""
    if sys.platform != "linux":
        return None
    try:
        own = os.readlink("/proc/self")  # noqa: PTH115 - for each conversation, so without a Path
    except OSError:
        if os.path.exists("/proc/version"):  # noqa: PTH110 - as above
            own = ""
        else:
            return "/proc is not mounted: run `mount -t proc proc /proc` before the start"
    if own == str(os.getpid()):
        return None
    return (
        "/proc shows the processes of another PID namespace: mount that of this one "
        "(`unshare --mount-proc`, or `mount -t proc proc /proc`) before the start"
    )


def make_sandbox(
    name: str,
    workspace: Workspace,
    limits: Limits,
    *,
    image: str | None = None,
    engine: str = "docker",
    extras: Extras | None = None,
) -> Sandbox:
    """Return a sandbox around `workspace`; raises `SandboxError` if it does not work here.

    Whether the image exists is checked when the sandbox starts.
    """
    if name == "docker" and extras is not None:
        raise SandboxError(_NO_AGENTS)
    if name == "docker" and image is not None:
        return DockerSandbox(workspace, limits, image=image, engine=engine)
    if name == "docker":
        raise SandboxError("sandbox docker: no image was named")
    if problem := sandbox_problem(name):
        raise SandboxError(problem)
    if name == "local":
        return LocalSandbox(workspace, limits, extras)
    # The last one isolates: a name without a line of its own must not end without isolation.
    return BwrapSandbox(workspace, limits, extras)


class ImageSandboxes:
    """Makes the sandboxes of the conversations of a run that work in images."""

    def __init__(
        self,
        name: str,
        *,
        run_dir: Path,
        images: Path | None = None,
        engine: str = "docker",
        pull: Pull = "never",
    ) -> None:
        """`images` is where bwrap finds them; `engine` and `pull` are for docker."""
        self._name = name
        self._run_dir = run_dir
        self._store = None if images is None else _image_store(images)
        self._engine = engine
        self._pull: Pull = pull

    def problem(self) -> str | None:
        """Return None if images can be used here, else one sentence that says what to do."""
        if problem := sandbox_problem(self._name, engine=self._engine):
            return problem
        if self._store is not None:
            return self._store.problem()
        if self._name == "bwrap":
            return (
                "--workspace=image with --sandbox=bwrap needs --images=DIR, the images' directory"
            )
        return None

    def problem_of_image(self, reference: str) -> str | None:
        """Why the directory of images has none of this name; None if only the engine knows."""
        if self._store is None:
            return None
        try:
            self._store.find(reference)
        except ImageError as error:
            return str(error)
        return None

    def digests(self, references: Collection[str]) -> dict[str, str]:
        """The digests of those images that are here; see `ImageSandbox.image_digest`.

        Raises `SandboxError` where an engine does not answer.
        """
        from toolsets.images.names import full_name  # few runs have images

        found = {}
        known = {} if self._store is not None else image_digests(self._engine)
        for reference in references:
            if self._store is None:
                if digest := known.get(full_name(reference)):
                    found[reference] = digest
                continue
            with suppress(ImageError):
                found[reference] = self._store.find(reference).config_digest
        return found

    def warning(self) -> str | None:
        """What makes images slow here; None if nothing does."""
        if self._store is None:
            return engine_warning(self._engine)
        from toolsets.sandbox.image_bwrap import layering_of, overlay_problem

        layers = self._run_dir / "workspaces"
        layers.mkdir(parents=True, exist_ok=True, mode=0o700)
        if layering_of(layers, self._store.unpacked) == "overlay":
            return None
        why = overlay_problem(layers, self._store.unpacked)
        return (
            f"warning: each conversation gets a copy of its image: the kernel mounts no overlays "
            f"for {layers} ({why}); use a kernel from 5.11 on and a local file system"
        )

    def make(
        self,
        workspace: Workspace,
        limits: Limits,
        spec: ImageSpec,
        extras: Extras | None = None,
    ) -> ImageSandbox:
        """Return the sandbox of one conversation; waits until its image is there.

        Raises `ImageError` where the image is missing, damaged or cannot be used, `HostError`, and
        `SandboxError` for `extras` that a container cannot have.
        """
        if self._store is not None:
            from toolsets.sandbox.image_bwrap import BwrapImageSandbox

            image = self._store.unpack(spec.reference)
            return BwrapImageSandbox(workspace, limits, image=image, spec=spec, extras=extras)
        if extras is not None:
            raise SandboxError(_NO_AGENTS)
        config, digest = image_config(self._engine, spec.reference, self._pull)
        return DockerImageSandbox(
            workspace,
            limits,
            spec=spec,
            engine=self._engine,
            run=run_label(self._run_dir),
            config=config,
            digest=digest,
        )


def _image_store(directory: Path) -> ImageStore:
    from toolsets.images.store import ImageStore  # reads archives, which few runs need

    return ImageStore(directory)
