"""Mending what a run directory holds: unreadable bytes go to the quarantine, never away.

Nothing readable is lost: of several records of one task the one that counts stays, the others are
set aside too. What is derived is not made here; see `export` and the next start.
"""

from __future__ import annotations

from pathlib import Path

from runs.config.run_config import RunConfig
from runs.dataset.scan import Scan, tasks
from runs.dataset.scan_cache import NAME
from runs.maintenance.verify import Report
from runs.maintenance.verify_batches import repair_batches
from runs.run_dir import stale_files_of
from runs.store.checksum import is_whole
from runs.store.files import keep_readable
from runs.store.journal import Inflight, turns_under_way
from runs.store.records import RecordFile, load_index, take_out
from runs.store.settled import NO_BOUND, Settled, is_settled
from runs.supervisor.damaged import set_aside_damaged
from toolsets.workspace.removal import remove_tree

_SHOWN = 20


def repair_run(path: Path, report: Report, config: RunConfig) -> None:
    """Mend what `report` names of the run in `path`; the caller holds its lock.

    Raises `StorageError`.
    """
    quarantine = path / "quarantine"
    for litter in stale_files_of(path):
        litter.unlink()
    # Without an index every record is read, and what is unreadable set aside.
    (path / "records.idx").unlink(missing_ok=True)
    if report.duplicates:
        take_out(path / "records.jsonl", report.duplicates, quarantine)
    records = RecordFile(path, quarantine)
    records.close()
    settled = Settled(records.take_found(), config.max_attempts)
    (path / NAME).unlink(missing_ok=True)
    set_aside_damaged(path)
    keep_readable(path / "verdicts.jsonl", quarantine, is_whole)
    if (path / "inflight").is_dir():
        Inflight(path / "inflight").read(settled=settled)
    left = [one.file for one in report.problems if one.kind == "leftover"]
    repair_batches(
        path,
        quarantine,
        leftovers=[file for file in left if file.parent == path / "batches"],
        ended=Settled(load_index(path), NO_BOUND),
    )
    workspaces = path / "workspaces"
    for file in left:
        if file.parent == workspaces:
            remove_tree(file)


def describe_remaining(path: Path, scan: Scan, config: RunConfig) -> str:
    """What the same command would run now, in one line; "" if nothing."""
    entries = load_index(path)
    turns = turns_under_way(path / "inflight", settled=entries)
    owed = [
        task.id
        for task in tasks(scan, num_samples=config.num_samples)
        if (entry := entries.get(task.key)) is None or not is_settled(entry, config.max_attempts)
    ]
    if not owed:
        return ""
    named = ", ".join(owed[:_SHOWN]) + (" …" if len(owed) > _SHOWN else "")
    kept = f"; {len(turns)} of them resume after {sum(turns.values())} saved turns" if turns else ""
    return f"run the same command again to run {len(owed)} tasks: {named}{kept}"
