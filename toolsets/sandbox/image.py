"""What a conversation is to start from: a container image, and how to work in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from toolsets.sandbox.base import Extras, Limits
    from toolsets.sandbox.image_files import ImageSandbox
    from toolsets.workspace.workspace import Workspace


@dataclass(frozen=True, slots=True)
class ImageSpec:
    """A container image and what a row or an option says about working in it.

    What is None or empty is as the image's own configuration has it.
    """

    reference: str
    """A name as `docker.io/org/name:tag`, or a digest as `sha256:...`."""
    workdir: str | None = None
    """The directory of the image that is the workspace, an absolute path."""
    user: str | None = None
    """`name`, `uid`, `name:group` or `uid:gid`."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the image's."""
    network: bool = False
    """Commands may reach the network."""
    starts_entrypoint: bool = True
    """The image's ENTRYPOINT runs beside commands."""


class ImageSandboxes(ABC):
    """Makes the sandboxes of the conversations of a run that work in images."""

    @abstractmethod
    def problem(self) -> str | None:
        """Return None if images can be used here, else one sentence that says what to do."""

    def problem_of_image(self, reference: str) -> str | None:
        """Why there is no image of this name; None also where only a start can tell."""
        del reference
        return None

    @abstractmethod
    def digests(self, references: Collection[str]) -> dict[str, str]:
        """The digests of those images that are here; see `ImageSandbox.image_digest`.

        Raises `SandboxError`.
        """

    def warning(self) -> str | None:
        """What makes images slow here; None if nothing does."""
        return None

    @abstractmethod
    def make(
        self, workspace: Workspace, limits: Limits, spec: ImageSpec, extras: Extras | None = None
    ) -> ImageSandbox:
        """Return the sandbox of one conversation; waits until its image is there.

        Raises `ImageError` where the image is missing, damaged or cannot be used, `HostError`, and
        `SandboxError`.
        """

    def remove_leftovers(self) -> int:
        """Remove containers of conversations that have ended; return how many there were.

        Raises `SandboxError`.
        """
        return 0
