"""Reads records in the order of the dataset, with a few bytes of memory per record.

Records are stored in the order in which they were finished. The scan has the keys of all tasks and
each record has its row, so the dataset is not read again.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from batch_trajectories.dataset.scan import Scan
from batch_trajectories.records.names import RECORDS_FILE, RECORDS_INDEX
from batch_trajectories.records.reader import open_records, read_record, split_by_size
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.records import UnreadableRecord, load_index
from batch_trajectories.records.scores import Scores


class RecordOrder:
    """Finds the records of a run by the number of the task; samples of a prompt are adjacent."""

    def __init__(self, run_dir: Path, scan: Scan, *, num_samples: int) -> None:
        """The scan must be for `num_samples` samples of each prompt.

        Raises `UnreadableRecord`.
        """
        if num_samples != scan.num_samples:
            raise ValueError(f"the scan is for {scan.num_samples} samples, not {num_samples}")
        index = load_index(run_dir, lenient=False)
        rows, self.gone = index.match(scan.keys)
        """Number of records whose task is no longer in the dataset."""
        self._run_dir = run_dir
        self._key = scan.key
        self._samples = num_samples
        self._offsets, self._lengths = index.places(rows)

    def __len__(self) -> int:
        """Number of tasks."""
        return len(self._lengths)

    def locate(self, number: int) -> tuple[int, int, bytes]:
        """The offset, length and key of the record of a task."""
        return self._offsets[number], self._lengths[number], self._key(number)

    def tasks_without_record(self) -> Iterator[int]:
        """The numbers of tasks that have no record."""
        return (number for number, length in enumerate(self._lengths) if not length)

    @contextmanager
    def open_reader(self, scores: Scores | None = None) -> Iterator[RecordReader]:
        """Open the records; yields a reader, which adds `scores` that were given after the run.

        If the reader raises `UnreadableRecord`, the index is removed, so that the next start reads
        all records and sets aside the unreadable ones.
        """
        try:
            with open_records(self._run_dir) as records:
                yield RecordReader(self, records, scores)
        except UnreadableRecord:
            # If the records are gone, the index is the only trace of them.
            if (self._run_dir / RECORDS_FILE).exists():
                (self._run_dir / RECORDS_INDEX).unlink(missing_ok=True)
            raise

    @property
    def total_bytes(self) -> int:
        """The bytes of the lines of all records."""
        return sum(self._lengths)

    @property
    def record_count(self) -> int:
        """Number of tasks that have a record."""
        return sum(1 for _ in self.numbers())

    def numbers(self) -> Iterator[int]:
        """The numbers of tasks that have a record."""
        return (number for number, length in enumerate(self._lengths) if length)

    def batches(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        """Divide numbers of tasks into small lists; see `split_by_size`."""
        return split_by_size(numbers, self._lengths.__getitem__)

    def groups(self, *, by_prompt: bool) -> Iterator[list[list[int]]]:
        """Tasks with a record in groups of one, or by prompt; yields a few groups at a time."""
        if not by_prompt or self._samples == 1:
            return ([[number] for number in few] for few in self.batches(self.numbers()))
        return split_by_size(
            self._prompts(), lambda numbers: sum(map(self._lengths.__getitem__, numbers))
        )

    def _prompts(self) -> Iterator[list[int]]:
        """The tasks with a record by prompt; prompts without any are left out."""
        for first in range(0, len(self._lengths), self._samples):
            lengths = self._lengths[first : first + self._samples]
            if numbers := [number for number, length in enumerate(lengths, first) if length]:
                yield numbers


class RecordReader:
    """Reads the records of tasks by their numbers."""

    def __init__(self, order: RecordOrder, records: BinaryIO, scores: Scores | None) -> None:
        self._order = order
        self._records = records
        self._scores = scores

    def __call__(self, number: int) -> Record:
        """Read the record of a task. Raises `UnreadableRecord`."""
        record = read_record(self._records, *self._order.locate(number))
        return record if self._scores is None else self._scores.extend_record(record)


class DuplicateTable:
    """Finds tasks that are equal to an earlier one, in 24 to 48 bytes per task.

    Tasks are compared only if their hashes are equal.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity` is the maximum number of tasks."""
        size = 1 << (2 * capacity + 1).bit_length()
        self._mask = size - 1
        self._hashes = array("q", bytes(8 * size))
        self._numbers = array("I", bytes(4 * size))
        """The number of the task plus 1; 0 for an empty slot."""

    def is_new(self, number: int, hashed: int, is_same: Callable[[int], bool]) -> bool:
        """Whether no earlier task is the same; `is_same` compares this task with an earlier one."""
        slot = hashed & self._mask
        while earlier := self._numbers[slot]:
            if self._hashes[slot] == hashed and is_same(earlier - 1):
                return False
            slot = (slot + 1) & self._mask
        self._hashes[slot] = hashed
        self._numbers[slot] = number + 1
        return True
