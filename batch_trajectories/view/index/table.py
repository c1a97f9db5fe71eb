"""The parts of an index, opened as one table of batches whose memory is the files.

Selections are lists of masks, one per batch, so that a filter needs a bit per record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from batch_trajectories.view.index.columns import SCHEMA, make_rows
from batch_trajectories.view.index.parts import IndexPart, open_part

POOL = ThreadPoolExecutor(2, thread_name_prefix="columns")
"""Arrow's functions let other threads run."""

_MAX_COMPARED = 24
"""Parts; merged ones grow at least by half each, so that there are fewer."""

Masks = list[pa.BooleanArray]
"""The selected rows of each batch."""


class RowPlace(NamedTuple):
    """A row of the table."""

    batch: int
    row: int


SAMPLES = "samples"
"""Names the order of `Table.order` that keeps the samples of a prompt together."""


class SampleGroup(NamedTuple):
    """The numbers of samples of a prompt: all, judged, and passed."""

    samples: int
    judged: int
    passed: int


class Table:
    """The rows of an index at one moment."""

    def __init__(self, parts: Sequence[IndexPart], before: Table | None = None) -> None:
        """Open the parts; `before` is the table so far, whose work is used again."""
        self.parts = list(parts)
        known = {} if before is None else before._opened
        self._opened: dict[Path, tuple[list[pa.RecordBatch], int]] = {
            part.path: known[part.path] if part.path in known else open_part(part.path)
            for part in self.parts
        }
        self.batches = [batch for found, _ in self._opened.values() for batch in found]
        self.unreadable = sum(bad for _, bad in self._opened.values())
        self.bytes = sum(part.end - part.begin for part in self.parts)
        """The number of bytes of records.jsonl that the table covers."""
        self._starts = [0, *accumulate(batch.num_rows for batch in self.batches)]
        self.counting = self._counting()
        """The rows that no later record of the same task replaces."""

    def _counting(self) -> Masks:
        """Compare the keys of each part with those of the parts after it, which are smaller.

        While a new index is made, of many parts, nothing is compared: they are merged at its end.
        """
        masks = [pa.repeat(pa.scalar(True), batch.num_rows) for batch in self.batches]
        if len(self.parts) > _MAX_COMPARED:
            return masks
        first = 0
        for found, _ in self._opened.values():
            later = self.batches[first + len(found) :]
            if later:
                keys = pa.chunked_array([batch.column("key") for batch in later], pa.binary(16))
                for number in range(first, first + len(found)):
                    replaced = pc.is_in(self.batches[number].column("key"), value_set=keys)
                    if replaced.true_count:
                        masks[number] = pc.invert(replaced)
            first += len(found)
        return masks

    def select(self, chooses: Callable[[pa.RecordBatch], Any] | None) -> Masks:
        """The counting rows of each batch that a filter chooses; None chooses all."""
        if chooses is None:
            return self.counting

        def masked(pair: tuple[pa.RecordBatch, Any]) -> Any:
            batch, counts = pair
            return pc.and_(pc.fill_null(chooses(batch), False), counts)

        return [*POOL.map(masked, zip(self.batches, self.counting, strict=True))]

    def columns(self, masks: Masks, names: Sequence[str]) -> dict[str, pa.ChunkedArray]:
        """Read some columns of the selected rows."""

        def select_column(name: str) -> pa.ChunkedArray:
            chunks = []
            for batch, mask in zip(self.batches, masks, strict=True):
                column = batch.column(name)
                selects_all = mask.true_count == len(mask)
                chunks.append(column if selects_all else column.filter(mask))
            return pa.chunked_array(chunks, SCHEMA.field(name).type)

        return dict(zip(names, POOL.map(select_column, names), strict=True))

    def order(self, masks: Masks, by: str | None, *, down: bool) -> pa.Array:
        """The numbers of the selected rows in an order; None: as they were written.

        `SAMPLES` keeps the samples of a prompt together: prompts as they were written, samples by
        number. Unknown values come last.
        """
        chosen = pc.indices_nonzero(pa.chunked_array(masks, pa.bool_()))
        if by == SAMPLES:
            return chosen.take(self._group_prompts(masks))
        if by is None:
            return chosen[::-1] if down else chosen
        values = self.columns(masks, [by])[by]
        if pa.types.is_boolean(values.type):
            values = values.cast(pa.int8())
        known = values.is_valid()
        unknown = chosen.filter(pc.invert(known))
        chosen, values = chosen.filter(known), values.drop_null()
        direction = "descending" if down else "ascending"
        places = pc.sort_indices(pa.table({"value": values}), [("value", direction)])
        return pa.concat_arrays([_one(chosen.take(places)), _one(unknown)])

    def _group_prompts(self, masks: Masks) -> Any:
        columns = self.columns(masks, ["prompt_id", "sample"])
        # Arrow numbers the values of a dictionary in the order in which they first come.
        prompts = columns["prompt_id"].combine_chunks().dictionary_encode().indices
        keys = pa.table({"prompt": prompts, "sample": columns["sample"].combine_chunks()})
        return pc.sort_indices(keys, [("prompt", "ascending"), ("sample", "ascending")])

    def groups(self, prompt_ids: Sequence[str]) -> dict[str, SampleGroup]:
        """The samples of these prompts, whether a filter leaves them or not."""
        wanted = pa.array(prompt_ids, pa.string())
        masks = self.select(lambda batch: pc.is_in(batch.column("prompt_id"), value_set=wanted))
        columns = self.columns(masks, ["prompt_id", "passed"])
        groups = dict.fromkeys(prompt_ids, SampleGroup(0, 0, 0))
        prompts, verdicts = (columns[name].to_pylist() for name in ("prompt_id", "passed"))
        for prompt_id, passed in zip(prompts, verdicts, strict=True):
            before = groups[prompt_id]
            groups[prompt_id] = SampleGroup(
                samples=before.samples + 1,
                judged=before.judged + (passed is not None),
                passed=before.passed + (passed is True),
            )
        return groups

    def rows(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        """The rows with these numbers, in their order."""
        by_batch: dict[int, list[tuple[int, int]]] = {}
        for at, number in enumerate(numbers):
            place = self.place(number)
            by_batch.setdefault(place.batch, []).append((at, place.row))
        made: dict[int, dict[str, Any]] = {}
        for batch, some in by_batch.items():
            rows = make_rows(self.batches[batch], [row for _, row in some])
            made |= {at: row for (at, _), row in zip(some, rows, strict=True)}
        return [made[at] for at in range(len(numbers))]

    def place(self, number: int) -> RowPlace:
        """The place of the row with this number."""
        batch = bisect_right(self._starts, number) - 1
        return RowPlace(batch, number - self._starts[batch])

    def number(self, found: RowPlace) -> int:
        """The number of a row."""
        return int(self._starts[found.batch]) + found.row

    def find(self, column: str, value: Any) -> list[RowPlace]:
        """The counting rows with a value in a column."""
        scalar = pa.scalar(value, SCHEMA.field(column).type)
        masks = self.select(lambda batch: pc.equal(batch.column(column), scalar))
        return [
            RowPlace(number, row)
            for number, mask in enumerate(masks)
            for row in pc.indices_nonzero(mask).to_pylist()
        ]

    def value(self, found: RowPlace, column: str) -> Any:
        """One value of a row."""
        return self.batches[found.batch].column(column)[found.row].as_py()


def _one(array: Any) -> pa.Array:
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def count_selected(masks: Masks) -> int:
    """The number of selected rows."""
    return sum(int(mask.true_count) for mask in masks)
