"""The command `build_images`: the images of Harbor tasks that have a Dockerfile."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes, fail
from toolsets.sandbox.base import Engine


@click.command(name="build_images")
@click.argument("tasks", type=LocalPath(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--container_engine",
    type=click.Choice(get_args(Engine)),
    default="docker",
    help="As for `run`.  [default: docker]",
)
@click.option(
    "--save",
    type=LocalPath(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write the images to DIR as an OCI layout, for --images=DIR.",
)
def build_images(tasks: Path, container_engine: Engine, save: Path | None) -> None:
    """Build the images of Harbor tasks from environment/Dockerfile.

    The images of separate verifiers are built from tests/Dockerfile. TASKS is a directory of task
    directories. An image is built again only if its sources have changed.
    """
    from batch_trajectories.basics.errors import DatasetError, EnvironmentStop
    from batch_trajectories.dataset.harbor import tasks_in
    from batch_trajectories.dataset.row_conversation import ERROR_COLUMN
    from toolsets.images.names import ImageError
    from toolsets.sandbox.containers.engine import build_image, docker_problem, save_image

    with errors_as_exit_codes():
        source_tasks = tasks_in(tasks)
        if not source_tasks:
            raise DatasetError(f"{tasks}: no task directory: none holds a task.toml")
        rows = [task.row() for task in source_tasks]
        wanted = [
            (task, image, dockerfile)
            for task in source_tasks
            for image, dockerfile in task.dockerfiles.items()
        ]
        built = {task.id for task, _, _ in wanted}
        refused = sum(ERROR_COLUMN in row for row in rows)
        if wanted and (problem := docker_problem(None, container_engine)):
            raise EnvironmentStop(problem)
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
        failed = 0
        for number, (task, image, dockerfile) in enumerate(wanted, start=1):
            say(f"{number} of {len(wanted)}: {image}")
            try:
                build_image(
                    container_engine,
                    image,
                    dockerfile.parent,
                    dockerfile,
                    timeout_s=task.build_timeout_s,
                )
                if save is not None:
                    save_image(container_engine, image, save)
            except ImageError as error:
                failed += 1
                say(f"{task.id}: {error}")
        done = plural(len(wanted) - failed, "image")
        named = plural(len(source_tasks) - len(built) - refused, "task")
        show(
            f"{tasks}: {done} built or there already, {failed} failed; "
            f"{named} naming an image, {plural(refused, 'task')} that cannot run (see `look`)"
        )
    if failed:
        fail(f"{plural(failed, 'image')} could not be built", 1)
