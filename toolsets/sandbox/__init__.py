"""Where commands run."""

from typing import NamedTuple


class SandboxPlaces(NamedTuple):
    """Where the classes of a sandbox are, each as "module:class"."""

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
"""Our sandboxes by name. Packages add others, see `factory`."""
