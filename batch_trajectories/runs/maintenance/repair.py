"""Repair a run directory: unreadable data moves to the quarantine and is never deleted.

Nothing readable is lost: of several records of a task the one that counts stays, and the others
are set aside. `export` and the next start rebuild derived files.
"""

from __future__ import annotations

from pathlib import Path

from batch_trajectories.basics.text import plural
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.config.sandboxes import remove_leftover_containers
from batch_trajectories.runs.dataset.scan import Scan, tasks
from batch_trajectories.runs.dataset.scan_cache import NAME
from batch_trajectories.runs.directory.run_dir import stale_files_of
from batch_trajectories.runs.maintenance.verify import Report
from batch_trajectories.runs.maintenance.verify_batches import repair_batches
from batch_trajectories.runs.store.checksum import is_whole
from batch_trajectories.runs.store.files import keep_readable
from batch_trajectories.runs.store.journal import Inflight, read_journaled_replies
from batch_trajectories.runs.store.records import RecordFile, load_index, take_out
from batch_trajectories.runs.store.settled import NO_LIMIT, Settled
from batch_trajectories.runs.supervisor.damaged import set_aside_damaged
from toolsets.workspace.removal import remove_tree

_SHOWN = 20


def repair_run(path: Path, report: Report, config: RunConfig) -> None:
    """Repair the problems in `report` of the run in `path`; the caller holds its lock.

    Raises `StorageError`.
    """
    quarantine = path / "quarantine"
    for file in stale_files_of(path):
        file.unlink()
    # Without an index every record is read, and unreadable ones are set aside.
    (path / "records.idx").unlink(missing_ok=True)
    if report.duplicates:
        take_out(path / "records.jsonl", report.duplicates, quarantine)
    records = RecordFile(path, quarantine)
    records.close()
    settled = Settled(records.take_found(), config.max_attempts)
    (path / NAME).unlink(missing_ok=True)
    set_aside_damaged(path)
    for name in ("scores.jsonl", "verdicts.jsonl"):
        keep_readable(path / name, quarantine, is_whole)
    if (path / "inflight").is_dir():
        Inflight(path / "inflight").read(settled=settled)
    leftovers = [problem.file for problem in report.problems if problem.kind == "leftover"]
    repair_batches(
        path,
        quarantine,
        leftovers=[file for file in leftovers if file.parent == path / "batches"],
        ended=Settled(load_index(path), NO_LIMIT),
    )
    for file in leftovers:
        if file.parent == path / "workspaces":
            remove_tree(file)
    remove_leftover_containers(config)


def describe_remaining(path: Path, scan: Scan, config: RunConfig) -> str:
    """The tasks that the same command would run now, in one line; "" if none."""
    entries = load_index(path)
    settled = Settled(entries, config.max_attempts)
    remaining = [number for number in range(scan.tasks) if scan.key(number) not in settled]
    if not remaining:
        return ""
    named = ", ".join(task.id for task in tasks(scan, remaining[:_SHOWN]))
    named += " …" if len(remaining) > _SHOWN else ""
    line = f"run the same command again to run {plural(len(remaining), 'task')}: {named}"
    unfinished = read_journaled_replies(path / "inflight", settled=entries).tasks.values()
    if unfinished:
        turns = sum(replies.turns for replies in unfinished)
        line += f"; {len(unfinished)} of them resume after {plural(turns, 'saved turn')}"
    return line
