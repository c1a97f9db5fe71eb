"""Reads and appends to `scores.jsonl` of a run; see `records.scores`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from batch_trajectories.basics import exact_json
from batch_trajectories.records.files import AppendFile, add_checksum, lock_directory, repair_tail
from batch_trajectories.records.names import QUARANTINE, SCORES_FILE
from batch_trajectories.records.reader import stored_records
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import read_scores, score_key

Wanted = Callable[[Record], bool]
"""A function that says whether a record is to be scored."""


class Scored(NamedTuple):
    """The result of a command that scores."""

    scores: int
    """Number of new scores."""
    failed: Mapping[str, int]
    """Reasons why scores failed, with counts. The next `score` repeats failed functions."""


class NewScore(NamedTuple):
    """A score that is not in scores.jsonl yet."""

    record_key: str
    """`score_key` of the record."""
    record_id: str
    fields: Mapping[str, Any]
    """The fields of the line, without those that name the record and the time."""


class ScoreFile:
    """The scores of a run, open for appending."""

    def __init__(self, run_dir: Path, wanted: Wanted | None) -> None:
        self.run_dir = run_dir
        self._wanted = wanted
        self._path = run_dir / SCORES_FILE
        self._file: AppendFile | None = None

    def done(self, source: str, version: str) -> set[str]:
        """The keys of records that this version of a source has scored.

        A failure does not count as a score, except a judge's reply without a score, which is paid.
        """
        return {
            line["record"]
            for _, line in read_scores(self._path)
            if line["source"] == source
            and line["version"] == version
            and (line["error"] is None or line.get("reply") is not None)
        }

    def judge_cost_usd(self) -> float:
        """The cost of all replies of judges, as far as known."""
        return sum(line.get("cost_usd") or 0.0 for _, line in read_scores(self._path))

    def append(self, scores: Iterable[NewScore]) -> None:
        """Append scores. They are durable when this returns."""
        at = time.time()
        lines = b"".join(
            add_checksum(
                exact_json.dumps(
                    {"record": score.record_key, "id": score.record_id, **score.fields, "at": at}
                )
            )
            for score in scores
        )
        if not lines:
            return
        if self._file is None:
            self._file = AppendFile(self._path)
        self._file.append(lines)
        self._file.sync()

    def unscored(
        self, done: Mapping[str, set[str]], versions: Mapping[str, str], *, doing: str | None = None
    ) -> Iterator[tuple[Record, Sequence[str]]]:
        """The wanted records that did not fail, each with the sources that have not scored it.

        `done` are the keys of scored records, by source; `versions` are the versions of the
        sources. `doing` names the work in the progress line; None: no progress is shown.
        """
        for record in stored_records(self.run_dir, doing=doing):
            if record.status == "failed":
                continue
            key = score_key(record)
            during_run = {
                (score.source, score.version)
                for score in record.scores or ()
                if score.error is None
            }
            missing = [
                source
                for source, version in versions.items()
                if key not in done[source] and (source, version) not in during_run
            ]
            if missing and (self._wanted is None or self._wanted(record)):
                yield record, missing

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()


@contextmanager
def open_scores(run_dir: Path, wanted: Wanted | None = None) -> Iterator[ScoreFile]:
    """Open the scores of a run, to score `wanted` records (None: all).

    Raises `RunLocked` while another process scores.
    """
    refusal = f"{run_dir / SCORES_FILE}: another `score` works on it; wait until it has ended"
    with lock_directory(run_dir, refusal):
        repair_tail(run_dir / SCORES_FILE, run_dir / QUARANTINE)
        file = ScoreFile(run_dir, wanted)
        try:
            yield file
        finally:
            file.close()
