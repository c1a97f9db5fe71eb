"""The sandboxes that a run's options ask for, on the machine that this runs on."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from batch_trajectories.basics.errors import ConfigError, ToolError
from batch_trajectories.config.run_config import RunConfig
from toolsets.sandbox import factory
from toolsets.sandbox.base import SandboxError
from toolsets.sandbox.factory import NO_AGENTS, sandbox_kind, sandbox_problem

if TYPE_CHECKING:
    from toolsets.sandbox.image_files import ImageSandboxes

log = logging.getLogger(__name__)


def image_sandboxes(config: RunConfig) -> ImageSandboxes:
    """How the conversations of a run work in images; raises `SandboxError` if they cannot."""
    if (made := _in_images(config)) is None:
        raise SandboxError(
            f"sandbox {config.sandbox}: it cannot work in images; use --sandbox=bwrap or docker, "
            "or leave --workspace=image out"
        )
    return made


def problem_of_sandbox(config: RunConfig) -> str | None:
    """Why the sandbox of a run does not work here, and what to do; None where it does."""
    try:
        if config.agent is not None and not sandbox_kind(config.sandbox).takes_extras:
            return f"sandbox {config.sandbox}: {NO_AGENTS}"
        if config.is_inside:
            return image_sandboxes(config).problem()
    except SandboxError as error:
        return str(error)
    return sandbox_problem(config.sandbox, config.sandbox_settings())


def warning_of_sandbox(config: RunConfig) -> str | None:
    """What makes the images of a run slow here; None if nothing does, or it uses none."""
    made = _in_images(config) if config.uses_images else None
    return None if made is None else made.warning()


def replaced_images(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """The digests of those images that are others now than `known`; missing ones do not count."""
    digests = _digests(config, known) if known else {}
    return {name: digest for name, digest in digests.items() if digest != known[name]}


def image_digest(config: RunConfig, reference: str) -> str | None:
    """The digest of an image that conversations use; None where it is not there or has no name."""
    return _digests(config, [reference]).get(reference)


def replaced_during_run(known: dict[str, str], reference: str, digest: str) -> str | None:
    """Why an image cannot be used that is not the `known` one; else it is known from now on."""
    before = known.setdefault(reference, digest)
    if before == digest:
        return None
    return f"image {reference!r} was replaced during the run: it was {before}, now it is {digest}"


def _digests(config: RunConfig, references: Collection[str]) -> dict[str, str]:
    made = _in_images(config)
    return {} if made is None else made.digests(references)


def _in_images(config: RunConfig) -> ImageSandboxes | None:
    settings, run_dir = config.sandbox_settings(), config.run_dir.absolute()
    return factory.image_sandboxes(config.sandbox, settings, run_dir)


def remove_leftover_containers(config: RunConfig) -> None:
    """Remove containers that no conversation uses, left by a crash; logs what fails."""
    try:
        made = _in_images(config) if config.uses_images else None
        if made is not None and (count := made.remove_leftovers()):
            log.info("removed %d containers that no conversation uses", count)
    except (ToolError, ConfigError) as error:
        log.warning("containers were not removed: %s", error)
