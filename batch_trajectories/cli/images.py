"""The command `images`: fetches the images that the rows of a dataset name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batch_trajectories.basics.console import say, show
from batch_trajectories.cli.command_line import LocalPath, PlacePath, RunCommand
from batch_trajectories.cli.exit_codes import errors_as_exit_codes, fail
from batch_trajectories.cli.shared import output_dir_option, trust_option

if TYPE_CHECKING:
    from batch_trajectories.config.run_config import RunConfig

_OPTIONS = ("images", "registry", "docker_image", "rows", "columns", "max_samples")
_OF_RUNS = ("images", "registry", "docker_image")
"""Options that are those of the run if they are not given."""
_REASONS = 20


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
    kill. Runs with --pull=missing do the same while they work. Exit code 1 if an image failed.
    """
    from batch_trajectories.basics.errors import ConfigError, EnvironmentStop, HostError, RunError
    from batch_trajectories.basics.event_loop import run_coroutine
    from batch_trajectories.image_pulls.command import fetch_images
    from toolsets.images.names import ImageError

    given = {name: value for name, value in flags.items() if value is not None}
    with errors_as_exit_codes():
        config, references = _read_source(
            source, config_file, output_dir, trust_run=trust_run, given=given
        )
        if config.images is None:
            raise ConfigError("--images: give the directory that gets the images")
        try:
            outcome = run_coroutine(fetch_images(config, references))
        except ImageError as error:
            raise RunError(str(error)) from error
        except HostError as error:
            raise EnvironmentStop(str(error)) from error
    show(outcome.describe(str(source)))
    for reason in outcome.errors[:_REASONS]:
        say(reason)
    if failed := len(outcome.errors):
        more = f"; the first {_REASONS} are above" if failed > _REASONS else ""
        fail(f"{failed} of {outcome.total} images could not be fetched{more}", 1)


def _read_source(
    source: Path,
    config_file: Path | None,
    output_dir: Path,
    *,
    trust_run: bool,
    given: dict[str, Any],
) -> tuple[RunConfig, Iterator[str]]:
    """The options, and the names of the images in the order of the rows."""
    from batch_trajectories.basics.errors import ConfigError
    from batch_trajectories.basics.validation import is_url
    from batch_trajectories.config.loading import load_config
    from batch_trajectories.engine.run_dir import find_run_dir
    from batch_trajectories.image_pulls import command
    from batch_trajectories.records.names import RUN_FILE

    if is_url(source) or not (find_run_dir(source, output_dir) / RUN_FILE).exists():
        fixed = {"dataset_file": str(source), "run_name": "images", "workspace": "image"}
        config = load_config(config_file, {**given, **fixed})
        return config, command.images_of_dataset(config)
    if config_file is not None or (extra := given.keys() - set(_OF_RUNS)):
        named = "config" if config_file is not None else ", --".join(sorted(extra))
        raise ConfigError(f"--{named}: {source} is a run, which has its own rows and config")
    from batch_trajectories.api.stored_run import open_run
    from batch_trajectories.engine import origin

    stored = open_run(source, output_dir)
    options: dict[str, Any] = stored.identity["config"]
    if not stored.is_own:
        used = {name: options[name] for name in _OF_RUNS if name in options}
        if trust_run:
            say(origin.describe_trust(stored.path, used, given=given))
        else:
            if unused := origin.describe_unused(stored.path, used, given=given):
                say(unused)
            options = {k: v for k, v in options.items() if k not in origin.ACTIVE}
            options["dataset_file"] = stored.identity["config"]["dataset_file"]
    config = load_config(None, {**options, **given, "workspace": "image"})
    return config, command.images_of_run(stored.scan, config)
