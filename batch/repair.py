"""Mending what a run directory holds: unreadable bytes go to the quarantine, never away.

Nothing readable is lost: of several records of one task the one that counts stays, the others are
set aside too. What is derived is not made here; see `export` and the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from batch.config import RunConfig
from batch.failures import read_failure
from batch.files import repair_tail, replace_file, set_aside
from batch.journal import Inflight, key_and_order, segments, turns_under_way
from batch.kept_scan import NAME
from batch.prompts import Scan, tasks
from batch.records import RecordFile, lines_from, load_index, take_out
from batch.run_dir import litter_of
from batch.standing import NO_BOUND, Settled, is_settled
from batch.verify import Report
from batch.verify_batches import repair_batches
from batch.wave_ledger import read_line
from toolsets.removal import remove_tree

_SHOWN = 20


def repair_run(path: Path, report: Report, config: RunConfig) -> None:
    """Mend what `report` names of the run in `path`; the caller holds its lock.

    Raises `StorageError`.
    """
    quarantine = path / "quarantine"
    for litter in litter_of(path):
        litter.unlink()
    # Without an index every record is read, and what is unreadable set aside.
    (path / "records.idx").unlink(missing_ok=True)
    if report.duplicates:
        take_out(path / "records.jsonl", report.duplicates, quarantine)
    records = RecordFile(path, quarantine)
    records.close()
    settled = Settled(records.take_found(), config.max_attempts)
    (path / NAME).unlink(missing_ok=True)
    _keep_readable(path / "failures.jsonl", quarantine, lambda line: read_failure(line) is not None)
    for segment in segments(path / "inflight"):
        _keep_readable(segment, quarantine, lambda line: key_and_order(line)[0] is not None)
    if (path / "inflight").is_dir():
        Inflight(path / "inflight").read(settled=settled)
    _keep_readable(path / "batches.jsonl", quarantine, lambda line: read_line(line) is not None)
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


def _keep_readable(file: Path, quarantine: Path, is_readable: Callable[[bytes], bool]) -> None:
    repair_tail(file, quarantine)
    kept = []
    damaged = False
    for number, (_, line) in enumerate(lines_from(file, 0), start=1):
        if is_readable(line):
            kept.append(line)
        else:
            damaged = True
            set_aside(quarantine, f"{file.name}.line{number}", line)
    if damaged:
        replace_file(file, b"".join(kept))


def owed_in_words(path: Path, scan: Scan, config: RunConfig) -> str:
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
    kept = f"; {len(turns)} of them go on after {sum(turns.values())} kept turns" if turns else ""
    return f"the same command as before runs {len(owed)} tasks: {named}{kept}"
