"""Holds the runs that were viewed last; only a few, so that memory has a limit."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batch_trajectories.basics.errors import RunError
from batch_trajectories.engine.run_dir import read_holder
from batch_trajectories.records.files import refuse_strange_files
from batch_trajectories.records.names import RECORDS_FILE
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.records import UnreadableRecord
from batch_trajectories.view.conversation import read_found
from batch_trajectories.view.index.charts import list_choices
from batch_trajectories.view.index.facts import read_facts
from batch_trajectories.view.index.filters import Choice, RowFilters, either, in_keys, invert_choice
from batch_trajectories.view.index.parts import find_cache, make_cache
from batch_trajectories.view.index.run_index import Maker, RunIndex
from batch_trajectories.view.index.table import Masks, Table, count_selected
from batch_trajectories.view.index.texts import RunTexts
from batch_trajectories.view.labels import (
    VERDICTS,
    RunLabels,
    compute_agreement,
    decided_records,
    records_by_label,
)
from batch_trajectories.view.runs import Places, RunPlace, is_own

_MAX_OPEN_RUNS = 4
_MAX_SELECTIONS = 4
_MAX_JUDGED_RECORDS = 20_000
"""Labelled records that are read for the agreement of reviewers."""


class _Order(NamedTuple):
    """The rows of a selection in an order."""

    masks: Masks
    by: str | None
    down: bool
    numbers: pa.Array


class OpenRun:
    """A run that is viewed."""

    def __init__(self, place: RunPlace) -> None:
        self.place = place
        self.index = RunIndex(place.path)
        self.texts = RunTexts(place.path)
        self.labels = RunLabels(place.path)
        self._facts: Maker | None = None
        self._facts_failed: str | None = None
        self._lock = threading.Lock()
        self._selected: OrderedDict[Any, Masks] = OrderedDict()
        self._order: _Order | None = None
        self._choices: tuple[str, dict[str, Any]] | None = None
        self._agreement: tuple[str, dict[str, Any]] | None = None

    @property
    def version(self) -> str:
        """A text that changes with the rows and the labels."""
        return f"{self.index.version}-{self.labels.size:x}"

    def select(self, table: Table, filters: RowFilters, more: Sequence[Choice] = ()) -> Masks:
        """The rows that the filters leave; the last selections are kept."""
        found = self.texts.find(filters.text) if filters.text else None
        # The table itself is the key: another request may have refreshed the index, and with it the
        # version, since this one got its table.
        key = (table, self.labels.size, filters.source, found and found.version)
        with self._lock:
            if key in self._selected and not more:
                self._selected.move_to_end(key)
                return self._selected[key]
        choices = [*more, *self._label_choices(filters)]
        if found is not None:
            choices.append(found.choice)
        masks = table.select(filters.join(choices))
        if not more:
            with self._lock:
                self._selected[key] = masks
                while len(self._selected) > _MAX_SELECTIONS:
                    self._selected.popitem(last=False)
        return masks

    def _label_choices(self, filters: RowFilters) -> list[Choice]:
        decided: list[Choice] = []
        if filters.undecided_by:
            decided = [
                invert_choice(
                    in_keys("record", decided_records(self.labels.refresh(), filters.undecided_by))
                )
            ]
        if not filters.labels:
            return decided
        keys = records_by_label(self.labels.refresh())
        choices: list[Choice] = []
        for name in filters.labels:
            if name == "none":
                judged = [key for verdict in VERDICTS for key in keys.get(verdict, ())]
                choices.append(invert_choice(in_keys("record", judged)))
            else:
                choices.append(in_keys("record", keys.get(name, ())))
        return [*decided, either(choices)]

    def order(self, table: Table, masks: Masks, by: str | None, *, down: bool) -> pa.Array:
        """The numbers of the selected rows in order; the last order is kept, with its masks."""
        with self._lock:
            last = self._order
        if last is not None and last.masks is masks and (last.by, last.down) == (by, down):
            return last.numbers
        numbers = table.order(masks, by, down=down)
        with self._lock:
            self._order = _Order(masks, by, down, numbers)
        return numbers

    def choices(self, table: Table) -> dict[str, Any]:
        """The values that rows can be filtered by, with the number of rows of each."""
        version = self.index.version
        if self._choices is None or self._choices[0] != version:
            self._choices = version, list_choices(table)
        keys = records_by_label(self.labels.refresh())
        found = {
            name: count_selected(table.select(in_keys("record", label_keys)))
            for name, label_keys in keys.items()
        }
        ordered = sorted(found.items(), key=lambda pair: -pair[1])
        return {**self._choices[1], "label": [[*pair] for pair in ordered if pair[1]]}

    def label_counts(self, table: Table, masks: Masks) -> list[list[Any]]:
        """The verdicts among the selected rows."""
        keys = records_by_label(self.labels.refresh())
        found = []
        for name in VERDICTS:
            if label_keys := keys.get(name):
                labelled = table.select(in_keys("record", label_keys))
                number = sum(
                    pc.and_(one, other).true_count
                    for one, other in zip(labelled, masks, strict=True)
                )
                found.append([name, number])
        return [pair for pair in found if pair[1]]

    def agreement(self, table: Table) -> dict[str, Any]:
        """The agreement of the reviewers, for at most 20,000 records. See `export.agreement`."""
        labels = self.labels.refresh()
        if labels is None:
            return {}
        version = self.version
        if self._agreement is None or self._agreement[0] != version:
            keys = records_by_label(labels)
            judged = [key for verdict in VERDICTS for key in keys.get(verdict, ())]
            masks = table.select(in_keys("record", judged[:_MAX_JUDGED_RECORDS]))
            numbers = table.order(masks, None, down=False).to_pylist()
            records = [record for number in numbers if (record := self._read(table, number))]
            self._agreement = version, compute_agreement(records)
        return self._agreement[1]

    def _read(self, table: Table, number: int) -> Record | None:
        try:
            return read_found(self.place, table, table.place(number), self.labels.refresh())
        except UnreadableRecord:
            return None  # the command `verify` names the record

    def facts(self) -> tuple[dict[str, Any] | None, str | None]:
        """The facts of the whole run, or why there are none; starts making them if due."""
        with self._lock:
            if self._facts is not None and self._facts.is_over():
                self._facts_failed = self._facts.problem()
                self._facts.stop()
                self._facts = None
            found, is_due = read_facts(make_cache(self.place.path), self.place.path)
            if is_due and self._facts is None and self._facts_failed is None:
                self._facts = Maker("facts", self.place.path)
            return found, self._facts_failed

    def close(self) -> None:
        """Stop the processes that work for the run."""
        self.index.close()
        self.texts.close()
        if self._facts is not None:
            self._facts.stop()


_MAX_CHECKED_BYTES = 1 << 30
"""Runs with more bytes of records are checked once they are opened."""


class HealthKeeper:
    """Makes the facts of finished runs, one after the other, since the list of runs shows them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maker: Maker | None = None
        self._tried: set[tuple[str, int]] = set()

    def begin_next(self, runs: Iterable[RunPlace]) -> None:
        """Begin with the next finished run whose facts are unknown, unless a process is at work.

        Facts are stored beside the index of the run, so no later server makes them again.
        """
        with self._lock:
            if self._maker is not None:
                if not self._maker.is_over():
                    return
                self._maker.stop()
                self._maker = None
            for run in runs:
                if (size := self._size_to_check(run)) is not None:
                    self._tried.add((run.key, size))
                    self._maker = Maker("facts", run.path)
                    return

    def _size_to_check(self, run: RunPlace) -> int | None:
        """The bytes of the run's records; None if it is not to be checked now."""
        try:
            size = (run.path / RECORDS_FILE).stat().st_size
            if not 0 < size <= _MAX_CHECKED_BYTES or (run.key, size) in self._tried:
                return None
            refuse_strange_files(run.path)
            if not is_own(run.path) or (run.url is None and read_holder(run.path) is not None):
                return None
            known = find_cache(run.path)
            if known is not None and read_facts(known, run.path)[0] is not None:
                return None
        except (OSError, RunError):
            return None  # the list says what is wrong with this run
        return size

    def close(self) -> None:
        """Stop the process at work."""
        with self._lock:
            if self._maker is not None:
                self._maker.stop()
                self._maker = None


class State:
    """The runs of a server."""

    def __init__(self, places: Places, who: str) -> None:
        """Open no run yet. `who` is the reviewer if a request names none."""
        self.places = places
        self.who = who
        self.health = HealthKeeper()
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()

    def open(self, key: str) -> OpenRun:
        """The run with a key. Raises `NoSuchRun`, and `RunDirError` for one with strange files."""
        place = self.places.find(key)
        refuse_strange_files(place.path)
        with self._lock:
            found = self._open.pop(key, None)
            if found is None or found.place.path != place.path:
                if found is not None:
                    found.close()
                found = OpenRun(place)
            self._open[key] = found
            while len(self._open) > _MAX_OPEN_RUNS:
                self._open.popitem(last=False)[1].close()
            return found

    def close(self) -> None:
        """Stop all processes of all runs."""
        self.health.close()
        with self._lock:
            for run in self._open.values():
                run.close()
