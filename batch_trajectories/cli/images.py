"""The command `images`: fetches and builds the images that the rows of a dataset need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.basics.text import plural
from batch_trajectories.cli.command_line import LocalPath, PlacePath, RunCommand
from batch_trajectories.cli.exit_codes import errors_as_exit_codes, fail
from batch_trajectories.cli.shared import output_dir_option, trust_option

if TYPE_CHECKING:
    from batch_trajectories.config.run_config import RunConfig
    from batch_trajectories.image_pulls.building import ImageBuild

_OPTIONS = (
    "images",
    "registry",
    "docker_image",
    "container_engine",
    "rows",
    "columns",
    "max_samples",
)
_RUN_OPTIONS = ("images", "registry", "docker_image", "container_engine")
"""Options that are those of the run if they are not given."""
_MAX_LISTED_ERRORS = 20


@click.command(cls=RunCommand, name="images", only=_OPTIONS)
@click.argument("source", type=PlacePath(path_type=Path), metavar="RUN|DATASET")
@click.option(
    "--config",
    "config_file",
    type=LocalPath(path_type=Path),
    help="Preset or YAML file of options, for a DATASET; flags win over it.",
)
@output_dir_option
@trust_option
def images(
    source: Path, config_file: Path | None, output_dir: Path, trust_run: bool, **flags: Any
) -> None:
    """Fetch the images of a dataset from their registries into --images=DIR.

    No daemon is needed. Images that are there are kept, and the same command continues after a
    kill. Runs with --pull=missing fetch them while they work. Images of Harbor tasks that have a
    Dockerfile are built with --container_engine. Exit code 1 if an image failed.
    """
    from batch_trajectories.basics.errors import ConfigError, EnvironmentStop, HostError, RunError
    from batch_trajectories.image_pulls.command import bring_images
    from toolsets.images.names import ImageError

    given = {name: value for name, value in flags.items() if value is not None}
    with errors_as_exit_codes():
        wanted = _read_source(source, config_file, output_dir, trust_run=trust_run, given=given)
        if wanted.config.images is None:
            raise ConfigError("--images: give the directory that gets the images")
        try:
            outcome = bring_images(wanted.config, wanted.references, wanted.builds)
        except ImageError as error:
            raise RunError(str(error)) from error
        except HostError as error:
            raise EnvironmentStop(str(error)) from error
    show(outcome.describe(str(source)))
    for reason in outcome.errors[:_MAX_LISTED_ERRORS]:
        say(reason)
    if failed := len(outcome.errors):
        more = f"; the first {_MAX_LISTED_ERRORS} are above" if failed > _MAX_LISTED_ERRORS else ""
        say(f"{failed} of {outcome.total} images could not be fetched{more}")
    if unbuilt := outcome.unbuilt:
        say(f"{unbuilt} of {outcome.total} images could not be built; the reasons are above")
    if failed or unbuilt:
        fail("images are missing; the same command tries them again", 1)


class _Wanted(NamedTuple):
    """The images that a command is to bring."""

    config: RunConfig
    references: Iterator[str]
    """Names of images that are fetched, in the order of the rows."""
    builds: Mapping[str, ImageBuild]
    """Images that are built, by name."""


def _read_source(
    source: Path,
    config_file: Path | None,
    output_dir: Path,
    *,
    trust_run: bool,
    given: dict[str, Any],
) -> _Wanted:
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.validation import is_url
    from batch_trajectories.config.loading import load_config
    from batch_trajectories.engine.run_dir import find_run_dir
    from batch_trajectories.image_pulls import command
    from batch_trajectories.records.names import RUN_FILE

    if is_url(source) or not (find_run_dir(source, output_dir) / RUN_FILE).exists():
        fixed = {"dataset_file": str(source), "run_name": "images", "workspace": "image"}
        config = load_config(config_file, {**given, **fixed})
        return _Wanted(
            config, command.list_dataset_images(config), command.list_dataset_builds(config)
        )
    if config_file is not None or (extra := given.keys() - set(_RUN_OPTIONS)):
        named = "config" if config_file is not None else ", --".join(sorted(extra))
        raise ConfigError(f"--{named}: {source} is a run, which has its own rows and config")
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine import origin

    stored = open_run(source, output_dir)
    options: dict[str, Any] = stored.identity["config"]
    if not stored.is_own:
        run_options = {name: options[name] for name in _RUN_OPTIONS if name in options}
        if trust_run:
            say(origin.describe_trust(stored.path, run_options, given=given))
        else:
            if unused := origin.describe_unused(stored.path, run_options, given=given):
                say(unused)
            options = {k: v for k, v in options.items() if k not in origin.ACTIVE}
            options["dataset_file"] = stored.identity["config"]["dataset_file"]
    config = load_config(None, {**options, **given, "workspace": "image"})
    builds = command.list_dataset_builds(config)
    if builds and not stored.is_own and not trust_run:
        # A Dockerfile is a program, and a run from elsewhere names where it is.
        raise ConfigError(
            f"{stored.path}: the run was not started here, and {plural(len(builds), 'image')} "
            f"would be built from the Dockerfiles in {config.dataset_file}; give --trust_run, or "
            "give the directory of tasks in place of the run"
        )
    return _Wanted(config, command.list_run_images(stored.scan, config), builds)
