"""What a start finds in the place of its run: leftovers of a crash, or a run to move aside."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path

from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.directory.run_lock import refuse_held
from batch_trajectories.runs.store.files import training_file_of


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
