"""The command `build_images`: the images of Harbor tasks that have a Dockerfile."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from batch_trajectories.basics.console import show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath
from batch_trajectories.cli.exit_codes import errors_as_exit_codes, fail
from toolsets.sandbox import Engine


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
    directories. An image is built again only if its sources have changed. `images` builds them as
    well, and fetches the images that tasks name.
    """
    from batch_trajectories.basics.errors import DatasetError
    from batch_trajectories.dataset.harbor import tasks_in
    from batch_trajectories.dataset.row_conversation import ERROR_COLUMN
    from batch_trajectories.image_pulls.building import build_all, check_engine, list_builds

    with errors_as_exit_codes():
        source_tasks = tasks_in(tasks)
        if not source_tasks:
            raise DatasetError(f"{tasks}: no task directory: none holds a task.toml")
        builds = list_builds(source_tasks)
        building = {build.task.id for build in builds.values()}
        refused = sum(ERROR_COLUMN in task.row() for task in source_tasks)
        check_engine(builds, container_engine)
        if save is not None:
            save.mkdir(parents=True, exist_ok=True)
        failed = build_all(builds, container_engine, save)
        done = plural(len(builds) - failed, "image")
        named = plural(len(source_tasks) - len(building) - refused, "task")
        show(
            f"{tasks}: {done} built or there already, {failed} failed; "
            f"{named} naming an image, {plural(refused, 'task')} that cannot run (see `look`)"
        )
    if failed:
        fail(f"{plural(failed, 'image')} could not be built", 1)
