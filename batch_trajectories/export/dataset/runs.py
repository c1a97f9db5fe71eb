"""Reads the records of several runs as one; tasks are numbered run by run, by name of the run."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.dataset.scan import Scan
from batch_trajectories.engine.run_totals import count_owed, stopping_rule
from batch_trajectories.export.record_order import RecordOrder
from batch_trajectories.export.statistics.rewards import pass_chance
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import Scores

Read = Callable[[int], Record]
"""Reads the record of a task by its number. Raises `UnreadableRecord`."""


@dataclass(frozen=True, slots=True)
class Source:
    """The run from which a dataset is made, and further runs to mix with it."""

    run_dir: Path
    scan: Scan
    num_samples: int
    config: RunConfig | None = None
    """The config of the run, which says which samples are tasks; None: all."""
    others: tuple[Source, ...] = ()

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.run_dir.name

    @property
    def all(self) -> list[Source]:
        """The runs, sorted by name."""
        return sorted((self, *self.others), key=lambda source: source.name)


@dataclass(frozen=True, slots=True)
class RunCounts:
    """The tasks of one run, as a manifest counts them."""

    tasks: int
    """Tasks in all, those of bad rows included."""
    discarded: int
    """Tasks of bad rows."""
    failed: int
    """Tasks without a record whose last attempt failed."""
    pending: int
    """Tasks without a record that the next start runs."""
    gone: int
    """Records whose task is no longer in the dataset."""


class SourceRecords:
    """The tasks of all runs of a source, which are numbered from 0."""

    def __init__(self, source: Source) -> None:
        """Raises `UnreadableRecord`."""
        self.sources = source.all
        self.orders = [
            RecordOrder(one.run_dir, one.scan, num_samples=one.num_samples) for one in self.sources
        ]
        self._names = [one.name for one in self.sources]
        self._firsts = [0, *accumulate(map(len, self.orders))]
        self._rules = [stopping_rule(one.config) for one in self.sources]

    def __len__(self) -> int:
        """Number of tasks."""
        return self._firsts[-1]

    @property
    def record_count(self) -> int:
        """Number of tasks that have a record."""
        return sum(order.record_count for order in self.orders)

    def groups(self, *, by_prompt: bool) -> Iterator[list[list[int]]]:
        """Groups of tasks as `RecordOrder.groups` gives them; each group is of one run."""
        for first, order in zip(self._firsts, self.orders, strict=False):
            for few in order.groups(by_prompt=by_prompt):
                yield [[first + n for n in numbers] for numbers in few] if first else few

    def find_run_name(self, number: int) -> str:
        """The name of the run of a task."""
        return self._names[bisect_right(self._firsts, number) - 1]

    def pass_rate(self, number: int, judged: int, passed: int) -> float | None:
        """The pass rate of a task's prompt, corrected if samples stopped early; None if unknown."""
        rule = self._rules[bisect_right(self._firsts, number) - 1]
        return pass_chance(judged, passed, 1, rule) if judged else None

    @contextmanager
    def reading(self) -> Iterator[Read]:
        """Open the records; yields a function that reads a record by the number of its task."""
        with ExitStack() as stack:
            readers: Sequence[Read] = [
                stack.enter_context(order.open_reader(Scores(source.run_dir)))
                for order, source in zip(self.orders, self.sources, strict=True)
            ]
            firsts = self._firsts

            def read(number: int) -> Record:
                run = bisect_right(firsts, number) - 1
                return readers[run](number - firsts[run])

            yield readers[0] if len(readers) == 1 else read

    def counts(self) -> Iterator[RunCounts]:
        """The counts of each run, in the order of `sources`."""
        for order, source in zip(self.orders, self.sources, strict=True):
            left = count_owed(
                source.run_dir, source.scan, source.config, order.tasks_without_record()
            )
            discarded = len(source.scan.bad_rows) * source.num_samples
            yield RunCounts(
                tasks=len(order) - left.not_needed + discarded,
                discarded=discarded,
                failed=left.failed,
                pending=left.pending,
                gone=order.gone,
            )
