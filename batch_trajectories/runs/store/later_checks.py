"""Results of checks that `check` ran after the run, in place of those in the index.

The index is derived from the records, which never change; the lines of scores.jsonl say what takes
the place of their results.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from batch_trajectories.runs.store.checks import CHECK_FAILED, judgement_of
from batch_trajectories.runs.store.checksum import read_object
from batch_trajectories.runs.store.index import ROW_BYTES, Index, RowMaker
from batch_trajectories.runs.store.record_types import CheckResult, Record
from batch_trajectories.runs.store.records import lines_from
from batch_trajectories.runs.store.scores import CHECK, NAME

_MARK = b'"source":"%s"' % CHECK.encode()
_FINISHED = re.compile(rb'"finished_at":([0-9.e+-]+),"schema_version"')
_TAIL_BYTES = 256
_KEY_BYTES = 16


def of_record(record: Record, result: CheckResult) -> dict[str, Any]:
    """What a line says of the record whose check had this `result`: see `with_later_checks`.

    The record must be as it was stored, without scores that were given later.
    """
    judgement = judgement_of(replace(record, check=result))
    failed = judgement.error is not None
    return {
        "finished_at": record.finished_at,
        "judged": [judgement.verdict, judgement.reward, CHECK_FAILED if failed else None],
    }


def with_later_checks(run_dir: Path, index: Index) -> Index:
    """The index with the last result of `check` for each record that has one."""
    found = {}
    for _, line in lines_from(run_dir / NAME, 0):
        if _MARK in line:
            try:
                given = read_object(line)
                found[bytes.fromhex(given["task"])] = float(given["finished_at"]), given["judged"]
            except (ValueError, KeyError, TypeError):
                continue  # damaged; what reads the scores themselves says so
    return _judged(run_dir, index, found) if found else index


def _judged(
    run_dir: Path, index: Index, found: dict[bytes, tuple[float, tuple[Any, Any, Any]]]
) -> Index:
    rows, added = bytearray(index.rows), bytearray()
    maker = RowMaker(index.rows)
    numbers, _ = index.match(b"".join(found))
    with (run_dir / "records.jsonl").open("rb") as records:
        for (finished_at, judged), number in zip(found.values(), numbers, strict=True):
            if not number:
                continue
            entry = index.entry(number)
            size = min(_TAIL_BYTES, entry.length)
            tail = os.pread(records.fileno(), size, entry.offset + entry.length - size)
            finished = _FINISHED.search(tail)
            if finished is None or float(finished[1]) != finished_at or entry.status == "failed":
                continue  # the task was run again since
            verdict, reward, failed = judged
            fields = ["", "", *entry[2:9], failed, verdict, reward]
            made = maker.rows(fields, entry.offset, entry.length)
            end = ROW_BYTES * (number + 1)
            rows[end - ROW_BYTES + _KEY_BYTES : end] = made[_KEY_BYTES - ROW_BYTES :]
            added += made[:-ROW_BYTES]
    return Index(bytes(rows + added))
