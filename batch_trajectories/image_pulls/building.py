"""Builds the images of Harbor tasks from their Dockerfiles, with Docker or Podman."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.basics.text import plural
from batch_trajectories.dataset.harbor import HarborTask
from toolsets.images.names import ImageError
from toolsets.sandbox.containers.engine import build_image, docker_problem, save_image


class ImageBuild(NamedTuple):
    """An image that a task has built for it."""

    image: str
    """The name of the image, which changes with the files of the task that it is built from."""
    task: HarborTask
    dockerfile: Path


def list_builds(tasks: Iterable[HarborTask]) -> dict[str, ImageBuild]:
    """List the images that must be built for tasks and their checks, by name.

    Raises `OSError` if a file of a task cannot be read.
    """
    return {
        image: ImageBuild(image, task, dockerfile)
        for task in tasks
        for image, dockerfile in task.dockerfiles.items()
    }


def check_engine(builds: Mapping[str, ImageBuild], engine: str) -> None:
    """Raise `EnvironmentStop` if there is something to build, and the engine does not work."""
    if builds and (problem := docker_problem(None, engine)):
        raise EnvironmentStop(f"{plural(len(builds), 'image')} must be built: {problem}")


def build_all(builds: Mapping[str, ImageBuild], engine: str, directory: Path | None) -> int:
    """Build images, one after the other, and say which and which failed; return how many failed.

    The engine keeps an image that it has. With `directory`, each image is added to the OCI layout
    there, too. A build that fails does not stop the others.
    """
    failed = 0
    for number, build in enumerate(builds.values(), start=1):
        say(f"{number} of {len(builds)}: {build.image}")
        try:
            build_image(
                engine,
                build.image,
                build.dockerfile.parent,
                build.dockerfile,
                timeout_s=build.task.build_timeout_s,
            )
            if directory is not None:
                save_image(engine, build.image, directory)
        except ImageError as error:
            failed += 1
            say(f"{build.task.id}: {error}")
    return failed
