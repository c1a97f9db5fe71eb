"""Reads a run on disk, while it is running or afterwards; writes nothing to it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from agent.messages.message import Event, ReplyEvent, reply_in
from batch_trajectories.basics.errors import DatasetError, RunDirError
from batch_trajectories.basics.text import first_few
from batch_trajectories.basics.validation import bucket_url, is_url, mistakes_in
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan, tasks
from batch_trajectories.engine.origin import describe_received
from batch_trajectories.engine.run_dir import (
    find_run_dir,
    list_run_names,
    read_holder,
    read_run_json,
    was_started_here,
)
from batch_trajectories.engine.run_totals import (
    RunTotals,
    as_html,
    compute_totals,
    format_usd,
    known_usd,
    stopping_rule,
)
from batch_trajectories.engine.stored_scan import load_scan
from batch_trajectories.records.failures import stored_failures
from batch_trajectories.records.files import StorageError, find_outward_link, refuse_strange_files
from batch_trajectories.records.index import IndexEntry
from batch_trajectories.records.journal import Inflight
from batch_trajectories.records.names import INFLIGHT
from batch_trajectories.records.reader import open_index, read_id, read_record, stored_records
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.records import UnreadableRecord, load_index, refuse_lost_records
from batch_trajectories.records.scores import Scores
from batch_trajectories.records.tasks import Task

if TYPE_CHECKING:
    import datasets
    import pandas as pd
    import pyarrow as pa

    from agent.models.model import Price
    from batch_trajectories.api.tables import TableName
    from batch_trajectories.engine.hopeless import SignSeen
    from batch_trajectories.engine.stopping import StoppingRule

_MAX_LISTED_RUNS = 10
_MAX_LISTED_IDS = 10
_LAST_BYTES = 8 << 20


def open_run(
    run: Path | str, output_dir: Path | str = "trajectories", *, writes: bool = False
) -> StoredRun:
    """Open a run for reading, by its directory, its name in `output_dir` or its mirror's URL.

    For a URL, a copy of the mirror in the user's cache is updated and opened; a URL is refused if
    the caller `writes` to the run. Raises `RunDirError` if there is no such run; the error names
    existing runs.
    """
    if is_url(run):
        if writes:
            raise RunDirError(
                f"{run}: this is a mirror, and only a copy of it would change. Bring the run to a "
                "directory with its own command and --mirror, and give that directory"
            )
        return StoredRun(_update_copy(str(run)), url=str(run))
    output_dir = Path(output_dir)
    path = find_run_dir(run, output_dir)
    if not path.exists():
        runs = list_run_names(output_dir)
        known = f" Runs in {output_dir}: {first_few(runs, _MAX_LISTED_RUNS)}." if runs else ""
        place = run if "/" in str(run) else output_dir / run
        raise RunDirError(
            f"{place}: there is no such run.{known} --output_dir names another directory"
        )
    return StoredRun(path)


class KnownFunnel(NamedTuple):
    """The funnel of a run, as far as it is known."""

    funnel: dict[str, Any] | None
    """See `StoredRun.funnel`; None if it is unknown."""
    why_unknown: str | None = None
    signs: Sequence[SignSeen] = ()
    """The signs that the run gives nothing to train on; see `RunTotals.signs`."""


class StoredRun:
    """A run directory. Each method reads the files again, in their current state."""

    def __init__(self, path: Path, *, url: str | None = None) -> None:
        """`url` is the mirror of which `path` is a copy; None: it is no copy.

        Raises `RunDirError` if `path` is no run directory.
        """
        self.url = url
        refuse_strange_files(path)
        self.path = path
        self.identity = read_run_json(path)
        """The content of run.json: `config`, `meaning` (the options that affect the data),
        `dataset`, `versions`, `created`, `history`."""
        refuse_lost_records(path)
        if not self.is_own and (link := find_outward_link(path)) is not None:
            raise RunDirError(
                f"{describe_received(path)}, and {link} is a link to a file outside of it, which "
                "is not read; put the file itself there, or remove the link"
            )

    def __repr__(self) -> str:
        """A line: path, tasks by status, their cost, model, and whether the run is running."""
        index = load_index(self.path, lenient=True)
        statuses = Counter(entry.status for _, entry in index.records())
        cost = format_usd(known_usd(*index.costs()))
        counts = ", ".join(f"{count:,} {status}" for status, count in statuses.most_common())
        model = self.identity["config"].get("model")
        state = "" if (holder := self.holder) is None else f", running (process {holder['pid']})"
        return (
            f"<StoredRun {str(self.path)!r}: {counts or 'no task has ended'}; "
            f"{cost}; model {model}{state}>"
        )

    def _repr_html_(self) -> str:
        """Return a table for notebooks. Raises `RunError` if the run cannot be read."""
        holder = self.holder
        state = {} if holder is None else {"state": f"running, process {holder['pid']}"}
        return as_html(self.path, self.totals(), {"model": str(self.config.model), **state})

    @cached_property
    def config(self) -> RunConfig:
        """The config of the last start. Raises `RunDirError` if this version cannot read it."""
        try:
            return RunConfig.model_validate(self.identity["config"])
        except ValidationError as error:
            detail = mistakes_in(error)[0].describe()
            raise RunDirError(
                f"{self.path}/run.json: this version of the program cannot use its config: {detail}"
            ) from error

    @cached_property
    def is_own(self) -> bool:
        """Whether this user has started the run here.

        Of other runs, options that run code, or name a variable or an address, must not be used.
        """
        return was_started_here(self.path)

    @cached_property
    def scan(self) -> Scan:
        """The dataset as the last start scanned it. Raises `DatasetError`."""
        return load_scan(self.path, self.identity, self.config)

    @property
    def holder(self) -> dict[str, Any] | None:
        """The process that is working on the run: `pid`, `host`, `started`; None without one.

        For a mirror, the holder of the lease, which may have died since.
        """
        if self.url is None:
            return read_holder(self.path)
        from batch_trajectories.records.journal import read_note

        last = (read_note(self.path) or {})["last"]
        return None if last["is_end"] else last["holder"]

    def refresh(self) -> StoredRun:
        """Update the copy if the run is a mirror; returns the run in its current state."""
        return self if self.url is None else StoredRun(_update_copy(self.url), url=self.url)

    def tasks(self) -> Iterator[Task]:
        """The tasks in dataset order, each with `id`, `prompt_id`, `sample`, `columns`."""
        return tasks(self.scan)

    def records(self) -> Iterator[dict[str, Any]]:
        """The records of finished conversations, in the order written.

        If a task was run again, only its last record is given. Raises `UnreadableRecord`.
        """
        return (record.as_dict() for record in stored_records(self.path))

    def record(self, record_id: str) -> dict[str, Any]:
        """The record with this id or unique id prefix.

        If an edited prompt has several records, the last one. Raises `RunDirError` without any.
        """
        return self.find(record_id).as_dict()

    def find(self, record_id: str) -> Record:
        """The record with this id or unique id prefix, as a typed object; see `record`."""
        exact: tuple[bytes, IndexEntry] | None = None
        longer: dict[str, tuple[bytes, IndexEntry]] = {}
        with open_index(self.path) as (index, records):
            for key, entry in index.current_entries():
                content = read_id(records, entry.offset, entry.length, key)
                if content == record_id:
                    exact = key, entry
                elif content.startswith(record_id):
                    longer[content] = key, entry
            if exact is None:
                if len(longer) != 1:
                    raise RunDirError(self._not_found(record_id, list(longer)))
                (exact,) = longer.values()
            key, entry = exact
            record = read_record(records, entry.offset, entry.length, key)
        return Scores(self.path).extend_record(record)

    def last_records(self) -> Iterator[Record]:
        """The latest records, the last first, up to 8 MB.

        Skips unreadable records: the next start of the run sets them aside.
        """
        room = _LAST_BYTES
        with open_index(self.path, lenient=True) as (index, records):
            for key, entry in index.latest():
                room -= entry.length
                if room < 0:
                    return
                try:
                    yield read_record(records, entry.offset, entry.length, key)
                except UnreadableRecord:
                    continue

    def entries(self) -> Iterator[tuple[str, IndexEntry]]:
        """The id and the index entry of each record, without reading the whole record.

        Raises `UnreadableRecord` if a record is not in its place.
        """
        with open_index(self.path) as (index, records):
            for key, entry in index.current_entries():
                yield read_id(records, entry.offset, entry.length, key), entry

    def last_entries(self, limit: int | None) -> tuple[list[tuple[str, IndexEntry]], int]:
        """Ids and index entries of the latest `limit` records, and the number of all records.

        The last record comes first. `limit`: None means all. The id of an unreadable record is "".
        """
        entries: list[tuple[str, IndexEntry]] = []
        with open_index(self.path) as (index, records):
            for key, entry in islice(index.latest(), limit):
                try:
                    entries.append((read_id(records, entry.offset, entry.length, key), entry))
                except UnreadableRecord:
                    entries.append(("", entry))
            return entries, len(index)

    def batches(self, table: TableName = "tasks") -> Iterator[pa.RecordBatch]:
        """A table in Arrow batches of some megabytes, in the order in which records were written.

        Tables are `tasks` (a row per finished conversation), `turns`, `calls` and `scores`; see
        docs/notebook.md for their columns. Raises `UnreadableRecord`.
        """
        from batch_trajectories.api.tables import read_batches

        return read_batches(self.path, table)

    def to_arrow(self, table: TableName = "tasks") -> pa.Table:
        """A table as one Arrow table; see `batches`."""
        import pyarrow

        from batch_trajectories.api.tables import table_schema

        made: pa.Table = pyarrow.Table.from_batches(self.batches(table), table_schema(table))
        return made.unify_dictionaries()

    def to_pandas(self, table: TableName = "tasks") -> pd.DataFrame:
        """A table as a data frame with Arrow types, without copying if possible; see `batches`."""
        import pandas

        frame: pd.DataFrame = self.to_arrow(table).to_pandas(types_mapper=pandas.ArrowDtype)
        return frame

    def to_dataset(self, table: TableName = "tasks") -> datasets.Dataset:
        """A table as a dataset of the library `datasets`, without copying; see `batches`."""
        import datasets

        return datasets.Dataset(datasets.table.InMemoryTable(self.to_arrow(table)))

    def failures(self) -> Iterator[dict[str, Any]]:
        """The lines of failures.jsonl: failed attempts, worker deaths and bad rows, by `kind`."""
        return stored_failures(self.path)

    def in_flight(self) -> list[dict[str, Any]]:
        """The unfinished conversations with journaled events, the longest silent first.

        Keys: `id`, `turns` (replies so far), `tool` (the last tool called, or None), `doing`
        ("model": waiting for a reply; "tools": calls have no result yet), `calls` (the names of
        these calls), `idle_s` (seconds since the last event, None if unknown).
        """
        settled = load_index(self.path).keys()
        return conversations_in_flight(self.path / INFLIGHT, settled=settled, now=time.time())

    def totals(self) -> RunTotals:
        """Totals of tasks (done, failed, discarded, pending), turns, tokens and cost."""
        return compute_totals(self.path, self.scan, self.config)

    @property
    def rule(self) -> StoppingRule | None:
        """The rule by which prompts stop; None if the number of samples is fixed."""
        return stopping_rule(self.config)

    def statistics(self) -> dict[str, Any]:
        """Turns, tokens, costs, tools and reasoning over all records; see `stats --json`."""
        from batch_trajectories.export.statistics.run import compute_statistics
        from batch_trajectories.export.training_files import read_left_out_ids, run_style

        return compute_statistics(
            self.path,
            style=run_style(self.config.to_json()),
            max_attempts=self.config.max_attempts,
            samples=self.config.num_samples,
            rule=self.rule,
            left_out=read_left_out_ids(self.path),
            price_of=self.price_of,
        )

    def price_of(self, model: str) -> Price | None:
        """The price of a model of the run, by its name in the config; None if unknown."""
        from batch_trajectories.config.models import find_price  # it imports the price table

        try:
            return find_price(self.config, model)
        except RunDirError:  # of another version
            return None

    def by_model(self) -> list[dict[str, Any]]:
        """Cost and passes of each model of a run with several models; else empty."""
        if len(self.config.model_weights()) < 2:
            return []
        models: list[dict[str, Any]] = self.statistics()["rewards"].get("models", [])
        return models

    def funnel(self) -> dict[str, Any]:
        """Counts from the rows of the dataset over tasks, endings and checks to exports, with
        losses.

        See `export.statistics.funnel`. Raises `DatasetError` without the dataset, and `RunDirError`
        if the manifest of an export cannot be read.
        """
        return self._make_funnel(self.totals())

    def _make_funnel(self, totals: RunTotals) -> dict[str, Any]:
        from batch_trajectories.export.statistics.funnel import compute_funnel

        return compute_funnel(self.path, self.scan, totals, self.identity["dataset"])

    def funnel_if_known(self) -> KnownFunnel:
        """The funnel with the signs of the totals behind it, or the reason why it is unknown."""
        try:
            totals = self.totals()
            return KnownFunnel(self._make_funnel(totals), signs=totals.signs)
        except (DatasetError, RunDirError) as error:  # the dataset may have been moved
            return KnownFunnel(None, why_unknown=str(error))

    def _not_found(self, wanted: str, longer: list[str]) -> str:
        if not longer:
            return (
                f"{self.path}: no conversation that has ended has the id {wanted!r}, or an id that "
                f"begins so. `show {self.path.name}`, the training file and the report list ids."
            )
        shown = first_few(longer, _MAX_LISTED_IDS)
        return f"{self.path}: several ids begin with {wanted!r}: {shown}; give a complete id"


def _update_copy(url: str) -> Path:
    from batch_trajectories.mirror.copies import update_copy  # few runs are in buckets

    try:
        return update_copy(bucket_url(url))
    except ValueError as error:
        raise RunDirError(f"{url}: {error}") from None


def conversations_in_flight(
    inflight: Path, *, settled: Container[bytes], now: float
) -> list[dict[str, Any]]:
    """The unfinished conversations in the journals of a run; see `StoredRun.in_flight`.

    Journals have only events that are over. So a conversation with calls without results is running
    tools, and any other one is waiting for the model.
    """
    journals = Inflight(inflight, read_only=True)
    journals.read(settled=settled)
    return describe_conversations(journals, journals.tasks(), now=now)


def describe_conversations(
    journals: Inflight, keys: Iterable[bytes], *, now: float
) -> list[dict[str, Any]]:
    """Describe the conversations of some tasks in the journals; see `StoredRun.in_flight`."""
    conversations = []
    for key in keys:
        try:
            conversations.append(_state(journals.task_id(key), journals.events(key), now))
        except StorageError:
            continue  # the record of the last task of its segment was just written
    return sorted(conversations, key=lambda state: -(state["idle_s"] or 0.0))


def _state(task_id: str, events: Sequence[Event], now: float) -> dict[str, Any]:
    replies = [
        reply
        for event in events
        if event["kind"] in ("reply", "exchange")
        and (reply := reply_in(event)) is not None
        and "discarded" not in reply
    ]
    called = [_names(reply) for reply in replies]
    # Only the next call of an agent shows what it has done with its last reply.
    turn = replies[-1]["turn"] if replies else 0
    answered = {e["call"] for e in events if e["kind"] == "result" and e["turn"] == turn}
    last = called[-1] if called else []
    open_calls = [name for number, name in enumerate(last) if number not in answered]
    tools = [name for names in called for name in names]
    times = [at for event in events if (at := _ended_at(event)) is not None]
    return {
        "id": task_id,
        "turns": len(replies),
        "tool": tools[-1] if tools else None,
        "doing": "tools" if open_calls else "model",
        "calls": open_calls,
        "idle_s": round(max(0.0, now - max(times)), 1) if times else None,
    }


def _names(reply: ReplyEvent) -> list[str]:
    return [call["function"]["name"] for call in reply["message"].get("tool_calls", ())]


def _ended_at(event: Mapping[str, Any]) -> float | None:
    """The end of an event, epoch seconds; None if unknown."""
    if event["kind"] == "sub":
        return _ended_at(event["event"])
    if event["kind"] == "exchange":
        return _ended_at(event["reply"])
    if "started_at" in event:
        return float(event["started_at"] + event["duration_s"])
    return event.get("at")
