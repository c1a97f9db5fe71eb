"""The sandboxes that a run's options ask for, on the machine that this runs on."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.runs.config.run_config import RunConfig
from toolsets.sandbox.docker import remove_containers
from toolsets.sandbox.factory import ImageSandboxes, sandbox_problem

log = logging.getLogger(__name__)


def image_sandboxes(config: RunConfig) -> ImageSandboxes:
    """How the conversations of a run work in images."""
    return ImageSandboxes(
        config.sandbox,
        run_dir=config.run_dir.absolute(),
        images=config.images if config.sandbox == "bwrap" else None,
        engine=config.container_engine,
        pull=config.pull,
    )


def problem_of_sandbox(config: RunConfig) -> str | None:
    """Why the sandbox of a run does not work here, and what to do; None where it does."""
    if config.is_inside:
        return image_sandboxes(config).problem()
    return sandbox_problem(
        config.sandbox, image=config.docker_image, engine=config.container_engine
    )


def replaced_images(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """The digests of those images that are others now than `known`; missing ones do not count."""
    found = image_sandboxes(config).digests(known) if known else {}
    return {name: digest for name, digest in found.items() if digest != known[name]}


def remove_leftover_containers(config: RunConfig) -> None:
    """Remove containers of conversations that have ended, left by a crash; logs what fails."""
    if not config.is_inside or config.sandbox != "docker":
        return
    try:
        if count := remove_containers(config.container_engine, config.run_dir):
            log.info("removed %d containers of conversations that have ended", count)
    except ToolError as error:
        log.warning("containers were not removed: %s", error)
