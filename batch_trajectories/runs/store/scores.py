"""Scores that were given after the run: `scores.jsonl` in the run directory.

The file only grows. Each line has the keys of a score (see `runs.store.checks`), and `record` (see
`score_key`), `id` and `at`; those of a judge also `question`, `reply`, `model`, `usage` and
`cost_usd`; those of `check` (`CHECK`) also `check`, its result, `image`, and what
`with_later_checks` reads. Of several scores of a record by one source the last counts.
Records themselves never change: readers add the scores to `scores` of the records that they read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec.structs import replace

from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.runs.store.checks import CHECK_FAILED, judgement_of
from batch_trajectories.runs.store.checksum import read_object
from batch_trajectories.runs.store.index import ROW_BYTES, Index, RowMaker
from batch_trajectories.runs.store.record_types import CheckResult, Record, Score
from batch_trajectories.runs.store.records import lines_from

NAME = "scores.jsonl"

CHECK = "check"
"""The source of the verdicts that the command `check` gives."""

_MARK = b'"source":"%s"' % CHECK.encode()
_FINISHED = re.compile(rb'"finished_at":([0-9.e+-]+),"schema_version"')
_TAIL_BYTES = 256
_KEY_BYTES = 16


def score_key(record: Record) -> str:
    """Names a record: by its task and when it was finished, as a task can be run again."""
    text = f"{record.input_digest} {record.id} {record.finished_at}"
    return blake2b(text.encode(), digest_size=16).hexdigest()


class Scores:
    """The scores on disk; only their places are in memory."""

    def __init__(self, run_dir: Path, *, only: str | None = None) -> None:
        """Those of all sources, or of `only` one. An incomplete last line is ignored.

        Raises `RunDirError`.
        """
        self._path = run_dir / NAME
        self._by_source: dict[str, dict[bytes, int]] = {}
        for offset, line in read_scores(self._path):
            if only not in (None, line["source"]):
                continue
            places = self._by_source.setdefault(line["source"], {})
            places[bytes.fromhex(line["record"])] = offset

    def added_to(self, record: Record) -> Record:
        """The record with these scores after its own; the same object if it has none here."""
        if not self._by_source:
            return record
        key = bytes.fromhex(score_key(record))
        places = [of_source[key] for of_source in self._by_source.values() if key in of_source]
        if not places:
            return record
        with self._path.open("rb") as file:
            added = [_score_at(file, place) for place in places]
        sources = {score.source for score in added}
        of_source = [score for score in record.scores or () if score.source not in sources]
        check = record.check
        for score in added:
            if score.check is not None:
                check = msgspec.convert(score.check, CheckResult)
        return replace(record, scores=[*of_source, *added], check=check)


def read_scores(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """All whole lines with their places. Raises `RunDirError` for a line that is not a score."""
    for number, (offset, content) in enumerate(lines_from(path, 0), start=1):
        try:
            line = read_object(content)
            msgspec.convert(line, Score)
            bytes.fromhex(line["record"])
        except (ValueError, KeyError, TypeError) as error:
            raise RunDirError(
                f"{path}:{number}: not a score ({error}); `verify --repair` sets it aside, and its "
                "record can be scored again"
            ) from error
        yield offset, line


def _score_at(file: BinaryIO, offset: int) -> Score:
    file.seek(offset)
    return msgspec.convert(read_object(file.readline()), Score)


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
