"""Read the records of a run one by one, at their places in the index; writes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from runs.process.long_work import watched
from runs.store.checksum import DamagedLine, read_object
from runs.store.files import refuse_strange_files
from runs.store.index import Index
from runs.store.records import AFTER_ID, HEAD, load_index, unreadable_record
from runs.store.scores import Scores
from runs.tasks import task_key
from toolsets import exact_json

_DIGEST = b',"input_digest":"'
_HEAD_BYTES = 512

_TOOLS = b',"tools":'
_AFTER_TOOLS = b',"options":'
"""Bytes before and after the tools of a record, see `runs/record.py`."""
_CUT = "\0tools"
_CUT_JSON = orjson.dumps(_CUT)


class Stored(NamedTuple):
    """A record and its line."""

    record: dict[str, Any]
    line: bytes


@contextmanager
def open_records(run_dir: Path) -> Iterator[BinaryIO]:
    """Open records.jsonl; an empty file if it does not exist yet."""
    path = run_dir / "records.jsonl"
    with (path if path.exists() else Path(os.devnull)).open("rb") as records:
        yield records


class SharedTools:
    """Parses records of one run; a list of tools that many of them hold is parsed once.

    These records share one list, which must not be changed in place.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, list[Any]] = {}
        """Lists of tools by their JSON."""

    def loads(self, line: bytes) -> Any:
        """What `exact_json.loads` gives."""
        if (record := self._with_known_tools(line)) is not None:
            return record
        record = exact_json.loads(line)
        if isinstance(record, dict) and isinstance(record.get("tools"), list):
            record["tools"] = self._shared(record["tools"])
        return record

    def _with_known_tools(self, line: bytes) -> Any:
        begin, end = line.rfind(_TOOLS) + len(_TOOLS), line.rfind(_AFTER_TOOLS)
        if (tools := self._known.get(line[begin:end])) is not None:
            record = exact_json.loads(b"".join((line[:begin], _CUT_JSON, line[end:])))
            if record.get("tools") == _CUT:  # else another part of the record was cut out
                record["tools"] = tools
                return record
        return None

    def _shared(self, tools: list[Any]) -> list[Any]:
        try:
            return self._known.setdefault(orjson.dumps(tools), tools)
        except TypeError:  # integers beyond 64 bits
            return tools


def read_record(
    records: BinaryIO,
    offset: int,
    length: int,
    key: bytes,
    loads: Callable[[bytes], Any] = exact_json.loads,
) -> Stored:
    """Read the record of the task with this key at this place; `loads` parses it.

    Raises `UnreadableRecord`.
    """
    from runs.store.record_types import check_types  # msgspec: starts do not need it

    line = os.pread(records.fileno(), length, offset)
    try:
        record = read_object(line, loads)
        if task_key(record["id"], record["input_digest"]) != key:
            msg = "the index names another record for this place"
            raise DamagedLine(msg)
        check_types(record)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise unreadable_record(records, offset, line, error) from error
    return Stored(record, line)


def read_id(records: BinaryIO, offset: int, length: int, key: bytes) -> str:
    """Read only the id of a record, from its first bytes if they match the key.

    Raises `UnreadableRecord`.
    """
    head = os.pread(records.fileno(), min(_HEAD_BYTES, length), offset)
    digest = head.find(_DIGEST)
    try:
        found = str(orjson.loads(head[len(HEAD) : head.index(AFTER_ID, len(HEAD)) + 1]))
        first = digest + len(_DIGEST)
        if digest > 0 and task_key(found, head[first : head.index(b'"', first)].decode()) == key:
            return found
    except ValueError:
        pass  # the id contains what looks like its end, or is longer than the head
    return str(read_record(records, offset, length, key).record["id"])


@contextmanager
def open_index(run_dir: Path, *, lenient: bool = False) -> Iterator[tuple[Index, BinaryIO]]:
    """Open the index and the records of a run, even during the run.

    Raises `RunDirError` if a file of the run is not a plain file, and what `load_index` raises.
    """
    refuse_strange_files(run_dir)
    index = load_index(run_dir, lenient=lenient)
    with open_records(run_dir) as records:
        yield index, records


def stored_records(run_dir: Path, *, doing: str | None = None) -> Iterator[Stored]:
    """The records that count, in the order written, one in memory at a time.

    `doing` names the work for its progress; None shows none.

    Their `scores` include those of scores.jsonl. Raises `UnreadableRecord`, and `RunDirError` as
    `open_index` and `Scores` do.
    """
    loads = SharedTools().loads
    scores = Scores(run_dir)
    with open_index(run_dir) as (index, records):
        counting = index.counting()
        if doing is not None:
            counting = watched(counting, doing, total=index.written())
        for key, entry in counting:
            record, line = read_record(records, entry.offset, entry.length, key, loads)
            yield Stored(scores.added_to(record), line)
