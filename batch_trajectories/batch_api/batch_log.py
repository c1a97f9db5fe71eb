"""The files of a run's batches: `batches.jsonl` and the directory `batches`.

A job is the calls of one batch; lines have its name under `wave`. Each step is a line of
`batches.jsonl`, on disk before the next step. So a start after a crash continues each job at its
last step:

gathered {"wave", "model", "at", "items"}   its calls are known; nothing was sent. With a budget,
                                            `most` has the amount reserved for each
sending {"wave", "at", "upload", "bytes"}   next, the provider is asked to create the batch
created {"wave", "at", "batch"}             the batch exists; from here on its calls cost money
collected {"wave", "at", "replies", …}      the results are in batches/NAME.results
failed {"wave", "at", "why"}                none of the calls was made; they are made live
void {"wave", "at"}                         no batch was created; its calls are gathered again
live {"calls"}                              number of calls of a start that were made live

`batches/NAME.items` has the calls as they are sent, until the batch exists. The results are
removed when their conversations have records.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import orjson

from agent.models.batches.base import ItemResult
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.text import plural
from batch_trajectories.config.endpoints import Cost
from batch_trajectories.engine.messages import parse_task_key
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    StorageError,
    add_checksum,
    list_directory,
    make_directory,
    read_object,
    repair_tail,
    set_unreadable_aside,
    sync_directory,
)
from batch_trajectories.records.names import BATCHES, BATCHES_FILE, QUARANTINE

log = logging.getLogger(__name__)

State = Literal["gathered", "sending", "created", "collected", "failed", "void"]

_NUMBER = (int, float)
_FIELDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "gathered": {"wave": str, "model": str, "at": _NUMBER, "items": list},
    "sending": {"wave": str, "at": _NUMBER, "upload": str, "bytes": int},
    "created": {"wave": str, "at": _NUMBER, "batch": str},
    "collected": {
        "wave": str,
        "at": _NUMBER,
        "replies": int,
        "failed": int,
        "cost_usd": _NUMBER,
        "saved_usd": _NUMBER,
        "unpriced": int,
    },
    "failed": {"wave": str, "at": _NUMBER, "why": str},
    "void": {"wave": str, "at": _NUMBER},
    "live": {"calls": int},
}
"""The required fields of each kind of line."""

_CALL_ID = re.compile(r"[0-9a-f]{32}-[0-9a-f]+")
"""The form of a call's id; see `item_id`."""


@dataclass(eq=False)
class BatchJob:
    """The calls of one batch."""

    name: str
    model: str
    """The name of the model's settings; see `model_label`."""
    ids: list[str]
    """The ids of the calls in the job, as workers know them."""
    reserves: list[list[Any]] = field(default_factory=list)
    """Dollars and tokens reserved for each call; empty without a budget."""
    state: State = "gathered"
    sent_at: float = 0.0
    """The time just before the provider was asked to create the batch, in epoch seconds."""
    size: int = 0
    """The size of all calls as they are sent, in bytes."""
    upload: str = ""
    """The provider's name for the uploaded calls; "" before."""
    batch: str = ""
    """The provider's id of the batch; "" before it exists."""
    created_at: float = 0.0
    """The time when the batch was created, in epoch seconds."""
    why: str = ""
    """The reason why no call was made; "" unless the batch failed."""
    replies: int = 0
    """The number of calls with a reply; 0 before the job is collected."""
    index: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Offset and length of each call's result in the file of results."""
    needed: int = 0
    """Number of calls whose conversations have no record yet."""

    def provider_id(self, id: str) -> str:
        """Return the id of a call for the provider, which is unique over all batches."""
        return f"{id}-{self.name}"

    def call_id(self, provider_id: str) -> str | None:
        """Return the id of a call from the provider's; None for a call of another batch."""
        id, _, name = provider_id.rpartition("-")
        return id if name == self.name else None


class BatchLog:
    """Reads and writes the files of batches. Not thread-safe. Methods raise `StorageError`."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        self._path = run_dir / BATCHES_FILE
        self._directory = run_dir / BATCHES
        repair_tail(self._path, quarantine)
        self._file: AppendFile | None = None

    def load(self, settled: Container[bytes]) -> list[BatchJob]:
        """Return the jobs of earlier starts with calls that are still needed.

        `settled` are the tasks that need no more work.
        """
        jobs = []
        for job in jobs_in(self._path):
            job.needed = sum(parse_task_key(id) not in settled for id in job.ids)
            if job.state == "collected" and job.needed:
                self._index(job)
            if job.needed and job.state not in ("gathered", "void"):
                jobs.append(job)
        still_needed = {self._results_file(job) for job in jobs}
        for path in list_directory(self._directory):
            if path not in still_needed:  # its job is no longer needed, or it is half written
                path.unlink()
        return jobs

    def note(self, job: BatchJob, state: State, **more: Any) -> None:
        """Write the line of a step durably, and update the job."""
        line = {"kind": state, "wave": job.name, "at": time.time(), **more}
        self._append(line)
        apply_step({job.name: job}, line)

    def note_live(self, calls: int) -> None:
        """Write the number of calls of this start that were made live."""
        self._append({"kind": "live", "calls": calls})

    def _append(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.check_exists()
        self._file.append(add_checksum(orjson.dumps(line)))
        self._file.sync()

    def items_file(self, job: BatchJob) -> Path:
        """Return the path of the file of a job's calls, as lines for the provider."""
        make_directory(self._directory)
        return self._directory / f"{job.name}.items"

    def begin_results(self, job: BatchJob) -> Results:
        """Create a new file for the results of a job."""
        make_directory(self._directory)
        return Results(job, self._results_file(job))

    def result(self, job: BatchJob, id: str) -> ItemResult:
        """Return the result of a call of a collected job."""
        if id not in job.index:
            return ItemResult(id, None, "the batch is over and has no result for it")
        offset, length = job.index[id]
        try:
            with self._results_file(job).open("rb") as file:
                file.seek(offset)
                line = exact_json.loads(file.read(length))
        except OSError as error:
            raise StorageError(
                f"{self._results_file(job)}: cannot read: {error.strerror or error}"
            ) from error
        if "reply" in line:
            return ItemResult(id, exact_json.dumps(line["reply"]))
        return ItemResult(id, None, line["why"])

    def remove(self, job: BatchJob) -> None:
        """Remove the files of a job that is no longer needed."""
        for path in (self._directory / f"{job.name}.items", self._results_file(job)):
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file, and remove the directory if it is empty."""
        if self._file is not None:
            self._file.close()
        if self._directory.is_dir() and not any(self._directory.iterdir()):
            self._directory.rmdir()

    def _results_file(self, job: BatchJob) -> Path:
        return self._directory / f"{job.name}.results"

    def _index(self, job: BatchJob) -> None:
        """Index the results; if that fails, mark the job to fetch them again for free."""
        try:
            job.index = index_results(self._results_file(job), job)
        except (OSError, ValueError) as error:
            log.warning(
                "%s cannot be read, so the replies of this batch are fetched again: %s",
                self._results_file(job),
                error,
            )
            job.state = "created"


class Results:
    """The results of a job, written as they arrive. After a crash they are fetched again."""

    def __init__(self, job: BatchJob, path: Path) -> None:
        self._job = job
        self._path = path
        self._temporary = path.with_suffix(".half")
        self._temporary.unlink(missing_ok=True)
        self._file = AppendFile(self._temporary)
        self._index: dict[str, tuple[int, int]] = {}

    def add(self, result: ItemResult) -> bool:
        """Write a result; return False if the call has one already, which then counts."""
        if result.id in self._index:
            return False
        line = orjson.dumps({"id": result.id, "why": result.why})
        if result.reply is not None:
            line = orjson.dumps({"id": result.id})[:-1] + b',"reply":' + result.reply + b"}"
        self._index[result.id] = (self._file.size, len(line) + 1)
        self._file.append(line + b"\n")
        return True

    def keep(self) -> None:
        """Make the results durable and put the file in place."""
        self._file.sync()
        self._temporary.replace(self._path)
        sync_directory(self._path.parent)
        self._job.index = self._index

    def close(self) -> None:
        """Close the file; without `keep` before, its results do not count."""
        self._file.close()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a `batches.jsonl` without damaged ones; none if the file is missing."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    for number, text in enumerate(content.splitlines(), 1):
        if (line := read_line(text)) is not None:
            yield line
        else:
            log.warning("Line %s:%d is no step of a batch and is skipped.", path, number)


def read_line(text: bytes) -> dict[str, Any] | None:
    """Return the content of a line of `batches.jsonl`; None if it is unreadable."""
    try:
        line = read_object(text)
    except DamagedLine:
        return None
    fields = _FIELDS.get(str(line.get("kind")))
    if fields is None or not all(isinstance(line.get(key), fields[key]) for key in fields):
        return None
    calls = line.get("items", [])
    reserves = line.get("most", [])
    are_calls = all(isinstance(id, str) and _CALL_ID.fullmatch(id) for id in calls)
    return line if are_calls and _are_amounts(reserves, len(calls)) else None


def set_aside_damaged_steps(run_dir: Path) -> list[str]:
    """Move the unreadable lines of `batches.jsonl` to the quarantine; return their names.

    Call it before the file is read. Raises `StorageError`.
    """
    return set_unreadable_aside(
        run_dir / BATCHES_FILE, run_dir / QUARANTINE, lambda text: read_line(text) is not None
    )


def _are_amounts(reserves: Any, calls: int) -> bool:
    if not isinstance(reserves, list) or len(reserves) not in (0, calls):
        return False
    pairs = all(isinstance(amount, list) and len(amount) == 2 for amount in reserves)
    return pairs and all(isinstance(number, _NUMBER) for amount in reserves for number in amount)


def index_results(results: Path, job: BatchJob) -> dict[str, tuple[int, int]]:
    """Return offset and length of each call's result in the file of a collected job.

    Raises `OSError`, and `ValueError` if these are not the results that were collected.
    """
    index = {}
    offset = replies = 0
    with results.open("rb") as file:
        for line in file:
            result = exact_json.loads(line)
            if not isinstance(result, dict) or "id" not in result:
                raise ValueError("a line is not a result")
            index[result["id"]] = (offset, len(line))
            offset += len(line)
            replies += "reply" in result
    if replies != job.replies:
        raise ValueError(f"{replies:,} replies instead of {job.replies:,}")
    return index


def free_unsent(run_dir: Path, quarantine: Path) -> list[Cost]:
    """Void the jobs that earlier starts did not send; return the amounts reserved for them."""
    # The workers that requested these calls have ended and cannot return the amounts.
    with closing(BatchLog(run_dir, quarantine)) as batch_log:
        unsent = [job for job in jobs_in(run_dir / BATCHES_FILE) if job.state == "gathered"]
        for job in unsent:
            batch_log.note(job, "void")
    return [Cost(*reserve) for job in unsent for reserve in job.reserves]


def has_open_batches(run_dir: Path, quarantine: Path, settled: Container[bytes]) -> bool:
    """Whether earlier starts left batches with calls of tasks that are not `settled`."""
    return bool(BatchLog(run_dir, quarantine).load(settled))


def load_reserved(run_dir: Path, settled: Container[bytes]) -> dict[bytes, dict[str, Cost]]:
    """Return amounts that earlier starts reserved for unanswered calls, by task and call.

    Call `free_unsent` first.
    """
    # A worker returns an amount when it has the answer, and no call has one before its job is
    # collected.
    reserves: dict[bytes, dict[str, Cost]] = {}
    for job in jobs_in(run_dir / BATCHES_FILE):
        if job.state in ("sending", "created"):
            for id, reserve in zip(job.ids, job.reserves, strict=False):
                if (task := parse_task_key(id)) not in settled:
                    reserves.setdefault(task, {})[id] = Cost(*reserve)
    return reserves


def jobs_in(path: Path) -> Iterable[BatchJob]:
    """Return the jobs in a `batches.jsonl`, in their state after its last line."""
    jobs: dict[str, BatchJob] = {}
    for line in read_lines(path):
        try:
            apply_step(jobs, line)
        except KeyError as error:
            log.warning(
                "A line of %s is skipped, because it is about a job that was never gathered: %s",
                path,
                error,
            )
    return jobs.values()


def apply_step(jobs: dict[str, BatchJob], line: dict[str, Any]) -> None:
    """Apply a line to `jobs` (by name). Raises `KeyError` if its job is unknown."""
    if line["kind"] == "gathered" and line["wave"] not in jobs:
        name = line["wave"]
        jobs[name] = BatchJob(
            name, model=line["model"], ids=line["items"], reserves=line.get("most", [])
        )
        return
    if line["kind"] == "live":
        return
    job = jobs[line["wave"]]
    job.state = line["kind"]
    match line["kind"]:
        case "sending":
            job.sent_at = line["at"]
            job.upload = line["upload"]
            job.size = line["bytes"]
        case "created":
            job.batch = line["batch"]
            job.created_at = line["at"]
        case "collected":
            job.replies = line["replies"]
        case "failed":
            job.why = line["why"]


# Totals of a run's batches over all its starts, from `batches.jsonl`.


@dataclass(frozen=True, slots=True)
class BatchTotals:
    """The totals of a run's batches; `summary.json` has them under `batches`."""

    batches: int
    """Number of batches whose results were fetched."""
    calls: int
    """Number of calls of these batches with a reply."""
    failed: int
    """Number of calls of these batches without a reply: failed or expired."""
    live: int
    """Number of calls that were made live instead, without those of killed starts."""
    cost_usd: float
    """Cost of the replies with a known price."""
    saved_usd: float
    """Dollars that the replies with a known price would have cost more if made live."""
    unpriced: int
    """Number of replies of unknown price."""
    waited_s: float
    """Seconds in which at least one batch was under way."""
    waiting: int
    """Number of calls in unfinished batches, as far as known."""

    def to_json(self) -> dict[str, Any]:
        """Return the totals for summary.json and `--json`."""
        return asdict(self)

    def describe(self) -> str:
        """Return the totals on one line, for a person."""
        summary = (
            f"batches {self.batches:,}: {plural(self.calls, 'call')} for ${self.cost_usd:,.4f}, "
            f"${self.saved_usd:,.4f} saved, {timedelta(seconds=round(self.waited_s))} waited"
        )
        summary += f", {plural(self.live, 'call')} live instead" if self.live else ""
        summary += f", {plural(self.waiting, 'call')} waiting" if self.waiting else ""
        return summary + (f" (price of {self.unpriced:,} unknown)" if self.unpriced else "")


def compute_batch_totals(run_dir: Path) -> BatchTotals | None:
    """Compute the totals of a run's batches; None if it has none."""
    calls: dict[str, int] = {}
    under_way: dict[str, float] = {}
    times: list[tuple[float, float]] = []
    collected: dict[str, dict[str, Any]] = {}
    live = 0
    is_empty = True
    for line in read_lines(run_dir / BATCHES_FILE):
        is_empty = False
        match line.get("kind"):
            case "gathered":
                calls[line["wave"]] = len(line["items"])
            case "sending":
                under_way[line["wave"]] = line["at"]
            case "live":
                live += line["calls"]
            case "collected" | "failed" | "void" as kind:
                since = under_way.pop(line["wave"], line["at"])
                if kind == "collected":
                    # Results that were lost are fetched again: the last line counts.
                    collected[line["wave"]] = line
                    times.append((since, line["at"]))
    if is_empty:
        return None
    lines = collected.values()
    return BatchTotals(
        batches=len(collected),
        calls=sum(line["replies"] for line in lines),
        failed=sum(line["failed"] for line in lines),
        live=live,
        cost_usd=sum(line["cost_usd"] for line in lines),
        saved_usd=sum(line["saved_usd"] for line in lines),
        unpriced=sum(line["unpriced"] for line in lines),
        waited_s=_covered_seconds(times),
        waiting=sum(calls.get(job, 0) for job in under_way),
    )


def _covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total time that the spans cover."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
