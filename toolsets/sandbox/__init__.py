"""The sandboxes in which commands run."""

from typing import Literal, NamedTuple

Engine = Literal["docker", "podman"]
"""A program that runs containers."""

Pull = Literal["never", "missing"]
"""The rule for pulling images: never, or only images that are not here."""


class SandboxPlaces(NamedTuple):
    """The classes of a sandbox, each as "module:class"."""

    sandbox: str
    """A subclass of `Sandbox`."""
    images: str | None = None
    """A subclass of `ImageSandboxes`; None if conversations cannot work in images there."""
    needs_image: bool = False
    """`Sandbox.needs_image`, for commands that only want to know that: a class takes 20 ms."""


SANDBOXES = {
    "bwrap": SandboxPlaces(
        "toolsets.sandbox.bwrap:BwrapSandbox", "toolsets.sandbox.image_bwrap:BwrapImages"
    ),
    "docker": SandboxPlaces(
        "toolsets.sandbox.containers.docker:DockerSandbox",
        "toolsets.sandbox.containers.docker:EngineImages",
        needs_image=True,
    ),
    "local": SandboxPlaces("toolsets.sandbox.local:LocalSandbox"),
}
"""The sandboxes of this program by name; packages add others, see `factory`."""
