"""Verify a run that is not in progress, and repair it.

Repairing again finishes a repair that a crash interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import DatasetError
from batch_trajectories.basics.text import plural
from batch_trajectories.batch_api.verifying import repair_batches
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.sandboxes import remove_leftover_containers
from batch_trajectories.dataset.kept_dataset import DatasetSnapshot, take_snapshot
from batch_trajectories.dataset.scan import Scan, scan, tasks
from batch_trajectories.engine.narrowing import refuse_narrowing
from batch_trajectories.engine.run_dir import find_stale_files, hold_lock, refuse_held
from batch_trajectories.engine.run_totals import needed_samples
from batch_trajectories.engine.stored_scan import load_scan, refuse_foreign_dataset, scan_arguments
from batch_trajectories.engine.supervisor.budget import set_aside_damaged
from batch_trajectories.maintenance.verify import Report
from batch_trajectories.records.failures import NO_LIMIT, Settled, is_settled
from batch_trajectories.records.files import (
    is_whole,
    lock_for_append,
    refuse_links,
    set_unreadable_aside,
)
from batch_trajectories.records.journal import Inflight, read_journaled_replies
from batch_trajectories.records.names import (
    BATCHES,
    CONTROL_FILE,
    DATASET_INDEX,
    EXPORTS,
    INFLIGHT,
    LABELS_FILE,
    LOCK_FILE,
    LOG_FILE,
    QUARANTINE,
    RECORDS_FILE,
    RECORDS_INDEX,
    SCORES_FILE,
    STATISTICS_FILE,
    SUMMARY_FILE,
    TEACHER_FILE,
    VERDICTS_FILE,
    WORKSPACES,
)
from batch_trajectories.records.problem import Problem
from batch_trajectories.records.records import (
    RecordFile,
    UnreadableRecord,
    load_index,
    quarantine_lines,
)
from toolsets.workspace.removal import remove_tree

MakeExports = Callable[[Path, Scan, RunConfig], object]
"""Writes the training files and summary of the run in a directory."""

_NOT_COPIED = (EXPORTS, RECORDS_INDEX, SUMMARY_FILE, STATISTICS_FILE, LOCK_FILE, LOG_FILE)
"""Derived files, and files that are not part of the data."""


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The result of `check`."""

    path: Path
    records: int
    """Number of whole records."""
    found: list[Problem]
    left: list[Problem]
    """Problems after the repair; without a repair, those found."""
    repaired: bool
    owed: str
    """The tasks that the same command would run now; see `describe_remaining`."""

    def as_json(self) -> str:
        """The result as `--json` shows it."""
        content = {
            "run_dir": str(self.path),
            "clean": not self.left,
            "records": self.records,
            "problems": [problem.to_json() for problem in self.found],
            "left": [problem.to_json() for problem in self.left],
            "owed": self.owed,
        }
        return orjson.dumps(content, option=orjson.OPT_INDENT_2).decode()

    def describe(self) -> str:
        """The result for a person: a line per problem, a summary, and the remaining tasks."""
        lines = [problem.describe() for problem in self.found]
        if self.repaired:
            lines.append(f"{self.path}: repaired; unreadable data is in quarantine/")
            lines += [f"left: {problem.describe()}" for problem in self.left]
        if not self.left:
            lines.append(f"{self.path}: {plural(self.records, 'record')}, no problems found")
        elif not self.repaired:
            lines.append(
                f"{self.path}: {plural(len(self.left), 'problem')}; `verify {self.path} --repair` "
                "sets unreadable data aside"
            )
        return "\n".join([*lines, self.owed] if self.owed else lines)


def check(
    path: Path,
    identity: dict[str, Any],
    config: RunConfig,
    *,
    read_data: bool,
    repair: bool,
    make: MakeExports,
) -> VerifyResult:
    """Check a run, and repair it if `repair`.

    `read_data` compares the training files with those that `make` writes from the same records.
    Raises `RunLocked` while a process works on the run, `StorageError` if a repair cannot be
    written, `ConfigError` if a repair would shorten the training file, and `RunDirError` for a
    symbolic link in a run to be repaired, as it may lead to files that are not the run's.
    """
    make_again = make if read_data else None
    if repair:
        refuse_links(path)
        with hold_lock(path):
            report, scan = _verify(path, identity, config, make_again)
            problems = report.problems
            if problems:
                if scan is not None:
                    refuse_narrowing(path, scan, config, identity, accepted=())
                repair_run(path, report, config)
                if scan is not None:
                    make(path, scan, config)
                report, scan = _verify(path, identity, config, make_again)
    else:
        refuse_held(path)
        report, scan = _verify(path, identity, config, make_again)
        problems = report.problems
        refuse_held(path)  # if a run has started meanwhile, the result means nothing
    owed = ""
    if scan is not None and (report.may_owe or report.problems):
        owed = describe_remaining(path, scan, config)
    return VerifyResult(
        path=path,
        records=report.records,
        found=problems,
        left=report.problems,
        repaired=repair and bool(problems),
        owed=owed,
    )


def snapshot_dataset(identity: dict[str, Any], config: RunConfig) -> DatasetSnapshot:
    """The dataset that `config` names; if it is not JSONL, a copy in a temporary directory.

    Raises what `take_snapshot` raises.
    """
    from batch_trajectories.audit.only_sound import read_sound_rows

    return take_snapshot(
        config.dataset_file,
        config.run_dir,
        columns=config.columns,
        rows=config.rows,
        rules=scan_arguments(config.run_dir, identity, config)["rules"],
        max_samples=config.max_samples,
        writes=False,
        with_solutions=config.audit,
        only=read_sound_rows(config),
        say=say,
    )


def _verify(
    path: Path, identity: dict[str, Any], config: RunConfig, make: MakeExports | None
) -> tuple[Report, Scan | None]:
    from batch_trajectories.maintenance.verify import verify

    try:
        if make is None:
            scanned = load_scan(path, identity, config)
        else:
            # The saved scan has digests of itself and of the dataset; only a new one proves them.
            scanned = refuse_foreign_dataset(
                scan(**scan_arguments(path, identity, config)), path, identity
            )
    except DatasetError as error:
        return verify(path, identity, str(error), config, made=None), None
    if make is None:
        return verify(path, identity, scanned, config, made=None), scanned
    with _make_linked_copy(path) as copy:
        try:
            make(copy, scanned, config)
        except UnreadableRecord:
            # `verify` names these records; without them there is nothing to compare.
            return verify(path, identity, scanned, config, made=None), scanned
        return verify(path, identity, scanned, config, made=copy), scanned


@contextmanager
def _make_linked_copy(path: Path) -> Iterator[Path]:
    """A temporary run directory with links to the data of a run, to make its exports again.

    It is in the system's temporary directory and needs room for the exports.
    """
    with TemporaryDirectory(prefix="verify-") as directory:
        copy = Path(directory) / path.name
        copy.mkdir()
        for entry in path.resolve().iterdir():
            if entry.name not in _NOT_COPIED:
                (copy / entry.name).symlink_to(entry)
        yield copy


_MAX_LISTED = 20


def repair_run(path: Path, report: Report, config: RunConfig) -> None:
    """Repair the problems in `report` of the run in `path`; the caller holds its lock.

    Raises `StorageError`.

    Unreadable data moves to the quarantine and is never deleted, and nothing readable is lost: of
    several records of a task the one that counts stays, and the others are set aside. `export` and
    the next start rebuild derived files.
    """
    quarantine = path / QUARANTINE
    for file in find_stale_files(path):
        file.unlink()
    # Without an index every record is read, and unreadable ones are set aside.
    (path / RECORDS_INDEX).unlink(missing_ok=True)
    if report.duplicates:
        quarantine_lines(path / RECORDS_FILE, report.duplicates, quarantine)
    records = RecordFile(path, quarantine)
    records.close()
    settled = Settled(records.take_index(), config.max_attempts)
    (path / DATASET_INDEX).unlink(missing_ok=True)
    set_aside_damaged(path)
    for name in (SCORES_FILE, VERDICTS_FILE, TEACHER_FILE):
        set_unreadable_aside(path / name, quarantine, is_whole)
    for file in filter(Path.exists, (path / LABELS_FILE, path / CONTROL_FILE)):
        with lock_for_append(file):
            set_unreadable_aside(file, quarantine, is_whole)
    if (path / INFLIGHT).is_dir():
        Inflight(path / INFLIGHT).read(settled=settled)
    leftovers = [problem.file for problem in report.problems if problem.kind == "leftover"]
    repair_batches(
        path,
        quarantine,
        leftovers=[file for file in leftovers if file.parent == path / BATCHES],
        ended=Settled(load_index(path), NO_LIMIT),
    )
    for file in leftovers:
        if file.parent == path / WORKSPACES:
            remove_tree(file)
    remove_leftover_containers(config)


def describe_remaining(path: Path, scan: Scan, config: RunConfig) -> str:
    """The tasks that the same command would run now, in one line; "" if none."""
    entries = load_index(path)
    rows, _ = entries.match(scan.keys)
    remaining = [
        number
        for number, (row, ending) in enumerate(zip(rows, entries.endings(rows), strict=True))
        if ending is None
        or (ending.status == "failed" and not is_settled(entries.entry(row), config.max_attempts))
    ]
    unfinished = read_journaled_replies(path / INFLIGHT, settled=entries).tasks
    samples = needed_samples(path, config, scan, entries, rows, begun=unfinished)
    if samples is not None:
        remaining = [number for number in remaining if samples.must_run(number)]
    if not remaining:
        return ""
    names = ", ".join(task.id for task in tasks(scan, remaining[:_MAX_LISTED]))
    if (more := len(remaining) - _MAX_LISTED) > 0:
        names += f" and {more:,} more"
    line = f"run the same command again to run {plural(len(remaining), 'task')}: {names}"
    if unfinished:
        turns = sum(replies.turns for replies in unfinished.values())
        line += f"; {len(unfinished)} of them resume after {plural(turns, 'saved turn')}"
    return line
