"""Shards: parts of a dataset by prompt id, for schedulers that start equal jobs.

A hash of its id assigns a prompt to a shard. So jobs need not communicate, added rows move no
other row, and all samples of a prompt are in the same shard.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import first_few

MAX_SHARDS = 100_000

_SHARD = re.compile(r"(\d{1,6})/(\d{1,6})")
_MAX_LISTED = 20


class Shard(msgspec.Struct, frozen=True):
    """One of `count` parts, numbered from 0."""

    index: int
    count: int

    def contains(self, number: int) -> bool:
        """Whether a prompt or row with this hash belongs to the shard."""
        return number % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_shard(text: str) -> Shard:
    """Read "i/n". Raises `ValueError`."""
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r}: write i/n, such as 0/8")
    shard = Shard(int(match[1]), int(match[2]))
    if not 1 <= shard.count <= MAX_SHARDS:
        raise ValueError(f"{text!r}: the number of shards must be 1 to {MAX_SHARDS:,}")
    if shard.index >= shard.count:
        raise ValueError(
            f"{text!r}: shards are numbered from 0 to n-1, here to {shard.count - 1} "
            f"(Slurm: --array=0-{shard.count - 1})"
        )
    return shard


def plain_shard(text: str | None) -> str | None:
    """The normal form of a shard in configs; None for the whole dataset. Raises `ValueError`."""
    shard = None if text is None else parse_shard(text)
    return None if shard is None or shard.count == 1 else str(shard)


def check_shards(
    runs: Sequence[tuple[Path, dict[str, Any]]], *, has_dataset: bool, allow_gaps: bool
) -> None:
    """Check that `runs` (directories with their run.json) are the shards of one dataset.

    Does nothing if none is a shard. `has_dataset`: the user names a dataset with all rows. Raises
    `ConfigError` that names the run that does not match.
    """
    shards = {path: identity["config"].get("shard") for path, identity in runs}
    if not any(shards.values()):
        return
    if whole := [path for path, shard in shards.items() if shard is None]:
        raise ConfigError(
            f"{whole[0]} is not a shard but others are; merge only shards with shards"
        )
    first_path, first = runs[0]
    holders: dict[Shard, Path] = {}
    count = parse_shard(shards[first_path]).count
    for path, identity in runs:
        shard = parse_shard(shards[path])
        if shard.count != count:
            raise ConfigError(
                f"{path} is shard {shard} but {first_path} one of {count}; they do not match"
            )
        if shard in holders:
            raise ConfigError(
                f"{holders[shard]} and {path} are both shard {shard}; merge one of them"
            )
        holders[shard] = path
        if identity["config"]["num_samples"] != first["config"]["num_samples"]:
            raise ConfigError(f"{path}: its num_samples differs from that of {first_path}")
        if identity["dataset"]["sha256"] != first["dataset"]["sha256"] and not has_dataset:
            raise ConfigError(
                f"{path}: its dataset has other rows than that of {first_path}; give a dataset "
                "with all rows by --dataset_file"
            )
    missing = [str(shard) for i in range(count) if (shard := Shard(i, count)) not in holders]
    if missing and not allow_gaps:
        raise ConfigError(
            f"{len(missing)} of {count} shards are missing: {first_few(missing, _MAX_LISTED)}; "
            "name their runs too, or leave their tasks pending with --allow_gaps"
        )
