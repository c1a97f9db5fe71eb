"""`records.jsonl`, the checkpoint of a run: one finished trajectory per line, only appended.

Beside it lies `records.idx`, a line of few numbers per record, derived and never trusted beyond
what it covers: it is read where it fits the records, extended where it is behind, and rebuilt
where it is missing or wrong. The last record of a task counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from sys import intern
from types import NoneType
from typing import Any, NamedTuple

import orjson

from batch.files import AppendFile, repair_tail, set_aside, sync_directory, temporary_for
from batch.prompts import task_key

_READ_AHEAD = 1 << 20


class Entry(NamedTuple):
    """One record in the index: where it lies, and what accounts need of it."""

    offset: int
    length: int
    status: str
    attempt: int
    turns: int
    tool_calls: int
    input_tokens: int | None
    output_tokens: int | None
    cost_usd: float | None
    error_class: str | None


_SHAPES = frozenset(
    product(
        *([str], [int], [int], [str], [int], [int], [int]),
        *([int, NoneType], [int, NoneType], [float, int, NoneType], [str, NoneType]),
    )
)
"""The types that the fields of an index line can have."""


def index_fields(record: dict[str, Any]) -> list[Any]:
    """What the index holds of a record beside its place: id, input digest, then numbers."""
    usage = record["usage"] or {}
    error = record["error"] or {}
    first = inherited_turns(record)
    calls = record["tool_calls"]
    return [
        record["id"],
        record["input_digest"],
        record["status"],
        record["attempt"],
        len(record["turns"]) - first,
        sum(call["turn"] > first for call in calls) if first else len(calls),
        usage.get("input_tokens"),
        usage.get("output_tokens"),
        record["cost_usd"],
        error.get("class"),
    ]


def inherited_turns(record: Mapping[str, Any]) -> int:
    """How many of its turns a branch has from the conversation that it was forked from."""
    return sum("inherited" in turn for turn in record["turns"])


class RecordFile:
    """The records of one run, open for appending. One process at a time."""

    found: dict[bytes, Entry]
    """The records that were there, by task key, the last one of each task. Whoever needs no more
    of them than a part clears it: of a million records it takes some 400 MB."""

    def __init__(self, run_dir: Path, quarantine: Path) -> None:
        """Open both files, after repairing what a crash left of them."""
        self._path = run_dir / "records.jsonl"
        self._index_path = run_dir / "records.idx"
        repair_tail(self._path, quarantine)
        self.found, self.unreadable = _bring_index_up_to_date(
            self._path, self._index_path, quarantine
        )
        self._records = AppendFile(self._path)
        self._index = AppendFile(self._index_path)

    def append(self, record: bytes, fields: list[Any]) -> None:
        """Append one record line and its index line; `sync` makes them survive a power loss.

        `fields` are the `index_fields` of the record. Raises `StorageError`.
        """
        offset = self._records.size
        self._records.append(record)
        self._index.append(index_line(fields, offset, len(record)))

    def sync(self) -> None:
        """Make all appended records survive a power loss. The index can be derived again."""
        self._records.sync()

    def close(self) -> None:
        """Close both files."""
        self._records.close()
        self._index.close()


def load_index(run_dir: Path) -> dict[bytes, Entry]:
    """All records of a run by task key, the last one of each task; writes nothing."""
    return dict(iter_index(run_dir))


def iter_index(run_dir: Path) -> Iterator[tuple[bytes, Entry]]:
    """The records of a run by task key in the order of the file: of a task, the last one counts.

    What the index does not cover yet is read from the records themselves. Writes nothing.
    """
    records, index = run_dir / "records.jsonl", run_dir / "records.idx"
    covered = 0
    for key, entry, _ in _right_lines(index, _size(records)):
        yield key, entry
        covered = entry.offset + entry.length
    for offset, line in lines_from(records, covered):
        if (record := parse_record(line)) is not None:
            yield read_entry(index_line(index_fields(record), offset, len(line)))


def index_line(fields: list[Any], offset: int, length: int) -> bytes:
    """The line of the index for a record that lies at `offset`: task key, then the entry."""
    task_id, digest, *numbers = fields
    key = task_key(task_id, digest).hex()
    return orjson.dumps([key, offset, length, *numbers]) + b"\n"


def read_entry(line: bytes) -> tuple[bytes, Entry]:
    """Task key and entry of an index line. Raises `ValueError` for anything else.

    A start reads one for every record that there is, so this is short of words on purpose.
    """
    fields = orjson.loads(line)
    if type(fields) is not list or tuple(map(type, fields)) not in _SHAPES:
        raise ValueError(line)
    # Few words, many entries: each word is held once.
    fields[3] = intern(fields[3])
    if fields[10] is not None:
        fields[10] = intern(fields[10])
    return bytes.fromhex(fields[0]), tuple.__new__(Entry, fields[1:])


def _right_lines(index: Path, records_size: int) -> Iterator[tuple[bytes, Entry, int]]:
    """The lines of the index as far as it is right: key, entry, and where the line ends."""
    covered = 0
    for position, line in lines_from(index, 0):
        try:
            key, entry = read_entry(line)
            fits = entry.offset == covered and covered + entry.length <= records_size
        except ValueError:
            return
        if not fits:
            return
        covered += entry.length
        yield key, entry, position + len(line)


def _read_index(index: Path, records_size: int) -> tuple[dict[bytes, Entry], int, int]:
    """The index as far as it is right: entries, and the bytes of records and of index covered."""
    entries: dict[bytes, Entry] = {}
    covered = index_size = 0
    for key, entry, end in _right_lines(index, records_size):
        entries[key] = entry
        covered, index_size = entry.offset + entry.length, end
    return entries, covered, index_size


def _bring_index_up_to_date(
    records: Path, index: Path, quarantine: Path
) -> tuple[dict[bytes, Entry], int]:
    """Cut the index to what is right and append what it lacks; return it, and unreadable records.

    Unreadable lines of the records are set aside, named by line, and left out of the file.
    """
    entries, covered, index_size = _read_index(index, _size(records))
    if index.exists() and index.stat().st_size > index_size:
        with index.open("r+b") as file:
            file.truncate(index_size)
    behind, unreadable = [], []
    for offset, line in lines_from(records, covered):
        record = parse_record(line)
        if record is None:
            unreadable.append((offset, line))
        else:
            behind.append(index_line(index_fields(record), offset, len(line)))
    if unreadable:
        take_out(records, unreadable, quarantine)
        index.unlink(missing_ok=True)
        entries, _ = _bring_index_up_to_date(records, index, quarantine)
    elif behind:
        with index.open("ab") as file:
            file.writelines(behind)
        entries.update(map(read_entry, behind))
    return entries, len(unreadable)


def take_out(records: Path, unreadable: list[tuple[int, bytes]], quarantine: Path) -> None:
    """Rewrite the records without these (offset, line) pairs, each kept in the quarantine."""
    bad = {offset for offset, _ in unreadable}
    replacement = temporary_for(records)
    replacement.unlink(missing_ok=True)
    kept = AppendFile(replacement)
    for number, (offset, line) in enumerate(lines_from(records, 0), start=1):
        if offset in bad:
            set_aside(quarantine, f"{records.name}.line{number}", line)
        else:
            kept.append(line)
    kept.sync()
    kept.close()
    replacement.replace(records)
    sync_directory(records.parent)


def lines_from(path: Path, offset: int) -> Iterator[tuple[int, bytes]]:
    """Whole lines from `offset` on; a torn last line is left out."""
    try:
        file = path.open("rb", buffering=_READ_AHEAD)
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        for line in file:
            if line.endswith(b"\n"):
                yield offset, line
            offset += len(line)


def parse_record(line: bytes) -> dict[str, Any] | None:
    """The record of one line, None where it is not whole."""
    try:
        record = orjson.loads(line)
        read_entry(index_line(index_fields(record), 0, len(line)))
        texts = isinstance(record["id"], str) and isinstance(record["input_digest"], str)
        whole = texts and isinstance(record["messages"], list) and isinstance(record["tools"], list)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if whole else None


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
