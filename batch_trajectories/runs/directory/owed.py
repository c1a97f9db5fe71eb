"""Tasks that have no record, and samples that are no tasks."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.dataset.scan import Scan
from batch_trajectories.runs.store.failures import load_failed_attempts
from batch_trajectories.runs.store.index import Index
from batch_trajectories.runs.store.journal import read_journaled_replies
from batch_trajectories.runs.store.records import load_index

if TYPE_CHECKING:
    from batch_trajectories.runs.stopping.outcomes import Samples
    from batch_trajectories.runs.stopping.rule import StoppingRule


class Owed(NamedTuple):
    """Tasks without a record, and samples that are no tasks."""

    failed: int
    """Their last attempt failed."""
    pending: int
    not_needed: int
    """See `RunTotals.not_needed`."""


def owed(run_dir: Path, scan: Scan, config: RunConfig | None, without: Iterable[int]) -> Owed:
    """What a manifest says of the task numbers `without` a record; without `config` all count."""
    failed_attempts = load_failed_attempts(run_dir)
    numbers = array("I", without)
    samples = None
    if config is not None and config.until_passed is not None:
        begun = read_journaled_replies(run_dir / "inflight").tasks
        index = load_index(run_dir)
        rows, _ = index.match(scan.keys)
        samples = needed_samples(run_dir, config, scan, index, rows, begun=begun)
    tasks = [n for n in numbers if samples is None or samples.is_task(n)]
    failed = sum(scan.key(number) in failed_attempts for number in tasks)
    return Owed(failed, len(tasks) - failed, len(numbers) - len(tasks))


def needed_samples(
    run_dir: Path,
    config: RunConfig,
    scan: Scan,
    index: Index,
    rows: array[int],
    *,
    begun: Container[bytes],
) -> Samples | None:
    """Which samples are needed; None without `--until_passed`: all of them. See `samples_of`."""
    if config.until_passed is None:
        return None
    from batch_trajectories.runs.stopping.outcomes import samples_of

    return samples_of(run_dir, config, scan, index, rows, begun=begun)


def stopping_rule(config: RunConfig | None) -> StoppingRule | None:
    """The rule of `--until_passed`; None without that, or without a config."""
    if config is None or config.until_passed is None:
        return None
    from batch_trajectories.runs.stopping.rule import rule_of  # most runs have none

    return rule_of(config)
