"""`failures.jsonl`: failed attempts and bad rows with their reasons.

Lines: {"kind": "attempt", "id", "input_digest", "attempt", "class", "message", "at"}, the same
with "kind": "death" for a task that was assigned to a worker when it died, and {"kind":
"bad_row", "file", "line", "reason", "at"}. `is_settled` is the one rule for whether a task needs
more work.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch_trajectories.basics.text import mask_names, single_line
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    add_checksum,
    read_object,
    repair_tail,
)
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.names import FAILURES_FILE
from batch_trajectories.records.tasks import BadRow, task_key

_MAX_REASONS = 20


class Failure(NamedTuple):
    """One failed attempt of a task."""

    id: str
    input_digest: str
    attempt: int
    error_class: str
    message: str


class FailureFile:
    """The failures of one run: counts by task, and the open file."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        path = run_dir / FAILURES_FILE
        repair_tail(path, quarantine)
        self.attempts: Counter[bytes] = Counter()
        """Failed attempts by task key."""
        self.deaths: Counter[bytes] = Counter()
        """Worker deaths by the keys of the tasks in flight there."""
        self._bad_rows: set[tuple[str, int, str]] = set()
        for line in stored_failures(run_dir):
            self._count(line)
        self._file = AppendFile(path)

    def append(self, failure: Failure) -> None:
        """Append a failure; `sync` makes it survive a power loss."""
        self._write(
            {
                "kind": "death" if failure.error_class == WORKER_DIED else "attempt",
                "id": failure.id,
                "input_digest": failure.input_digest,
                "attempt": failure.attempt,
                "class": failure.error_class,
                "message": failure.message,
                "at": time.time(),
            }
        )

    def append_bad_row(self, file: Path, row: BadRow) -> None:
        """Append a bad row, unless an earlier start of the run has done so."""
        if (str(file), row.line, row.reason) not in self._bad_rows:
            self._write(
                {
                    "kind": "bad_row",
                    "file": str(file),
                    "line": row.line,
                    "reason": row.reason,
                    "at": time.time(),
                }
            )

    def sync(self) -> None:
        """Make all lines survive a power loss. Raises `StorageError`."""
        self._file.check_exists()
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._count(line)
        self._file.append(add_checksum(orjson.dumps(line)))

    def _count(self, line: dict[str, Any]) -> None:
        match line.get("kind"):
            case "bad_row":
                self._bad_rows.add((line["file"], line["line"], line["reason"]))
            case "attempt":
                self.attempts[task_key(line["id"], line["input_digest"])] += 1
            case "death":
                self.deaths[task_key(line["id"], line["input_digest"])] += 1


def load_failed_attempts(run_dir: Path) -> dict[bytes, str]:
    """The class of the last failed attempt of each task with failed attempts; writes nothing."""
    return {
        task_key(line["id"], line["input_digest"]): line["class"]
        for line in stored_failures(run_dir)
        if line.get("kind") == "attempt"
    }


def why_tasks_failed(run_dir: Path, tasks: Collection[bytes]) -> list[dict[str, Any]]:
    """The reasons why the last attempts of these tasks failed, the most frequent first.

    Keys: `class`, `message` (an example, in one line) and `count`. Messages count as one if their
    last lines differ only in numbers, ids and quoted names. Writes nothing.
    """
    if not tasks:
        return []
    last: dict[bytes, tuple[str, str]] = {}
    examples: dict[tuple[str, str], str] = {}
    for line in stored_failures(run_dir):
        if line["kind"] not in ("attempt", "death") or not _are_texts(line, "message"):
            continue
        if (key := task_key(line["id"], line["input_digest"])) in tasks:
            last_line = line["message"].strip().rpartition("\n")[2]
            last[key] = kind = (line["class"], mask_names(last_line))
            examples[kind] = line["message"]
    counts = Counter(last.values()).most_common(_MAX_REASONS)
    return [
        {"class": kind[0], "message": single_line(examples[kind]), "count": count}
        for kind, count in counts
    ]


def failures_by_class(run_dir: Path) -> list[dict[str, Any]]:
    """Failed attempts and worker deaths by class, the most frequent first; writes nothing.

    Keys: `class`, `count`, and of the latest `id`, `message` and `at` (epoch seconds). Includes
    attempts of tasks that succeeded later.
    """
    by_class: dict[str, dict[str, Any]] = {}
    for line in stored_failures(run_dir):
        if line["kind"] in ("attempt", "death") and _are_texts(line, "message"):
            example = {key: line.get(key) for key in ("class", "id", "message", "at")}
            before = by_class.get(line["class"], {"count": 0})
            by_class[line["class"]] = example | {"count": before["count"] + 1}
    return sorted(by_class.values(), key=lambda failure: (-failure["count"], failure["class"]))


def read_failure(text: bytes) -> dict[str, Any] | None:
    """The content of one line, None if it is unreadable."""
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    if line.get("kind") == "bad_row":
        is_complete = isinstance(line.get("line"), int) and _are_texts(line, "file", "reason")
    else:
        is_complete = _are_texts(line, "kind", "id", "input_digest", "class")
    return line if is_complete else None


def is_failure(text: bytes) -> bool:
    """Whether a line can be read."""
    return read_failure(text) is not None


def _are_texts(line: dict[str, Any], *keys: str) -> bool:
    return all(isinstance(line.get(key), str) for key in keys)


def stored_failures(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The readable lines, one in memory at a time; writes nothing.

    Skips unreadable lines: failures only explain.
    """
    try:
        file = (run_dir / FAILURES_FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        for text in file:
            if (line := read_failure(text)) is not None:
                yield line


WORKER_DIED = "worker_died"
"""The failure class of a task that killed its workers; it is not retried automatically."""

NO_LIMIT = sys.maxsize
"""A `max_attempts` that no task reaches."""


def is_settled(entry: IndexEntry, max_attempts: int) -> bool:
    """Whether a task with this record needs no more work.

    After a raise of `max_attempts`, a failed record is tried again.
    """
    if entry.status != "failed":
        return True
    return entry.error_class == WORKER_DIED or entry.attempt >= max_attempts


class Settled:
    """The keys of the tasks that need no more work."""

    def __init__(self, records: Mapping[bytes, IndexEntry], max_attempts: int) -> None:
        self._records = records
        self._max_attempts = max_attempts

    def __contains__(self, key: object) -> bool:
        entry = self._records.get(key) if isinstance(key, bytes) else None
        return entry is not None and is_settled(entry, self._max_attempts)
