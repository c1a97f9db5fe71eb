"""What an export must know of all records, in columns of numbers: a few bytes for each.

Records lie in the order in which they were finished, and rows come in the order of the dataset.
Nothing of the dataset is read for that: its scan holds the keys of its tasks, and each record its
row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from runs.dataset.scan import Scan
from runs.store.reader import SharedTools, Stored, open_records, read_record
from runs.store.records import UnreadableRecord, load_index

_FEW = 8
_FEW_BYTES = 1 << 17
"""Found by trying, with records of 4 and 34 KB."""


class RecordOrder:
    """Where the records of a run lie, task by task, the samples of a prompt side by side."""

    def __init__(self, run_dir: Path, scan: Scan, *, num_samples: int) -> None:
        """`num_samples` of each prompt are told; the scan must have been made for them.

        Raises `UnreadableRecord`.
        """
        if num_samples != scan.num_samples:
            msg = f"a scan for {scan.num_samples} samples says nothing of {num_samples}"
            raise ValueError(msg)
        index = load_index(run_dir, lenient=False)
        rows, self.gone = index.match(scan.keys)
        """How many tasks have a record and are not asked for any more."""
        self._run_dir = run_dir
        self._key = scan.key
        self._samples = num_samples
        self._offsets, self._lengths = array("Q"), array("I")
        for row in rows:
            offset, length = index.entry(row)[:2] if row else (0, 0)
            self._offsets.append(offset)
            self._lengths.append(length)

    def __len__(self) -> int:
        """How many tasks there are."""
        return len(self._lengths)

    def without_record(self) -> Iterator[int]:
        """The tasks that have no record."""
        return (number for number, length in enumerate(self._lengths) if not length)

    @contextmanager
    def reading(self) -> Iterator[Callable[[int], Stored]]:
        """What reads the record of a task that has one, by its number.

        It raises `UnreadableRecord`; the index is then removed, so that the next start reads all
        records, and sets aside what is unreadable.
        """
        try:
            with open_records(self._run_dir) as records:
                loads = SharedTools().loads
                yield lambda number: read_record(
                    records, self._offsets[number], self._lengths[number], self._key(number), loads
                )
        except UnreadableRecord:
            # Without the records the index is all that tells of them.
            if (self._run_dir / "records.jsonl").exists():
                (self._run_dir / "records.idx").unlink(missing_ok=True)
            raise

    def numbers(self) -> Iterator[int]:
        """The tasks that have a record."""
        return (number for number, length in enumerate(self._lengths) if length)

    def groups(self, *, by_prompt: bool) -> Iterator[list[list[int]]]:
        """The same, each alone or those of one prompt together, and a few of these at a time.

        Whoever takes each step with all of a few, before the next step, finds its code in the
        processor's caches: record by record an export takes up to a fifth longer. Of more at a
        time the caches would not hold the records, and the garbage collector would visit them.
        """
        samples = self._samples if by_prompt else 1
        few: list[list[int]] = []
        size = 0
        for _, numbers in groupby(self.numbers(), key=lambda number: number // samples):
            few.append(list(numbers))
            size += sum([self._lengths[number] for number in few[-1]])
            if len(few) == _FEW or size >= _FEW_BYTES:
                yield few
                few, size = [], 0
        if few:
            yield few


class Seen:
    """Finds tasks that are equal to an earlier one, by hashes, in 24 to 48 bytes for each.

    Only those whose hashes are equal are compared.
    """

    def __init__(self, most: int) -> None:
        """`most` is how many tasks there can be."""
        size = 1 << (2 * most + 1).bit_length()
        self._mask = size - 1
        self._hashes = array("q", bytes(8 * size))
        self._numbers = array("I", bytes(4 * size))
        """One more than the number of the task; 0 where there is none."""

    def is_new(self, number: int, hashed: int, is_same: Callable[[int], bool]) -> bool:
        """Whether no earlier task is the same; `is_same` compares the one in question with it."""
        slot = hashed & self._mask
        while earlier := self._numbers[slot]:
            if self._hashes[slot] == hashed and is_same(earlier - 1):
                return False
            slot = (slot + 1) & self._mask
        self._hashes[slot] = hashed
        self._numbers[slot] = number + 1
        return True
