"""Imports a batch run of hermes-agent, so that a run only does the missing prompts.

Its directory has `batch_<n>.jsonl` (a trajectory per line), `trajectories.jsonl` (all of them, at
the end of the run) and `checkpoint.json` (the numbers of the prompts that count as done). Rows are
matched by prompt, because numbers shift when a dataset is edited.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from agent.models.parsing import get_object, text_or_none
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import track_progress
from batch_trajectories.basics.errors import ConfigError
from batch_trajectories.basics.text import first_few
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.engine.record import as_stored
from batch_trajectories.engine.run_dir import RunDir
from batch_trajectories.importing.chat_rows import read_row
from batch_trajectories.importing.conversation import SourceConversation, Unreadable
from batch_trajectories.records.records import RecordFile
from batch_trajectories.records.tasks import Task

_BATCH = re.compile(r"batch_(\d+)\.jsonl")
_MAX_LISTED = 20


@dataclass(slots=True)
class Imported:
    """The result of an import."""

    directory: Path
    completed: int = 0
    ended_early: int = 0
    already_recorded: int = 0
    """The number of tasks that had a record already."""
    repeated: list[str] = field(default_factory=list)
    """Rows (file:line) whose prompt another row has already answered."""
    unknown: list[str] = field(default_factory=list)
    """Rows whose prompt is not in the dataset."""
    unreadable: list[str] = field(default_factory=list)
    """Lines that are not trajectories, with the reasons."""
    lost: list[int] = field(default_factory=list)
    """Prompts that count as done but have no trajectory."""

    def describe(self) -> str:
        """Write a line per kind of row, with its first rows."""
        counted = [
            (self.completed, "completed", [""]),
            (self.ended_early, "ended early", [""]),
            (self.already_recorded, "already in this run", [""]),
            (len(self.repeated), "repeated, left out", self.repeated),
            (len(self.unknown), "of prompts that are not in the dataset, left out", self.unknown),
            (len(self.unreadable), "unreadable; their prompts run again", self.unreadable),
            (
                len(self.lost),
                "counted as done, but without a conversation; they run again: prompts",
                list(map(str, self.lost)),
            ),
        ]
        lines = [f"{self.directory}: rows of that run"]
        for count, kind, places in counted:
            if count:
                lines.append(f"{count:>9,} {kind} {first_few(places, _MAX_LISTED)}".rstrip())
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Row:
    file: Path
    line: int
    number: int | None
    """The `prompt_index` of hermes-agent."""
    fields: dict[str, Any]
    conversation: SourceConversation
    at: float
    """The time when the row was saved, epoch seconds."""

    @property
    def place(self) -> str:
        """The file and the line of the row."""
        return f"{self.file.name}:{self.line}"


def import_hermes(directory: Path, scan: Scan, run_dir: RunDir) -> Imported:
    """Write a record for each task that has a trajectory in `directory`.

    Safe to repeat: it skips tasks that have a record. Raises `ConfigError` if `directory` has no
    trajectories, `StorageError` if records cannot be written.
    """
    files = _files(directory)
    imported = Imported(directory)
    rows = list(_read_rows(files, imported))
    by_prompt: defaultdict[str, list[tuple[int, Task]]] = defaultdict(list)
    first_samples = tasks(scan, range(0, scan.tasks, scan.num_samples))
    for position, task in enumerate(first_samples):
        by_prompt[_read_prompt(task, scan)].append((position, task))
    records = RecordFile(run_dir.path, run_dir.quarantine)
    there = records.take_index()
    try:
        answered: set[int] = set()
        ordered = sorted(rows, key=lambda row: row.fields.get("completed") is not True)
        for row in track_progress(ordered, "import", total=len(ordered), unit="rows"):
            if row.number is not None and row.number in answered:
                imported.repeated.append(row.place)
                continue
            taken = _take_task(by_prompt, row)
            if taken is None:
                known = row.conversation.prompt() in by_prompt
                (imported.repeated if known else imported.unknown).append(row.place)
                continue
            if row.number is not None:
                answered.add(row.number)
            if taken.key in there:
                imported.already_recorded += 1
                continue
            record = as_stored(_make_record(taken, row, run_dir))
            records.add(record)
            if record.status == "completed":
                imported.completed += 1
            else:
                imported.ended_early += 1
        records.sync()
    finally:
        records.close()
    done = {row.number for row in rows if row.number is not None}
    imported.lost = sorted(_read_checkpoint(directory) - done)
    return imported


def _files(directory: Path) -> list[Path]:
    """Find the batch files in their order, then the merged file, which repeats their rows."""
    paths = sorted(
        (path for path in directory.glob("batch_*.jsonl") if _BATCH.fullmatch(path.name)),
        key=lambda path: int(path.stem.split("_")[1]),
    )
    merged = directory / "trajectories.jsonl"
    files = [*paths, merged] if merged.exists() else paths
    if not files:
        raise ConfigError(
            f"{directory}: not a run of hermes-agent (no batch_N.jsonl and no trajectories.jsonl)"
        )
    return files


def _read_rows(files: list[Path], imported: Imported) -> Iterator[_Row]:
    seen: set[bytes] = set()
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
            if not line.strip() or line in seen:
                continue  # the merged file repeats the rows of the batch files
            seen.add(line)
            try:
                yield read_line(line, file, number)
            except ValueError as error:
                imported.unreadable.append(f"{file.name}:{number} ({error})")


def read_line(line: bytes, file: Path, number: int) -> _Row:
    """Read a line of a file, which is a row. Raises `ValueError` if it is no trajectory."""
    fields = exact_json.loads(line)
    if not isinstance(fields, dict):
        raise Unreadable("it must be an object")
    found = read_row(fields, "conversations", "hermes-agent")
    if found.tools is None:
        raise Unreadable("its system entry has no list of tools")
    found.prompt()  # refuses a row without one
    if not found.conversation.replies:
        raise Unreadable("it has no message of the model")
    metadata = get_object(fields, "metadata")
    for reply in found.conversation.replies:
        reply["model"] = text_or_none(metadata.get("model"))
    index = fields.get("prompt_index")
    index = index if isinstance(index, int) else None
    return _Row(file, number, index, fields, found, _read_time(metadata))


def _read_time(metadata: Mapping[str, Any]) -> float:
    try:
        return datetime.fromisoformat(metadata["timestamp"]).timestamp()
    except (KeyError, TypeError, ValueError):
        return time.time()


def _read_prompt(task: Task, scan: Scan) -> str:
    opening = scan.rules.read(task.columns).opening
    # A prompt that a simulated user writes is in no dataset, so no row answers it.
    return next((message["content"] for message in opening if message["role"] == "user"), "")


def _take_task(by_prompt: dict[str, list[tuple[int, Task]]], row: _Row) -> Task | None:
    """Take the task that a row answers: of equal prompts the one with its number, else the first.

    Returns None if no task is left.
    """
    waiting = by_prompt.get(row.conversation.prompt())
    if not waiting:
        return None
    chosen = next((n for n, (position, _) in enumerate(waiting) if position == row.number), 0)
    return waiting.pop(chosen)[1]


def _read_checkpoint(directory: Path) -> set[int]:
    try:
        numbers = orjson.loads((directory / "checkpoint.json").read_bytes())["completed_prompts"]
        return {number for number in numbers if isinstance(number, int)}
    except (OSError, orjson.JSONDecodeError, KeyError, TypeError):
        return set()


def _make_record(task: Task, row: _Row, run_dir: RunDir) -> dict[str, Any]:
    fields = row.fields
    origin = {"format": "hermes", "file": str(row.file), "line": row.line}
    record = row.conversation.record(task, run_dir.digest, row.at, origin)
    if fields.get("completed") is not True or record["status"] != "completed":
        record["status"] = "errors" if fields.get("partial") else "max_turns"
    api_calls = fields.get("api_calls")
    return {
        **record,
        "status_reason": f"imported from hermes-agent, {row.place}",
        "api_calls": api_calls if type(api_calls) is int else record["api_calls"],
        "toolsets": list(map(str, fields.get("toolsets_used") or ())),
        "versions": {"hermes-agent": "unknown"},
    }
