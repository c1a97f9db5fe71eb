"""The scan of the dataset of a run on disk, as the last start of the run made it.

Reads only. A command that shows a run needs this, but not what verifies or repairs runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.dataset.scan_cache import last_scan
from batch_trajectories.dataset.shards import parse_shard
from batch_trajectories.engine.origin import describe_received
from batch_trajectories.engine.run_dir import was_started_here
from batch_trajectories.records.names import DATASET_INDEX, MIRRORED_DATASET, RUN_FILE


def load_scan(path: Path, identity: dict[str, Any], config: RunConfig) -> Scan:
    """The scan of the dataset of the run in `path`. Raises `DatasetError`."""
    arguments = scan_arguments(path, identity, config)
    made = last_scan(path / DATASET_INDEX, dataset=identity["dataset"], **arguments)
    return refuse_foreign_dataset(made, path, identity)


def refuse_foreign_dataset(made: Scan, path: Path, identity: dict[str, Any]) -> Scan:
    """Return the scan of a dataset that belongs to the run.

    A run that was received from somebody may use a dataset outside of its directory only if the
    dataset has the content that the run was made of: its run.json could name any file of this
    machine. Raises `DatasetError`.
    """
    is_inside = made.path.resolve().is_relative_to(path.resolve())
    is_same = made.sha256 == identity["dataset"].get("sha256")
    if is_inside or is_same or not (path / RUN_FILE).exists() or was_started_here(path):
        return made
    raise DatasetError(
        f"{describe_received(path)}. Its run.json names {made.path}, which is not the dataset that "
        f"the run was made of. Put the right one into the run directory as {MIRRORED_DATASET}"
    )


def scan_arguments(path: Path, identity: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """The arguments with which the last start of the run in `path` scanned its dataset."""
    dataset = identity["dataset"]
    file = Path(dataset["path"])
    if dataset.get("source") is not None and (path / file.name).exists():
        file = path / file.name  # the run may have been moved or copied
    elif not file.exists() and (path / MIRRORED_DATASET).exists():
        file = path / MIRRORED_DATASET
    elif not file.exists() and (inside := path / file.parent.name / file.name).exists():
        file = inside  # of an import or a recording
    return {
        "path": file,
        "max_samples": config.max_samples,
        "rules": config.row_rules(
            identity["api"],
            is_priced=dataset.get("is_priced", True),
            toolsets=dataset.get("toolsets"),
            user_toolsets=dataset.get("user_toolsets", ()),
        ),
        "num_samples": config.num_samples,
        "shard": None if config.shard is None else parse_shard(config.shard),
    }
