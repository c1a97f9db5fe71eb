"""The sandboxes in which commands run."""

from typing import NamedTuple


class SandboxPlaces(NamedTuple):
    """The classes of a sandbox, each as "module:class"."""

    sandbox: str
    """A subclass of `Sandbox`."""
    images: str | None = None
    """A subclass of `ImageSandboxes`; None if conversations cannot work in images there."""


SANDBOXES = {
    "bwrap": SandboxPlaces(
        "toolsets.sandbox.bwrap:BwrapSandbox", "toolsets.sandbox.image_bwrap:BwrapImages"
    ),
    "docker": SandboxPlaces(
        "toolsets.sandbox.containers.docker:DockerSandbox",
        "toolsets.sandbox.containers.docker:EngineImages",
    ),
    "local": SandboxPlaces("toolsets.sandbox.local:LocalSandbox"),
}
"""The sandboxes of this program by name; packages add others, see `factory`."""
