"""Whether what a run directory holds of its batches is whole, and fits the records.

A batch that nobody knows of any more is paid for and paid again, so this is about money: which
calls are in which batch, and whether somebody takes what it brought.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from runs.batch_api.batch_log import (
    BatchJob,
    BatchLog,
    State,
    apply_step,
    index_of,
    jobs_in,
    read_line,
    set_aside_damaged_steps,
)
from runs.maintenance.problem import Problem
from runs.protocol.batch_calls import task_of
from runs.store.files import listed
from runs.store.records import lines_from

_NEXT: Mapping[State, Container[str]] = {
    "gathered": ("sending", "void"),
    "sending": ("sending", "created", "void"),
    "created": ("collected", "failed", "void"),
    "collected": ("collected", "failed"),  # results that were lost are fetched again
    "failed": (),
    "void": ("sending",),  # it was refused, and is tried again
}
"""What can follow each step of a wave."""


def check_batches(
    path: Path, *, settled: Container[bytes], ended: Container[bytes]
) -> Iterator[Problem]:
    """Check batches.jsonl and the directory batches of the run in `path`.

    `settled` are the tasks that need no more work, `ended` those that never will.
    """
    ledger = path / "batches.jsonl"
    jobs: dict[str, BatchJob] = {}
    last: dict[str, int] = {}
    needed: set[str] = set()
    for number, (_, text) in enumerate(lines_from(ledger, 0), start=1):
        if (line := read_line(text)) is None:
            message = "not a step of a batch; it is passed over"
            yield Problem("unreadable", ledger, number, message)
        elif line["kind"] != "live":
            name = line["wave"]
            for message in _contradictions(jobs, line, is_needed=name in needed):
                yield Problem("contradiction", ledger, number, message)
            last[name] = number
            if name in jobs or line["kind"] == "gathered":
                apply_step(jobs, line)
            if any(task_of(id) not in settled for id in line.get("items", ())):
                needed.add(name)
    kept = set()
    for job in jobs.values():
        if is_never_taken(job, ended):
            message = (
                f"batch {job.batch}: its {len(job.ids):,} calls are paid for, and no "
                "conversation takes their results any more; their cost is in no sum"
            )
            yield Problem("contradiction", ledger, last[job.name], message)
        if job.state == "collected" and job.name in needed:
            results = path / "batches" / f"{job.name}.results"
            kept.add(results)
            try:
                index_of(results, job)
            except (OSError, ValueError) as error:
                message = (
                    f"not what batch {job.batch} brought ({error}); the next start fetches it "
                    "again, which is free"
                )
                yield Problem("derived", results, None, message)
    for file in listed(path / "batches"):
        if file not in kept:
            message = "what is left of a batch, and nobody needs; the next start removes it"
            yield Problem("leftover", file, None, message)


def is_never_taken(job: BatchJob, ended: Container[bytes]) -> bool:
    """Whether a batch was made whose results are not here, and that nobody will ask for."""
    return job.state == "created" and all(task_of(id) in ended for id in job.ids)


def repair_batches(
    path: Path, quarantine: Path, leftovers: Iterable[Path], ended: Container[bytes]
) -> None:
    """Set aside unreadable lines, remove stale files, and give up batches whose results are
    never taken. Raises `StorageError`."""
    set_aside_damaged_steps(path)
    for file in leftovers:
        file.unlink(missing_ok=True)
    ledger = BatchLog(path, quarantine)
    for job in jobs_in(path / "batches.jsonl"):
        if is_never_taken(job, ended):
            ledger.note(job, "failed", why="no conversation takes its results any more")
    ledger.close()


def calls_kept(run_dir: Path, settled: Container[bytes]) -> int:
    """How many calls are in batches, or have results here, that no conversation has taken.

    See `BatchLog.load`; writes nothing.
    """
    jobs = jobs_in(run_dir / "batches.jsonl")
    kept = (job for job in jobs if job.state in ("sending", "created", "collected"))
    return sum(task_of(id) not in settled for job in kept for id in job.ids)


def _contradictions(
    jobs: Mapping[str, BatchJob], line: Mapping[str, Any], *, is_needed: bool
) -> Iterator[str]:
    """What is wrong with the next step of a wave; nothing where no conversation needs it."""
    kind, name = line["kind"], line["wave"]
    job = jobs.get(name)
    if job is None:
        if kind in ("created", "collected"):
            yield (
                f"wave {name} is {kind}, and no line before tells which calls it has; they will "
                "be made, and paid for, again"
            )
        return
    if not is_needed:
        return
    if kind not in _NEXT[job.state]:
        yield f"wave {name} is {kind} after it was {job.state}; the later line counts"
    if kind == "created":
        for other in jobs.values():
            if other.batch == line["batch"]:
                yield f"batch {line['batch']} of wave {name} is that of wave {other.name} too"
    if kind == "collected" and line["replies"] + line["failed"] != len(job.ids):
        yield (
            f"wave {name} has {len(job.ids):,} calls, and {line['replies']:,} replies and "
            f"{line['failed']:,} failures"
        )
