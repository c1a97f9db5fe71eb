"""What a start finds in the place of its run: other files, leftovers of a crash, an earlier run."""

from __future__ import annotations

import errno
import re
import time
from contextlib import suppress
from pathlib import Path

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.directory.run_lock import refuse_held
from batch_trajectories.runs.store.files import (
    is_training_file,
    longest_temporary_for,
    training_file_of,
)


def check_training_file(config: RunConfig) -> None:
    """Raise `ConfigError` if the exports could not be written, or would overwrite the dataset."""
    training = training_file_of(config.run_dir)
    try:
        longest_temporary_for(training).exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ConfigError(
            f"{training}: {error.strerror}; choose a shorter --run_name or --output_dir"
        ) from error
    if is_training_file(config.dataset_file, config.run_dir):
        raise ConfigError(
            f"{config.dataset_file}: the training file of this run would overwrite this dataset; "
            "choose another --run_name or --output_dir"
        )
    if training.is_dir():
        raise ConfigError(
            f"{training}: the training file of this run has this name, but it is a directory; "
            "choose another --run_name or --output_dir"
        )


def look_at_place(config: RunConfig, *, fresh: bool) -> None:
    """Before a start is planned: refuse a run in progress, and bring one that only a mirror has.

    Raises `RunLocked`, and what `bring` raises.
    """
    refuse_held(config.run_dir)
    if config.mirror is not None and not fresh:
        from batch_trajectories.runs.mirror.copies import bring  # most runs have none

        bring(config.mirror, config.run_dir)


def stale_files_of(path: Path) -> list[Path]:
    """Temporary files that a crash has left in a run directory or beside it."""
    inside = (path, path / "exports", path / "inflight", path / "quarantine")
    temporary = [file for directory in inside for file in sorted(directory.glob(".*.tmp"))]
    stale = [file for file in temporary if not file.is_dir()]
    beside = re.compile(rf"\.{re.escape(path.name)}(\.fork(\.\d+)?)?\.jsonl\.\d+(-\d+)?\.tmp")
    return stale + [file for file in path.parent.glob(".*.tmp") if beside.fullmatch(file.name)]


def move_aside(path: Path) -> Path:
    """Rename the directory of a run, and move its training file into it; return the new path."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    aside = path.with_name(f"{path.name}.{stamp}")
    number = 1
    while aside.exists():
        number += 1
        aside = path.with_name(f"{path.name}.{stamp}.{number}")
    path.rename(aside)
    with suppress(FileNotFoundError):
        training = training_file_of(path)
        training.rename(aside / training.name)
    return aside
