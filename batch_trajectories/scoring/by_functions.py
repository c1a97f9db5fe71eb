"""Scores records of a run by reward functions."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from agent.session import run_here
from batch_trajectories.basics.closing import close_all
from batch_trajectories.engine.worker.reward_functions import RewardFunctions, check_functions
from batch_trajectories.export.statistics.counts import Reasons
from batch_trajectories.records.names import WORKSPACES
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import score_key
from batch_trajectories.records.tasks import task_key
from batch_trajectories.scoring.asking import ask_all
from batch_trajectories.scoring.score_file import (
    NewScore,
    Scored,
    ScoreFile,
    Wanted,
    open_scores,
)


def score_by_functions(
    run_dir: Path, functions: Sequence[str], *, timeout_s: float, wanted: Wanted | None = None
) -> Scored:
    """Score each `wanted` record by each function whose present version has not scored it.

    `functions` are written MODULE:FUNCTION. `wanted`: None means all records. Raises `ConfigError`
    for a function that cannot be imported, `RunLocked`, `RunDirError` and `HostError`.
    """
    versions = check_functions(functions)
    with open_scores(run_dir, wanted) as file:
        scoring = _Scoring(file, versions, timeout_s=timeout_s)
        run_here(scoring.score_all())
    return Scored(scoring.scores, scoring.failed.to_json())


class _Scoring:
    """Calls reward functions for one command."""

    def __init__(self, file: ScoreFile, versions: Mapping[str, str], *, timeout_s: float) -> None:
        """`versions` are the versions of the functions, by MODULE:FUNCTION."""
        self._file = file
        self._versions = versions
        self._timeout_s = timeout_s
        self._functions: dict[str, RewardFunctions] = {}
        self.scores = 0
        self.failed = Reasons()

    async def score_all(self) -> None:
        """Call the functions for all records that lack scores."""
        done = {name: self._file.done(name, version) for name, version in self._versions.items()}
        self._functions = {
            name: RewardFunctions([name], timeout_s=self._timeout_s) for name in self._versions
        }
        try:
            await ask_all(
                self._file.unscored(done, self._versions, doing="score"),
                self._score,
                max_in_flight=2 * (os.cpu_count() or 1),
                keep=self._store,
            )
        finally:
            await close_all(*(function.close for function in self._functions.values()))

    async def _score(self, unscored: tuple[Record, Sequence[str]]) -> list[NewScore]:
        """Score a record by the functions that have not scored it."""
        record, missing = unscored
        fields = record.as_dict()
        # No score may depend on another.
        fields.pop("scores", None)
        workspace = _workspace(self._file.run_dir, record)
        key = score_key(record)
        return [
            NewScore(key, record.id, score)
            for name in missing
            for score in await self._functions[name].scores(fields, workspace)
        ]

    def _store(self, results: list[list[NewScore]]) -> None:
        scores = [score for result in results for score in result]
        self._file.append(scores)
        self.scores += len(scores)
        for score in scores:
            if (error := score.fields["error"]) is not None:
                self.failed.add(f"{score.fields['source']}: {error}")


def _workspace(run_dir: Path, record: Record) -> Path | None:
    """The path of a record's workspace; None if it was inside an image.

    The workspace is usually gone: it is removed once the record is on disk.
    """
    if record.diff is not None:
        return None
    return run_dir / WORKSPACES / task_key(record.id, record.input_digest).hex()
