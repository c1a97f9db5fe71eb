"""Prompts and their identity: which row is which, across edits, reorderings and duplicates.

A prompt's id is the row's own `id`, `task_id` or `instance_id`, else a hash of the row's content;
a row that repeats an id gets an occurrence number (`#2`). Never the position. Beside the id
stands a digest of the columns that decide the conversation, so that an edited prompt under an
old id is new work. A task is one sample of one prompt.

`scan` reads the file once and keeps, in 12 bytes per row and 16 per task, where the rows lie and
what their tasks' keys are. Which tasks need work is then told without reading a row, and rows are
read one at a time. `runs.dataset.scan_cache` keeps that for the next start.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from runs.dataset.lines import Reading, read_again, read_rows
from runs.dataset.row import RowRules, with_plain_prompt
from runs.dataset.row_setup import SIGNS
from runs.errors import DatasetChanged, DatasetError
from runs.shards import Shard
from runs.tasks import BadRow, Task, task_key
from toolsets import exact_json

ID_COLUMNS = ("id", "task_id", "instance_id")

_LOOKS_GENERATED = re.compile(r"#s?\d+$|^row-[0-9a-f]{16}|^\d{4}-\d\d-\d\d([T ]|$)")
"""Own ids that the content hash stands in for: they could be taken for generated ones, or, being
dates, the Hugging Face loader would turn the whole column into timestamps."""


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass over a dataset file found."""

    path: Path
    sha256: str
    """Of all usable rows, whatever the shard."""
    all_rows: int
    """Usable rows, after `max_samples`."""
    rows: int
    """Those of them that belong to the shard."""
    bad_rows: tuple[BadRow, ...]
    """Those that count in the shard: each bad row counts in one."""
    all_bad: int
    """How many there are, whatever the shard."""
    shard: Shard | None
    """The part of the rows that counts; None for all."""
    rules: RowRules
    max_samples: int | None
    num_samples: int
    size: int
    """How many bytes of the file were read."""
    content_digest: str
    """Of these bytes; see `Reading`."""
    may_go_on: bool
    """What stands behind these bytes does not matter."""
    offsets: array[int]
    """Where the usable rows lie."""
    occurrences: array[int]
    """For each usable row, how many rows up to it have its id."""
    setup_columns: dict[str, int]
    """How many usable rows have something to say in which of `row_setup.SIGNS`."""
    keys: bytes
    """The keys of all tasks, the samples of a prompt side by side, 16 bytes each."""

    @property
    def tasks(self) -> int:
        """How many tasks there are."""
        return self.rows * self.num_samples

    def key(self, number: int) -> bytes:
        """The key of one task, from 0."""
        return self.keys[16 * number : 16 * number + 16]


def scan(
    path: Path,
    *,
    max_samples: int | None,
    rules: RowRules | None = None,
    num_samples: int = 1,
    shard: Shard | None = None,
) -> Scan:
    """Read the whole file once. Raises `DatasetError` where nothing in it is usable."""
    rules = rules or RowRules()
    bad_rows = []
    offsets, hashes = array("Q"), array("Q")
    keys = bytearray()
    all_rows = 0
    setup_columns: dict[str, int] = {}
    fingerprint = hashlib.sha256()
    reading = Reading()
    is_bounded = False
    for row in read_rows(path, rules, reading):
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        all_rows += 1
        for name in SIGNS:
            if row.columns.get(name) is not None:
                setup_columns[name] = setup_columns.get(name, 0) + 1
        fingerprint.update(_canonical(row.columns))
        base = _base_id(row.columns)
        short_hash = _short_hash(base)
        if shard is None or shard.holds(short_hash):
            offsets.append(row.offset)
            hashes.append(short_hash)
            digest = input_digest(row.columns, rules)
            for sample in range(num_samples):
                keys += task_key(_task_id(base, sample), digest)
        if all_rows == max_samples:
            is_bounded = True
            break
    if not all_rows:
        msg = f"{path}: no usable row"
        if bad_rows:
            first = bad_rows[0]
            msg += f" among {len(bad_rows)}; the first, line {first.line}: {first.reason}"
        else:
            msg += "; the file is empty"
        raise DatasetError(msg)
    occurrences = array("I", [1]) * len(offsets)
    for number, base, columns in _rows_with_a_used_id(path, offsets, hashes, occurrences):
        prompt_id = _numbered(base, occurrences[number])
        digest = input_digest(columns, rules)
        ids = (_task_id(prompt_id, sample) for sample in range(num_samples))
        start = 16 * num_samples * number
        keys[start : start + 16 * num_samples] = b"".join(task_key(one, digest) for one in ids)
    return Scan(
        path=path,
        sha256=fingerprint.hexdigest(),
        all_rows=all_rows,
        rows=len(offsets),
        bad_rows=tuple(row for row in bad_rows if shard is None or shard.holds(row.line)),
        all_bad=len(bad_rows),
        shard=shard,
        rules=rules,
        max_samples=max_samples,
        num_samples=num_samples,
        size=reading.size,
        content_digest=reading.digest,
        may_go_on=is_bounded and reading.ends_a_line,
        offsets=offsets,
        occurrences=occurrences,
        setup_columns=setup_columns,
        keys=bytes(keys),
    )


def tasks(scan: Scan, *, num_samples: int) -> Iterator[Task]:
    """Stream the tasks of a scanned file in its order, the samples of a prompt side by side.

    Raises `DatasetChanged` at a row that is no longer what it was.
    """
    with _open(scan.path) as file:
        for row in range(scan.rows):
            yield from _tasks_of(scan, file, row, range(num_samples))


def tasks_at(scan: Scan, numbers: Iterable[int]) -> Iterator[Task]:
    """Stream those of a file's tasks that have these numbers; see `Scan.key`.

    Raises `DatasetChanged` at a row that is no longer what it was.
    """
    with _open(scan.path) as file:
        for number in numbers:
            row, sample = divmod(number, scan.num_samples)
            yield from _tasks_of(scan, file, row, (sample,))


def _tasks_of(scan: Scan, file: BinaryIO, row: int, samples: Iterable[int]) -> Iterator[Task]:
    columns = read_again(file, scan.offsets[row])
    if columns is None:
        raise _changed(scan.path, scan.offsets[row])
    digest = input_digest(columns, scan.rules)
    prompt_id = _numbered(_base_id(columns), scan.occurrences[row])
    if task_key(prompt_id, digest) != scan.key(row * scan.num_samples):
        raise _changed(scan.path, scan.offsets[row])
    for sample in samples:
        yield Task(_task_id(prompt_id, sample), prompt_id, sample, digest, columns)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        msg = f"{path}: cannot read the dataset: {error.strerror or error}"
        raise DatasetError(msg) from error


def _changed(path: Path, offset: int) -> DatasetChanged:
    return DatasetChanged(
        f"{path}: the row at byte {offset} is not what it was when this start began: the dataset "
        "was changed meanwhile. Nothing that was finished is lost; run the same command again to "
        "go on with the dataset as it is now."
    )


def input_digest(columns: dict[str, Any], rules: RowRules) -> str:
    """16 hex digits over the columns that decide what a conversation is."""
    return hashlib.blake2b(_canonical(rules.deciding(columns)), digest_size=8).hexdigest()


def _rows_with_a_used_id(
    path: Path, offsets: array[int], hashes: array[int], occurrences: array[int]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """The rows whose id an earlier row has: number, id, columns; fills in their occurrences."""
    repeated = _repeated(hashes)
    if not repeated:
        return
    counts: Counter[str] = Counter()
    with _open(path) as file:
        for number, short_hash in enumerate(hashes):
            if short_hash not in repeated:
                continue
            columns = read_again(file, offsets[number])
            if columns is None or _short_hash(base := _base_id(columns)) != short_hash:
                raise _changed(path, offsets[number])
            counts[base] += 1
            if counts[base] > 1:
                occurrences[number] = counts[base]
                yield number, base, columns


def _repeated(hashes: array[int]) -> set[int]:
    """The values that occur more than once.

    They are sorted into buckets, so that only one bucket at a time becomes a set of objects. A
    false find between two short hashes does no harm: the id is then counted, and found once.
    """
    buckets = [array("Q") for _ in range(256)]
    for value in hashes:
        # Not by the last bits: those of one shard may have them in common.
        buckets[value >> 56].append(value)
    found: set[int] = set()
    for bucket in buckets:
        seen: set[int] = set()
        for value in bucket:
            (found if value in seen else seen).add(value)
    return found


def _numbered(base: str, occurrence: int) -> str:
    return base if occurrence == 1 else f"{base}#{occurrence}"


def _task_id(prompt_id: str, sample: int) -> str:
    return f"{prompt_id}#s{sample}" if sample else prompt_id


def _base_id(columns: dict[str, Any]) -> str:
    for name in ID_COLUMNS:
        value = columns.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            own = str(value)
            if own and not _LOOKS_GENERATED.search(own):
                return own
    content = _canonical(with_plain_prompt(columns))
    return f"row-{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _canonical(value: Any) -> bytes:
    return exact_json.dumps(value, option=orjson.OPT_SORT_KEYS)


def _short_hash(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
