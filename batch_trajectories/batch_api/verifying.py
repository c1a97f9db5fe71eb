"""Checks that the files of a run's batches are complete and match the records, and repairs them.

A forgotten batch would be paid for twice. So the check compares which calls are in which batch, and
whether a conversation still needs its results.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from batch_trajectories.basics.text import plural
from batch_trajectories.batch_api.batch_log import (
    BatchJob,
    BatchLog,
    State,
    apply_step,
    index_results,
    jobs_in,
    read_line,
    set_aside_damaged_steps,
)
from batch_trajectories.engine.messages import parse_task_key
from batch_trajectories.records.files import list_directory
from batch_trajectories.records.names import BATCHES, BATCHES_FILE
from batch_trajectories.records.problem import Problem
from batch_trajectories.records.records import read_lines

_NEXT: Mapping[State, Container[str]] = {
    "gathered": ("sending", "void"),
    "sending": ("sending", "created", "void"),
    "created": ("collected", "failed", "void"),
    "collected": ("collected", "failed"),  # results that were lost are fetched again
    "failed": (),
    "void": ("sending",),  # it was refused, and is tried again
}
"""The steps that can follow each step of a job."""


def check_batches(
    path: Path, *, settled: Container[bytes], ended: Container[bytes]
) -> Iterator[Problem]:
    """Check batches.jsonl and the directory batches of the run in `path`.

    `settled` are the tasks that need no more work now; `ended` are the tasks that never will.
    """
    steps = path / BATCHES_FILE
    jobs: dict[str, BatchJob] = {}
    last: dict[str, int] = {}
    needed: set[str] = set()
    for number, (_, text) in enumerate(read_lines(steps, 0), start=1):
        if (line := read_line(text)) is None:
            yield Problem("unreadable", steps, number, "not a step of a batch; it does not count")
        elif line["kind"] != "live":
            name = line["wave"]
            for message in _contradictions(jobs, line, is_needed=name in needed):
                yield Problem("contradiction", steps, number, message)
            last[name] = number
            if name in jobs or line["kind"] == "gathered":
                apply_step(jobs, line)
            if any(parse_task_key(id) not in settled for id in line.get("items", ())):
                needed.add(name)
    files = set()
    for job in jobs.values():
        if is_abandoned(job, ended):
            message = (
                f"batch {job.batch}: {plural(len(job.ids), 'call')} paid for but no conversation "
                "needs the results any more; no total includes their cost"
            )
            yield Problem("contradiction", steps, last[job.name], message)
        if job.state == "collected" and job.name in needed:
            results = path / BATCHES / f"{job.name}.results"
            files.add(results)
            try:
                index_results(results, job)
            except (OSError, ValueError) as error:
                message = (
                    f"not the results of batch {job.batch} ({error}); the next start fetches them "
                    "again for free"
                )
                yield Problem("derived", results, None, message)
    for file in list_directory(path / BATCHES):
        if file not in files:
            message = "left over from a batch; the next start removes it"
            yield Problem("leftover", file, None, message)


def is_abandoned(job: BatchJob, ended: Container[bytes]) -> bool:
    """Whether the job's batch was created, but its results are neither fetched nor needed."""
    return job.state == "created" and all(parse_task_key(id) in ended for id in job.ids)


def repair_batches(
    path: Path, quarantine: Path, leftovers: Iterable[Path], ended: Container[bytes]
) -> None:
    """Set aside unreadable lines, remove `leftovers`, and give up abandoned batches.

    Raises `StorageError`.
    """
    set_aside_damaged_steps(path)
    for file in leftovers:
        file.unlink(missing_ok=True)
    with closing(BatchLog(path, quarantine)) as batch_log:
        for job in jobs_in(path / BATCHES_FILE):
            if is_abandoned(job, ended):
                batch_log.note(job, "failed", why="no conversation needs its results any more")


def open_calls(run_dir: Path, settled: Container[bytes]) -> int:
    """Count the calls in batches, with or without results, that are still needed; write nothing."""
    jobs = jobs_in(run_dir / BATCHES_FILE)
    open_jobs = (job for job in jobs if job.state in ("sending", "created", "collected"))
    return sum(parse_task_key(id) not in settled for job in open_jobs for id in job.ids)


def _contradictions(
    jobs: Mapping[str, BatchJob], line: Mapping[str, Any], *, is_needed: bool
) -> Iterator[str]:
    """Yield problems of the next step of a job; none if no conversation needs the job."""
    kind, name = line["kind"], line["wave"]
    job = jobs.get(name)
    if job is None:
        if kind in ("created", "collected"):
            yield (
                f"job {name} is {kind}, but no earlier line has its calls; they will be made, and "
                "paid for, again"
            )
        return
    if not is_needed:
        return
    if kind not in _NEXT[job.state]:
        yield f"job {name} is {kind} after it was {job.state}; the later line counts"
    if kind == "created":
        for other in jobs.values():
            if other.batch == line["batch"]:
                yield f"batch {line['batch']} of job {name} is also that of job {other.name}"
    if kind == "collected" and line["replies"] + line["failed"] != len(job.ids):
        yield (
            f"job {name} has {plural(len(job.ids), 'call')}, but {line['replies']:,} replies and "
            f"{line['failed']:,} failures"
        )
