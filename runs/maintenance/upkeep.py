"""What an operator does to a run that nobody works on: check it, repair it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan, scan
from runs.dataset.scan_cache import NAME, cached_scan
from runs.errors import DatasetError
from runs.maintenance.problem import Problem
from runs.maintenance.repair import describe_remaining, repair_run
from runs.maintenance.verify import Report, verify
from runs.process.console import say
from runs.run_lock import locked, refuse_held
from runs.shards import parse_shard
from runs.sources.kept_dataset import KeptDataset, keep_dataset
from runs.store.records import UnreadableRecord

MakeExports = Callable[[Path, Scan, RunConfig], object]
"""Writes training files and summary of the run in a directory."""

_NOT_SHADOWED = ("exports", "records.idx", "summary.json", "statistics.json", "lock", "run.log")
"""What is derived from the rest, or is no part of it."""


@dataclass(frozen=True, slots=True)
class Checked:
    """How a run was found and left."""

    path: Path
    records: int
    """Whole records."""
    found: list[Problem]
    left: list[Problem]
    """Those after the repair, if there was one."""
    repaired: bool
    owed: str
    """What the same command would run now, in words; "" if nothing."""

    def as_json(self) -> str:
        """For `--json`."""
        told = {
            "run_dir": str(self.path),
            "clean": not self.left,
            "records": self.records,
            "problems": [problem.to_json() for problem in self.found],
            "left": [problem.to_json() for problem in self.left],
            "owed": self.owed,
        }
        return orjson.dumps(told, option=orjson.OPT_INDENT_2).decode()

    def describe(self) -> str:
        """For a person: a line per problem, then the verdict, then what is owed."""
        lines = [problem.describe() for problem in self.found]
        if self.repaired:
            lines.append(f"{self.path}: repaired; what was set aside is in quarantine/")
            lines += [f"left: {problem.describe()}" for problem in self.left]
        if not self.left:
            lines.append(f"{self.path}: {self.records:,} records, whole; all files agree with them")
        elif not self.repaired:
            lines.append(f"{self.path}: {len(self.left):,} problems; --repair mends what it can")
        return "\n".join([*lines, self.owed] if self.owed else lines)


def check(
    path: Path,
    identity: dict[str, Any],
    config: RunConfig,
    *,
    read_data: bool,
    repair: bool,
    make: MakeExports,
) -> Checked:
    """Check a run and, if asked, repair it.

    `read_data` compares the training files with what `make` writes from the same records. Raises
    `RunLocked` while a process works on the run, `StorageError` where a repair cannot be written.
    """
    make_twin = make if read_data else None
    if repair:
        with locked(path):
            report, scan = _verified(path, identity, config, make_twin)
            found = report.problems
            if found:
                repair_run(path, report, config)
                if scan is not None:
                    make(path, scan, config)
                report, scan = _verified(path, identity, config, make_twin)
    else:
        refuse_held(path)
        report, scan = _verified(path, identity, config, make_twin)
        found = report.problems
        refuse_held(path)  # what was read while somebody began to write says nothing
    owed = "" if scan is None else describe_remaining(path, scan, config)
    return Checked(path, report.records, found, report.problems, repair and bool(found), owed)


def scan_of(path: Path, identity: dict[str, Any], config: RunConfig) -> Scan:
    """What a scan of the dataset gives the run in directory `path`. Raises `DatasetError`."""
    return cached_scan(path / NAME, **_scanned(identity, config))


def keep_given(identity: dict[str, Any], config: RunConfig) -> KeptDataset:
    """The dataset that `config` names, as JSONL in a temporary directory if it is something else.

    Raises what `keep_dataset` raises.
    """
    scanned = _scanned(identity, config)
    return keep_dataset(
        config.dataset_file,
        config.run_dir,
        columns=config.columns,
        rules=scanned["rules"],
        max_samples=config.max_samples,
        writes=False,
        say=say,
    )


def _scanned(identity: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """How the last start of a run scanned its dataset."""
    dataset = identity["dataset"]
    return {
        "path": Path(dataset["path"]),
        "max_samples": config.max_samples,
        "rules": config.row_rules(
            identity["api"],
            is_priced=dataset.get("is_priced", True),
            toolsets=dataset.get("toolsets"),
        ),
        "num_samples": config.num_samples,
        "shard": None if config.shard is None else parse_shard(config.shard),
    }


def _verified(
    path: Path, identity: dict[str, Any], config: RunConfig, make: MakeExports | None
) -> tuple[Report, Scan | None]:
    try:
        found = scan(**_scanned(identity, config))
    except DatasetError as error:
        return verify(path, identity, str(error), config, made=None), None
    if make is None:
        return verify(path, identity, found, config, made=None), found
    with _shadow_of(path) as made:
        twin: Path | None = made
        try:
            make(made, found, config)
        except UnreadableRecord:
            twin = None  # the records are looked at one by one, and nothing is made of these
        return verify(path, identity, found, config, made=twin), found


@contextmanager
def _shadow_of(path: Path) -> Iterator[Path]:
    """A directory that stands for a run while its exports are made anew, from the records alone.

    It lies among the temporary files of the system and needs room for the exports.
    """
    with TemporaryDirectory(prefix="verify-") as place:
        shadow = Path(place) / path.name
        shadow.mkdir()
        for entry in path.resolve().iterdir():
            if entry.name not in _NOT_SHADOWED:
                (shadow / entry.name).symlink_to(entry)
        yield shadow
