"""The sandboxes that the options of a run name, on this machine."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from batch_trajectories.basics.errors import ConfigError, ToolError
from batch_trajectories.basics.text import plural
from batch_trajectories.config.run_config import RunConfig
from toolsets.sandbox import factory
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.factory import NO_AGENTS, find_sandbox_class, sandbox_problem

if TYPE_CHECKING:
    from toolsets.sandbox.image_files import ImageSandboxes

log = logging.getLogger(__name__)


def image_sandboxes(config: RunConfig) -> ImageSandboxes:
    """Sandboxes in which conversations work in images. Raises `SandboxError` if there are none."""
    if (sandboxes := _image_sandboxes(config)) is None:
        raise SandboxError(
            f"sandbox {config.sandbox}: it cannot work in images; use --sandbox=bwrap or docker, "
            "or leave --workspace=image out"
        )
    return sandboxes


def find_sandbox_problem(config: RunConfig) -> str | None:
    """The reason why the sandbox of a run does not work here, with advice; None if it works."""
    try:
        if config.agent is not None and not find_sandbox_class(config.sandbox).takes_extras:
            return f"sandbox {config.sandbox}: {NO_AGENTS}"
        if config.is_inside:
            return image_sandboxes(config).problem()
    except SandboxError as error:
        return str(error)
    return sandbox_problem(config.sandbox, config.sandbox_settings())


def find_sandbox_warning(config: RunConfig) -> str | None:
    """A warning that the images of a run are slow here; None if they are not, or not used."""
    sandboxes = _image_sandboxes(config) if config.uses_images else None
    return None if sandboxes is None else sandboxes.warning()


def has_overlays(config: RunConfig) -> bool:
    """Whether conversations on this machine share the files of their images by overlays."""
    sandboxes = _image_sandboxes(config) if config.is_inside else None
    return sandboxes is not None and sandboxes.has_overlays()


def replaced_images(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Digests of the images that have changed since `known`; missing images are left out."""
    digests = _digests(config, known) if known else {}
    return {name: digest for name, digest in digests.items() if digest != known[name]}


def image_digest(config: RunConfig, reference: str) -> str | None:
    """The digest of an image; None if the image is missing, or conversations use no images."""
    return _digests(config, [reference]).get(reference)


def check_image_digest(known: dict[str, str], reference: str, digest: str) -> str | None:
    """Refuse an image whose digest is not the known one; add the digest of a new image.

    Returns the reason to refuse the image; None if it can be used.
    """
    before = known.setdefault(reference, digest)
    if before == digest:
        return None
    return f"image {reference!r} was replaced during the run: it was {before}, now it is {digest}"


def _digests(config: RunConfig, references: Collection[str]) -> dict[str, str]:
    sandboxes = _image_sandboxes(config)
    return {} if sandboxes is None else sandboxes.digests(references)


def _image_sandboxes(config: RunConfig) -> ImageSandboxes | None:
    settings, run_dir = config.sandbox_settings(), config.run_dir.absolute()
    return factory.image_sandboxes(config.sandbox, settings, run_dir)


def remove_leftover_containers(config: RunConfig) -> None:
    """Remove containers that no conversation uses, left by a crash; logs what fails."""
    try:
        sandboxes = _image_sandboxes(config) if config.uses_images else None
        if sandboxes is not None and (count := sandboxes.remove_leftovers()):
            log.info("Removed %s that no conversation uses.", plural(count, "container"))
    except (ToolError, ConfigError) as error:
        log.warning("Containers that no conversation uses could not be removed and stay: %s", error)
