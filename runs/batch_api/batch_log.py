"""What a run directory holds of its batches: `batches.jsonl` and the directory `batches`.

A wave is the calls of one batch. Each step is a line of `batches.jsonl`, on disk before the next
is taken:

gathered {"wave", "model", "at", "items"}   its calls are known; nothing was sent. Under a budget
                                            `most` says what is set aside for each
sending {"wave", "at", "upload", "bytes"}   the provider is about to be asked to create the batch
created {"wave", "at", "batch"}             it has done so, and the calls cost from here on
collected {"wave", "at", "replies", …}      the results are in batches/WAVE.results
failed {"wave", "at", "why"}                none of the calls was made: they are made live
void {"wave", "at"}                         no batch was made of it: its calls are gathered anew
live {"calls"}                              so many calls of a start were made live

`batches/WAVE.items` holds the calls as they are sent, until the batch is there. The results are
removed when the conversations that they belong to have their records.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import orjson

from agent.models.batches.base import ItemResult
from runs.amounts import Cost
from runs.protocol.batch_calls import task_of
from runs.store.checksum import DamagedLine, read_object, with_checksum
from runs.store.files import (
    AppendFile,
    StorageError,
    keep_readable,
    listed,
    repair_tail,
    sync_directory,
)
from toolsets import exact_json

log = logging.getLogger(__name__)

State = Literal["gathered", "sending", "created", "collected", "failed", "void"]

_NUMBER = (int, float)
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "gathered": {"wave": str, "model": str, "at": _NUMBER, "items": list},
    "sending": {"wave": str, "at": _NUMBER, "upload": str, "bytes": int},
    "created": {"wave": str, "at": _NUMBER, "batch": str},
    "collected": {
        **{"wave": str, "at": _NUMBER, "replies": int, "failed": int},
        **{"cost_usd": _NUMBER, "saved_usd": _NUMBER, "unpriced": int},
    },
    "failed": {"wave": str, "at": _NUMBER, "why": str},
    "void": {"wave": str, "at": _NUMBER},
    "live": {"calls": int},
}
"""What each kind of line must hold."""


_CALL = re.compile(r"[0-9a-f]{32}-[0-9a-f]+")
"""What a call's id looks like; see `item_id`."""


@dataclass(eq=False)
class BatchJob:
    """The calls of one batch."""

    name: str
    model: str
    """See `name_of`."""
    ids: list[str]
    """Of its calls, as workers know them."""
    most: list[list[Any]] = field(default_factory=list)
    """What of the run's budget is set aside for each: dollars and tokens. Empty without one."""
    state: State = "gathered"
    sent_at: float = 0.0
    """Epoch seconds before it can have been created."""
    size: int = 0
    """Bytes of its items."""
    upload: str = ""
    batch: str = ""
    created_at: float = 0.0
    why: str = ""
    replies: int = 0
    """How many of its calls have one, once it is collected."""
    index: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Where the result of each call is in the file of results: offset and length."""
    needed: int = 0
    """How many of its calls belong to conversations that have no record yet."""

    def sent_id(self, id: str) -> str:
        """What the provider knows a call as: no two batches share one."""
        return f"{id}-{self.name}"

    def own_id(self, sent_id: str) -> str | None:
        """The call behind what the provider knows; None where it is of another batch."""
        id, _, name = sent_id.rpartition("-")
        return id if name == self.name else None


class BatchLog:
    """Reads and writes what is on disk. For use by one thread. Methods raise `StorageError`."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        self._path = run_dir / "batches.jsonl"
        self._place = run_dir / "batches"
        repair_tail(self._path, quarantine)
        self._file: AppendFile | None = None

    def give_up_unsent(self) -> list[list[Any]]:
        """Void the waves of which the starts before have sent nothing: their calls gather anew.

        Gives what was set aside for these calls. Nobody else will give it back: who asked for them
        is gone.
        """
        unsent = [job for job in jobs_in(self._path) if job.state == "gathered"]
        for job in unsent:
            self.note(job, "void")
        return [most for job in unsent for most in job.most]

    def load(self, settled: Container[bytes]) -> list[BatchJob]:
        """The jobs that some call still needs, as earlier starts have left them.

        `settled` are the tasks that need no more work.
        """
        found = []
        for job in jobs_in(self._path):
            job.needed = sum(task_of(id) not in settled for id in job.ids)
            if job.state == "collected" and job.needed:
                self._index(job)
            if job.needed and job.state not in ("gathered", "void"):
                found.append(job)
        kept = {self._results_file(job) for job in found}
        for path in listed(self._place):
            if path not in kept:  # of waves that are done with, or half written
                path.unlink()
        return found

    def note(self, job: BatchJob, state: State, **more: Any) -> None:
        """Write one line, durably, and change the wave by it."""
        line = {"kind": state, "wave": job.name, "at": time.time(), **more}
        self._append(line)
        apply_step({job.name: job}, line)

    def note_live(self, calls: int) -> None:
        """Write how many calls of this start were made live."""
        self._append({"kind": "live", "calls": calls})

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.check_is_there()
        self._file.append(with_checksum(orjson.dumps(line)))
        self._file.sync()

    def items_file(self, job: BatchJob) -> Path:
        """Where the calls of a wave are, as lines for the provider."""
        self._place.mkdir(mode=0o700, exist_ok=True)
        return self._place / f"{job.name}.items"

    def begin_results(self, job: BatchJob) -> Results:
        """A new file for the results of a wave, which counts once it is kept."""
        self._place.mkdir(mode=0o700, exist_ok=True)
        return Results(job, self._results_file(job))

    def result(self, job: BatchJob, id: str) -> ItemResult:
        """The result of a call of a collected wave."""
        place = job.index.get(id)
        if place is None:
            return ItemResult(id, None, "the batch is over and has no result for it")
        try:
            with self._results_file(job).open("rb") as file:
                file.seek(place[0])
                line = exact_json.loads(file.read(place[1]))
        except OSError as error:
            msg = f"{self._results_file(job)}: cannot read: {error.strerror or error}"
            raise StorageError(msg) from error
        if "reply" in line:
            return ItemResult(id, exact_json.dumps(line["reply"]))
        return ItemResult(id, None, line["why"])

    def remove(self, job: BatchJob) -> None:
        """Remove the files of a wave that nobody needs any more."""
        for path in (self._place / f"{job.name}.items", self._results_file(job)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and remove the directory where nothing is left in it."""
        if self._file is not None:
            self._file.close()
        if self._place.is_dir() and not any(self._place.iterdir()):
            self._place.rmdir()

    def _results_file(self, job: BatchJob) -> Path:
        return self._place / f"{job.name}.results"

    def _index(self, job: BatchJob) -> None:
        """Find the results again; without their file they are fetched once more, which is free."""
        try:
            job.index = index_of(self._results_file(job), job)
        except (OSError, ValueError) as error:
            log.warning("%s: fetched again: %s", self._results_file(job), error)
            job.state = "created"


class Results:
    """The results of a wave, written as they come."""

    def __init__(self, job: BatchJob, path: Path) -> None:
        self._wave = job
        self._path = path
        self._temporary = path.with_suffix(".half")
        self._temporary.unlink(missing_ok=True)
        self._file = AppendFile(self._temporary)
        self._index: dict[str, tuple[int, int]] = {}

    def add(self, result: ItemResult) -> bool:
        """Write one; of two for one call the first counts, and False is told of the second."""
        if result.id in self._index:
            return False
        line = orjson.dumps({"id": result.id, "why": result.why})
        if result.reply is not None:
            line = orjson.dumps({"id": result.id})[:-1] + b',"reply":' + result.reply + b"}"
        self._index[result.id] = (self._file.size, len(line) + 1)
        self._file.append(line + b"\n")
        return True

    def keep(self) -> None:
        """Make what was written durable, and count."""
        self._file.sync()
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)
        self._wave.index = self._index

    def close(self) -> None:
        """Close the file; what was not kept does not count."""
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a `batches.jsonl`; damaged ones are passed over, a missing file has none."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for number, text in enumerate(content.splitlines(), 1):
        if (line := read_line(text)) is not None:
            yield line
        else:
            log.warning("%s:%d: passed over: no line of this file", path, number)


def read_line(text: bytes) -> dict[str, Any] | None:
    """What one line of a `batches.jsonl` says; None where it is none."""
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    fields = _FIELDS.get(str(line.get("kind")))
    if fields is None or not all(isinstance(line.get(key), fields[key]) for key in fields):
        return None
    calls = line.get("items", [])
    most = line.get("most", [])
    are_calls = all(isinstance(id, str) and _CALL.fullmatch(id) for id in calls)
    return line if are_calls and _are_amounts(most, len(calls)) else None


def set_aside_damaged_steps(run_dir: Path) -> list[str]:
    """Move the unreadable lines of `batches.jsonl` to the quarantine, and name each.

    For a start, before anything is read of it. Raises `StorageError`.
    """
    return keep_readable(
        run_dir / "batches.jsonl", run_dir / "quarantine", lambda text: read_line(text) is not None
    )


def _are_amounts(most: Any, calls: int) -> bool:
    if not isinstance(most, list) or len(most) not in (0, calls):
        return False
    pairs = all(isinstance(one, list) and len(one) == 2 for one in most)
    return pairs and all(isinstance(number, _NUMBER) for one in most for number in one)


def index_of(results: Path, job: BatchJob) -> dict[str, tuple[int, int]]:
    """Where the result of each call of a collected wave is in a file: offset and length.

    Raises `OSError`, and `ValueError` where these are not the results that were collected.
    """
    index = {}
    offset = replies = 0
    with results.open("rb") as file:
        for line in file:
            result = exact_json.loads(line)
            if not isinstance(result, dict) or "id" not in result:
                msg = "a line that is no result"
                raise ValueError(msg)
            index[result["id"]] = (offset, len(line))
            offset += len(line)
            replies += "reply" in result
    if replies != job.replies:
        msg = f"{replies:,} replies instead of {job.replies:,}"
        raise ValueError(msg)
    return index


def free_unsent(run_dir: Path, quarantine: Path) -> list[Cost]:
    """Void the jobs of which earlier starts sent nothing; gives what was reserved for their calls.

    Nobody else will return it: the workers that asked for these calls are gone.
    """
    batch_log = BatchLog(run_dir, quarantine)
    freed = [Cost(*most) for most in batch_log.give_up_unsent()]
    batch_log.close()
    return freed


def held_in(run_dir: Path, settled: Container[bytes]) -> dict[bytes, dict[str, list[Any]]]:
    """What earlier starts have reserved for calls that no batch has answered, by task and call.

    It was granted and never returned: a worker can only settle a call, and return what is left,
    when it has an answer, and there is none before a job is collected. Jobs that were not sent
    must be given up first.
    """
    found: dict[bytes, dict[str, list[Any]]] = {}
    for job in jobs_in(run_dir / "batches.jsonl"):
        if job.state in ("sending", "created"):
            for id, most in zip(job.ids, job.most, strict=False):
                if (task := task_of(id)) not in settled:
                    found.setdefault(task, {})[id] = most
    return found


def jobs_in(path: Path) -> Iterable[BatchJob]:
    """The waves that a `batches.jsonl` tells of, as they are after its last line."""
    jobs: dict[str, BatchJob] = {}
    for line in read_lines(path):
        try:
            apply_step(jobs, line)
        except KeyError as error:
            log.warning(
                "%s: passed over: a step of a wave that was never gathered: %s", path, error
            )
    return jobs.values()


def apply_step(jobs: dict[str, BatchJob], line: dict[str, Any]) -> None:
    """Change `jobs`, by name, by one line. Raises `KeyError` where its wave is not known."""
    if line["kind"] == "gathered" and line["wave"] not in jobs:
        name, most = line["wave"], line.get("most", [])
        jobs[name] = BatchJob(name, line["model"], line["items"], most)
        return
    if line["kind"] == "live":
        return
    job = jobs[line["wave"]]
    job.state = line["kind"]
    match line["kind"]:
        case "sending":
            job.sent_at, job.upload, job.size = line["at"], line["upload"], line["bytes"]
        case "created":
            job.batch, job.created_at = line["batch"], line["at"]
        case "collected":
            job.replies = line["replies"]
        case "failed":
            job.why = line["why"]
