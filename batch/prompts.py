"""Prompts and their identity: which row is which, across edits, reorderings and duplicates.

A prompt's id is the row's own `id`, `task_id` or `instance_id` where that is unique in the file,
else a hash of the row's content, with an occurrence number for equal rows. Never the position. A
task is one sample of one prompt.

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
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from batch.errors import DatasetError
from batch.rows import BadRow, Row, read_rows

ID_COLUMNS = ("id", "task_id", "instance_id")

ROLLOUT_COLUMNS = ("prompt", "script")
"""The columns that decide what a conversation is; the others are only carried through."""

_LOOKS_GENERATED = re.compile(r"#s?\d+$|^row-[0-9a-f]{16}")
"""Own ids of this form could be taken for generated ones, so the content hash stands in."""


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
    rows: int
    """Usable rows, after `max_samples`."""
    bad_rows: tuple[BadRow, ...]
    repeated: frozenset[int]
    """Short hashes of the ids and contents that occur more than once."""
    script_needed: bool


def scan(path: Path, *, max_samples: int | None, script_needed: bool = False) -> Scan:
    """Read the whole file once. Raises `DatasetError` where nothing in it is usable."""
    seen = _Repeats()
    bad_rows = []
    rows = 0
    fingerprint = hashlib.sha256()
    for row in read_rows(path, script_needed=script_needed):
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        rows += 1
        content = _canonical(row.columns)
        fingerprint.update(content)
        seen.add(_short_hash(content))
        if (own := _own_id(row.columns)) is not None:
            seen.add(_short_hash(own.encode()))
        if rows == max_samples:
            break
    if not rows:
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
        rows=rows,
        bad_rows=tuple(bad_rows),
        repeated=seen.repeated(),
        script_needed=script_needed,
    )


def tasks(scan: Scan, *, num_samples: int) -> Iterator[Task]:
    """Stream the tasks of a scanned file in its order, the samples of a prompt side by side."""
    occurrences: Counter[str] = Counter()
    rows = 0
    for row in read_rows(scan.path, script_needed=scan.script_needed):
        if isinstance(row, BadRow):
            continue
        prompt_id = _prompt_id(row, scan.repeated, occurrences)
        digest = input_digest(row.columns)
        for sample in range(num_samples):
            task_id = f"{prompt_id}#s{sample}" if sample else prompt_id
            yield Task(task_id, prompt_id, sample, digest, row.columns)
        rows += 1
        if rows == scan.rows:
            return


def input_digest(columns: dict[str, Any]) -> str:
    """16 hex digits over the columns that decide what a conversation is."""
    return _hash({name: columns[name] for name in ROLLOUT_COLUMNS if name in columns})


def task_key(task_id: str, digest: str) -> bytes:
    """16 bytes for a task id and its input digest: small enough to hold millions of them."""
    return hashlib.blake2b(f"{digest} {task_id}".encode(), digest_size=16).digest()


class _Repeats:
    """Finds values that were added more than once, at 8 bytes per value.

    Values are sorted into buckets, so that only one bucket at a time becomes a set of objects.
    A false find between two short hashes does no harm: a content hash stands in for an own id.
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


def _prompt_id(row: Row, repeated: frozenset[int], occurrences: Counter[str]) -> str:
    own = _own_id(row.columns)
    if own is not None and _short_hash(own.encode()) not in repeated:
        return own
    content = _canonical(row.columns)
    prompt_id = f"row-{hashlib.blake2b(content, digest_size=8).hexdigest()}"
    if _short_hash(content) in repeated:
        occurrences[prompt_id] += 1
        if occurrences[prompt_id] > 1:
            return f"{prompt_id}#{occurrences[prompt_id]}"
    return prompt_id


def _own_id(columns: dict[str, Any]) -> str | None:
    for name in ID_COLUMNS:
        value = columns.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            own = str(value)
            return own if own and not _LOOKS_GENERATED.search(own) else None
    return None


def _canonical(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def _hash(value: Any) -> str:
    return hashlib.blake2b(_canonical(value), digest_size=8).hexdigest()


def _short_hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
