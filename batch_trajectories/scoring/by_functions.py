"""Scores of reward functions, for the records of a run that lack them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.session import run_here
from batch_trajectories.basics.closing import close_all
from batch_trajectories.engine.worker.reward_functions import RewardFunctions, check_functions
from batch_trajectories.export.statistics.counts import Reasons
from batch_trajectories.records.names import WORKSPACES
from batch_trajectories.records.record_types import Record
from batch_trajectories.records.scores import score_key
from batch_trajectories.records.tasks import task_key
from batch_trajectories.scoring.asking import ask_all
from batch_trajectories.scoring.score_file import Scored, Wanted, open_scores


def score_by_functions(
    run_dir: Path, places: Sequence[str], *, timeout_s: float, wanted: Wanted | None = None
) -> Scored:
    """Call each function with each `wanted` record that it has not scored in its present version.

    Raises `ConfigError` for a function that cannot be imported, `RunLocked`, `RunDirError` and
    `HostError`.
    """
    versions = check_functions(places)
    with open_scores(run_dir, wanted) as file:
        done = {place: file.done(place, version) for place, version in versions.items()}
        scores = 0
        failed = Reasons()

        def keep(results: list[list[tuple[str, str, Mapping[str, Any]]]]) -> None:
            nonlocal scores
            new_scores = [score for result in results for score in result]
            file.append(new_scores)
            scores += len(new_scores)
            for _, _, score in new_scores:
                if score["error"] is not None:
                    failed.add(f"{score['source']}: {score['error']}")

        async def score_all() -> None:
            functions = {place: RewardFunctions([place], timeout_s=timeout_s) for place in versions}

            async def score(
                work: tuple[Record, Sequence[str]],
            ) -> list[tuple[str, str, Mapping[str, Any]]]:
                record, missing = work
                given = record.as_dict()
                # No score depends on another.
                given.pop("scores", None)
                workspace = _workspace(run_dir, record)
                scores = [
                    score
                    for place in missing
                    for score in await functions[place].scores(given, workspace)
                ]
                return [(score_key(record), record.id, score) for score in scores]

            try:
                await ask_all(
                    file.unscored(done, versions, doing="score"),
                    score,
                    max_in_flight=2 * (os.cpu_count() or 1),
                    keep=keep,
                )
            finally:
                await close_all(*(function.close for function in functions.values()))

        run_here(score_all())
    return Scored(scores, failed.to_json())


def _workspace(run_dir: Path, record: Record) -> Path | None:
    """Where the workspace of a record was; None where it was inside an image.

    It is removed once the record is on disk, unless a crash came in between.
    """
    if record.diff is not None:
        return None
    return run_dir / WORKSPACES / task_key(record.id, record.input_digest).hex()
