"""What a conversation is to start from: a container image, and how to work in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
