"""Whether the training file of a run can be written, and overwrites no dataset."""

from __future__ import annotations

import errno

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.runs.config.run_config import RunConfig
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
