"""Prompts and their identity: which row is which, across edits, reorderings and duplicates.

A prompt's id is the row's own `id`, `task_id` or `instance_id`, else a hash of the row's content;
a row that repeats an id gets an occurrence number (`#2`). Never the position. Beside the id
stands a digest of the columns that decide the conversation, so that an edited prompt under an
old id is new work. A task is one sample of one prompt.

The file is read twice: `scan` finds which ids repeat, holding 8 bytes per row; `tasks` then
streams, holding only what repeats.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch.errors import DatasetError
from batch.row_rules import RowRules
from batch.rows import BadRow, Row, read_rows, reread_rows
from batch.shards import Shard

ID_COLUMNS = ("id", "task_id", "instance_id")

_LOOKS_GENERATED = re.compile(r"#s?\d+$|^row-[0-9a-f]{16}|^\d{4}-\d\d-\d\d([T ]|$)")
"""Own ids that the content hash stands in for: they could be taken for generated ones, or, being
dates, the Hugging Face loader would turn the whole column into timestamps."""


class Task(NamedTuple):
    """One sample of one prompt: the unit of scheduling, resuming and accounting."""

    id: str
    prompt_id: str
    sample: int
    input_digest: str
    """Changes when the row's rollout columns change: an edited prompt is new work."""
    columns: dict[str, Any]

    @property
    def key(self) -> bytes:
        """16 bytes that identify the task and its input."""
        return task_key(self.id, self.input_digest)


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
    bad_lines: frozenset[int]
    """The lines of all bad rows."""
    repeated: frozenset[int]
    """Short hashes of the ids that occur more than once."""
    rules: RowRules
    signature: tuple[int, int] | None
    """Size and time of change of the file; while they stay, its good rows need no second check."""
    shard: Shard | None
    """The part of the rows that `tasks` gives; None for all."""


def scan(
    path: Path,
    *,
    max_samples: int | None,
    rules: RowRules | None = None,
    shard: Shard | None = None,
) -> Scan:
    """Read the whole file once. Raises `DatasetError` where nothing in it is usable."""
    rules = rules or RowRules()
    signature = _signature(path)
    seen = _Repeats()
    bad_rows = []
    all_rows = rows = 0
    fingerprint = hashlib.sha256()
    for row in read_rows(path, rules):
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        all_rows += 1
        fingerprint.update(_canonical(row.columns))
        short_hash = _short_hash(_base_id(row.columns))
        if shard is None or shard.holds(short_hash):
            rows += 1
            seen.add(short_hash)
        if all_rows == max_samples:
            break
    if not all_rows:
        msg = f"{path}: no usable row"
        if bad_rows:
            first = bad_rows[0]
            msg += f" among {len(bad_rows)}; the first, line {first.line}: {first.reason}"
        else:
            msg += "; the file is empty"
        raise DatasetError(msg)
    return Scan(
        path=path,
        sha256=fingerprint.hexdigest(),
        all_rows=all_rows,
        rows=rows,
        bad_rows=tuple(row for row in bad_rows if shard is None or shard.holds(row.line)),
        bad_lines=frozenset(row.line for row in bad_rows),
        repeated=seen.repeated(),
        rules=rules,
        signature=signature,
        shard=shard,
    )


def tasks(scan: Scan, *, num_samples: int) -> Iterator[Task]:
    """Stream the tasks of a scanned file in its order, the samples of a prompt side by side."""
    occurrences: Counter[str] = Counter()
    for row in islice(_good_rows(scan), scan.all_rows):
        base_id = _base_id(row.columns)
        short_hash = _short_hash(base_id)
        if scan.shard is not None and not scan.shard.holds(short_hash):
            continue
        prompt_id = base_id
        if short_hash in scan.repeated:
            occurrences[base_id] += 1
            prompt_id = _numbered(base_id, occurrences[base_id])
        digest = input_digest(row.columns, scan.rules)
        for sample in range(num_samples):
            task_id = f"{prompt_id}#s{sample}" if sample else prompt_id
            yield Task(task_id, prompt_id, sample, digest, row.columns)


def _good_rows(scan: Scan) -> Iterator[Row]:
    """The usable rows; checked again only where the file has changed since its scan."""
    if scan.signature is not None and scan.signature == _signature(scan.path):
        yield from reread_rows(scan.path, bad=scan.bad_lines)
        return
    for row in read_rows(scan.path, scan.rules):
        if isinstance(row, Row):
            yield row


def _signature(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def input_digest(columns: dict[str, Any], rules: RowRules) -> str:
    """16 hex digits over the columns that decide what a conversation is."""
    return hashlib.blake2b(_canonical(rules.deciding(columns)), digest_size=8).hexdigest()


def task_key(task_id: str, digest: str) -> bytes:
    """16 bytes for a task id and its input digest: small enough to hold millions of them."""
    return hashlib.blake2b(f"{digest} {task_id}".encode(), digest_size=16).digest()


class _Repeats:
    """Finds values that were added more than once, at 8 bytes per value.

    Values are sorted into buckets, so that only one bucket at a time becomes a set of objects.
    A false find between two short hashes does no harm: the id is then counted, and found once.
    """

    _BUCKETS = 256

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(self._BUCKETS)]

    def add(self, short_hash: int) -> None:
        self._buckets[short_hash % self._BUCKETS].append(short_hash)

    def repeated(self) -> frozenset[int]:
        found: set[int] = set()
        for bucket in self._buckets:
            seen: set[int] = set()
            for value in bucket:
                (found if value in seen else seen).add(value)
        return frozenset(found)


def _numbered(base_id: str, occurrence: int) -> str:
    return base_id if occurrence == 1 else f"{base_id}#{occurrence}"


def _base_id(columns: dict[str, Any]) -> str:
    for name in ID_COLUMNS:
        value = columns.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            own = str(value)
            if own and not _LOOKS_GENERATED.search(own):
                return own
    content = _canonical(columns)
    return f"row-{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _short_hash(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
