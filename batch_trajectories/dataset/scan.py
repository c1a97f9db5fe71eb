"""Scan a dataset: identify its prompts across edits, reorderings and duplicates.

A prompt's id is the row's own `id`, `task_id` or `instance_id`, else a hash of the row's content;
a row that repeats an id gets an occurrence number (`#2`). The position is never used. A digest of
the columns that affect the conversation makes an edited prompt with an old id new work. A task is
one sample of one prompt.

`scan` reads the file once and keeps the offset of each row and the key of each task, in 8 bytes
per row (12 if ids repeat) and 16 per task. Keys alone say which tasks need work; rows are read one
at a time. `dataset.scan_cache` saves the scan for the next start.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypedDict

import msgspec
import orjson

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.console import LongWork
from batch_trajectories.basics.errors import DatasetChanged, DatasetError
from batch_trajectories.dataset.lines import ContentDigest, Row, read_row, read_rows
from batch_trajectories.dataset.row import MODEL_COLUMN, RowRules
from batch_trajectories.dataset.row_conversation import (
    TOOL_COLUMNS,
    count_unused_turns,
    defines_tools,
    flatten_prompt,
    is_chat_as_text,
)
from batch_trajectories.dataset.shards import Shard
from batch_trajectories.records.checks import EXPECTED
from batch_trajectories.records.tasks import BadRow, Task, task_key

SETUP = ("check", "files", "setup")
"""Columns that set up a workspace or judge it; rows with them need `row_setup`."""
TELLTALE_COLUMNS = (*SETUP, "base_commit")
"""Columns whose names other datasets hardly use: rows with them may need `row_setup`."""

PROGRAMS = "check.programs"
"""The key of a scan's `asked`: how many rows have checks that run programs of the workspace."""

UNUSED_TURNS = "unused_turns"
"""The key of a scan's `asked`: how many rows have messages of the user that are not sent. The keys
`unused_turns.all` and `unused_turns.line` have the number of these messages and the line of the
first such row."""

CHATS_AS_TEXT = "prompt"
"""The key of a scan's `asked`: how many rows have the JSON text of chat messages as `prompt`."""

ID_COLUMNS = ("id", "task_id", "instance_id")

_LOOKS_GENERATED = re.compile(r"#s?\d+$|^row-[0-9a-f]{16}|^\d{4}-\d\d-\d\d([T ]|$)")
"""Own ids that are replaced by the content hash: they could collide with generated ones, or, being
dates, the Hugging Face loader would convert the whole column to timestamps."""


class ScanOptions(TypedDict):
    """Everything that the result of `scan` depends on, besides the dataset."""

    max_samples: int | None
    rules: RowRules
    num_samples: int
    shard: Shard | None


class Scan(msgspec.Struct, frozen=True):
    """The result of one pass over a dataset file."""

    path: Path
    sha256: str
    """Digest of all usable rows, whatever the shard."""
    all_rows: int
    """Number of usable rows, after `max_samples`."""
    rows: int
    """Number of usable rows in the shard."""
    bad_rows: tuple[BadRow, ...]
    """Bad rows of the shard; each bad row belongs to one shard."""
    all_bad: int
    """Number of bad rows, whatever the shard."""
    shard: Shard | None
    """The part of the dataset that this run works on; None for all of it."""
    rules: RowRules
    max_samples: int | None
    num_samples: int
    size: int
    """Number of bytes that were read."""
    content_digest: str
    """Digest of the bytes that were read; see `ContentDigest`."""
    may_continue: bool
    """Whether the file may have more bytes than were read: `max_samples` ended the scan."""
    offsets: array[int]
    """Byte offsets of the usable rows of the shard."""
    occurrences: array[int]
    """How often the id of each row has occurred up to that row; empty if no id repeats."""
    setup_columns: dict[str, int]
    """Number of usable rows that have each of `TELLTALE_COLUMNS`."""
    asked: dict[str, int]
    """Demands of rows that the run may refuse; see `row_workspace.count_requests`. `expected`:
    number of usable rows with this column whose answers are not compared with it. `model`: number
    of those with this column in a run of one model. `TOOL_COLUMNS`: number of those that define
    tools in each. See also `UNUSED_TURNS`, `CHATS_AS_TEXT` and `PROGRAMS`."""
    keys: bytes
    """The keys of all tasks, 16 bytes each; samples of a prompt are adjacent."""

    @property
    def options(self) -> ScanOptions:
        """The options of this scan."""
        return ScanOptions(
            max_samples=self.max_samples,
            rules=self.rules,
            num_samples=self.num_samples,
            shard=self.shard,
        )

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.rows * self.num_samples

    def occurrence(self, row: int) -> int:
        """Number of rows up to this one that have its id."""
        return self.occurrences[row] if self.occurrences else 1

    def key(self, number: int) -> bytes:
        """The key of one task; numbers start at 0."""
        return self.keys[16 * number : 16 * number + 16]


def scan(
    path: Path,
    *,
    max_samples: int | None,
    rules: RowRules | None = None,
    num_samples: int = 1,
    shard: Shard | None = None,
    may_be_empty: bool = False,
) -> Scan:
    """Read the whole file once. Raises `DatasetError` if it has no usable row, unless it may."""
    rules = rules or RowRules()
    bad_rows: list[BadRow] = []
    offsets, hashes = array("Q"), array("Q")
    keys = bytearray()
    all_rows = 0
    setup_columns: dict[str, int] = {}
    asked: dict[str, int] = {}
    fingerprint = hashlib.sha256()
    content = ContentDigest()
    for row in _track_rows(path, rules, content):
        if isinstance(row, BadRow):
            bad_rows.append(row)
            continue
        all_rows += 1
        for name in TELLTALE_COLUMNS:
            if row.columns.get(name) is not None:
                setup_columns[name] = setup_columns.get(name, 0) + 1
        _count_demands(asked, row, rules)
        fingerprint.update(_canonical(row.columns))
        base = _base_id(row.columns)
        short_hash = _short_hash(base)
        if shard is None or shard.contains(short_hash):
            offsets.append(row.offset)
            hashes.append(short_hash)
            digest = input_digest(row.columns, rules)
            for sample in range(num_samples):
                keys += task_key(_task_id(base, sample), digest)
        if all_rows == max_samples:
            break
    if not all_rows and not may_be_empty:
        raise _no_usable_row(path, bad_rows)
    occurrences = array("I")
    for number, base, columns in _rows_with_repeated_ids(path, offsets, hashes, occurrences):
        prompt_id = _number_id(base, occurrences[number])
        digest = input_digest(columns, rules)
        ids = (_task_id(prompt_id, sample) for sample in range(num_samples))
        start = 16 * num_samples * number
        keys[start : start + 16 * num_samples] = b"".join(task_key(id_, digest) for id_ in ids)
    return Scan(
        path=path,
        sha256=fingerprint.hexdigest(),
        all_rows=all_rows,
        rows=len(offsets),
        bad_rows=tuple(row for row in bad_rows if shard is None or shard.contains(row.line)),
        all_bad=len(bad_rows),
        shard=shard,
        rules=rules,
        max_samples=max_samples,
        num_samples=num_samples,
        size=content.size,
        content_digest=content.hexdigest(),
        may_continue=all_rows == max_samples and content.is_at_line_end,
        offsets=offsets,
        occurrences=occurrences,
        setup_columns=setup_columns,
        asked=asked,
        keys=bytes(keys),
    )


def _count_demands(asked: dict[str, int], row: Row, rules: RowRules) -> None:
    """Add the demands of a row to `Scan.asked`."""
    columns = row.columns
    if rules.ignores_expected(columns):
        asked[EXPECTED] = asked.get(EXPECTED, 0) + 1
    if rules.models is None and columns.get(MODEL_COLUMN) is not None:
        asked[MODEL_COLUMN] = asked.get(MODEL_COLUMN, 0) + 1
    for name in TOOL_COLUMNS:
        if name in columns and defines_tools(columns[name]):
            asked[name] = asked.get(name, 0) + 1
    if is_chat_as_text(columns.get("prompt")):
        asked[CHATS_AS_TEXT] = asked.get(CHATS_AS_TEXT, 0) + 1
    if unused := count_unused_turns(columns):
        asked.setdefault(f"{UNUSED_TURNS}.line", row.line)
        asked[UNUSED_TURNS] = asked.get(UNUSED_TURNS, 0) + 1
        asked[f"{UNUSED_TURNS}.all"] = asked.get(f"{UNUSED_TURNS}.all", 0) + unused
    if rules.with_setup and columns.get("check") is not None:
        from batch_trajectories.dataset.check_programs import programs_of_workspace

        if programs_of_workspace(columns["check"]):
            asked[PROGRAMS] = asked.get(PROGRAMS, 0) + 1
    if rules.inside:
        from batch_trajectories.dataset.row_workspace import count_requests

        count_requests(asked, columns)


def _track_rows(path: Path, rules: RowRules, content: ContentDigest) -> Iterator[Row | BadRow]:
    """Yield the rows of `read_rows`, and show progress."""
    size = path.stat().st_size if path.is_file() else None
    with LongWork(f"reading {path.name}", total=size, unit="B") as work:
        for row in read_rows(path, rules, content):
            yield row
            work.reach(content.size)


def tasks(scan: Scan, numbers: Iterable[int] | None = None) -> Iterator[Task]:
    """Stream the tasks with these numbers (see `Scan.key`), or all.

    Raises `DatasetChanged` at a row that has changed since the scan.
    """
    with _open(scan.path) as file:
        for number in range(scan.tasks) if numbers is None else numbers:
            row, sample = divmod(number, scan.num_samples)
            columns = read_row(file, scan.offsets[row])
            if columns is None:
                raise _changed_dataset_error(scan.path, scan.offsets[row])
            task = make_task(columns, scan.rules, occurrence=scan.occurrence(row), sample=sample)
            if task.key != scan.key(number):
                raise _changed_dataset_error(scan.path, scan.offsets[row])
            yield task


def make_task(
    columns: dict[str, Any], rules: RowRules, *, occurrence: int = 1, sample: int = 0
) -> Task:
    """The task of a row; `occurrence` is its number, from 1, among the rows with its id."""
    prompt_id = _number_id(_base_id(columns), occurrence)
    digest = input_digest(columns, rules)
    return Task(
        id=_task_id(prompt_id, sample),
        prompt_id=prompt_id,
        sample=sample,
        input_digest=digest,
        columns=columns,
    )


def make_sample_task(task: Task, sample: int) -> Task:
    """Another sample of the prompt of a task."""
    return task._replace(id=_task_id(task.prompt_id, sample), sample=sample, model=None)


def _open(path: Path) -> BinaryIO:
    if path.exists() and not path.is_file():
        raise DatasetError(f"{path}: cannot read the dataset: it is no plain file")
    try:
        return path.open("rb")
    except OSError as error:
        raise DatasetError(f"{path}: cannot read the dataset: {error.strerror or error}") from error


def _no_usable_row(path: Path, bad_rows: Sequence[BadRow]) -> DatasetError:
    if not bad_rows:
        return DatasetError(f"{path}: no usable row; the file is empty")
    first = bad_rows[0]
    return DatasetError(
        f"{path}: no usable row among {len(bad_rows)}; the first, line {first.line}: {first.reason}"
    )


def _changed_dataset_error(path: Path, offset: int) -> DatasetChanged:
    return DatasetChanged(
        f"{path}: the row at byte {offset} has changed since this start began. Finished work is "
        "safe; run the same command again to continue with the dataset as it is now."
    )


def input_digest(columns: dict[str, Any], rules: RowRules) -> str:
    """16 hex digits over the columns that affect the conversation."""
    return hashlib.blake2b(_canonical(rules.rollout_columns(columns)), digest_size=8).hexdigest()


def _rows_with_repeated_ids(
    path: Path, offsets: array[int], hashes: array[int], occurrences: array[int]
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Rows that repeat the id of an earlier row: number, id, columns. Sets their occurrences."""
    repeated = _find_repeated(hashes)
    if not repeated:
        return
    occurrences.extend(array("I", [1]) * len(offsets))
    counts: Counter[str] = Counter()
    with _open(path) as file:
        for number, short_hash in enumerate(hashes):
            if short_hash not in repeated:
                continue
            columns = read_row(file, offsets[number])
            if columns is None or _short_hash(base := _base_id(columns)) != short_hash:
                raise _changed_dataset_error(path, offsets[number])
            counts[base] += 1
            if counts[base] > 1:
                occurrences[number] = counts[base]
                yield number, base, columns


def _find_repeated(hashes: array[int]) -> set[int]:
    """The values that occur more than once.

    Only one bucket of values at a time becomes a set of objects. Two ids with the same hash do no
    harm: the caller counts the ids themselves.
    """
    buckets = [array("Q") for _ in range(256)]
    for value in hashes:
        # By the first bits: rows of one shard may have the last ones in common.
        buckets[value >> 56].append(value)
    repeated: set[int] = set()
    for bucket in buckets:
        seen: set[int] = set()
        for value in bucket:
            (repeated if value in seen else seen).add(value)
    return repeated


def _number_id(base: str, occurrence: int) -> str:
    return base if occurrence == 1 else f"{base}#{occurrence}"


def _task_id(prompt_id: str, sample: int) -> str:
    return f"{prompt_id}#s{sample}" if sample else prompt_id


def _base_id(columns: dict[str, Any]) -> str:
    for name in ID_COLUMNS:
        value = columns.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool):
            own_id = str(value)
            if own_id and not _LOOKS_GENERATED.search(own_id):
                return own_id
    content = _canonical(flatten_prompt(columns))
    return f"row-{hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _canonical(value: Any) -> bytes:
    return exact_json.dumps(value, option=orjson.OPT_SORT_KEYS)


def _short_hash(value: str) -> int:
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
