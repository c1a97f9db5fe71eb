"""Diffs, as predictions for the harness of SWE-bench."""

from __future__ import annotations

from collections.abc import Hashable

import orjson

from batch_trajectories.export.conversation.texts import read_patch
from batch_trajectories.export.conversation.validity import Reason, Rejected, Rejection
from batch_trajectories.export.rows.files import Candidate, CandidateFiles, CustomFormat, Export
from batch_trajectories.records.record_types import Record


def make_prediction(record: Record) -> dict[str, str]:
    """A line of a file of predictions for the harness of SWE-bench. Raises `Rejected`."""
    instance_id = record.row.get("instance_id")
    return {
        "instance_id": instance_id if isinstance(instance_id, str) else record.prompt_id,
        "model_name_or_path": record.model or "unknown",
        "model_patch": read_patch(record),
    }


class _PredictionFiles(CandidateFiles):
    """Writes diffs for the harness of SWE-bench, which takes one diff for each task."""

    def __init__(self, export: Export) -> None:
        super().__init__(export)
        self._instances: set[str] = set()

    def add_one(self, split: str, candidate: Candidate, seen: set[Hashable]) -> Rejection | None:
        line = make_prediction(candidate.record)
        if (name := line["instance_id"]) in self._instances:
            raise Rejected(
                Reason.OTHER_SAMPLE,
                f"the file has a sample of {name}; `best_n: 1` in a recipe takes the best",
            )
        self.write(split, orjson.dumps(line) + b"\n")
        self._instances.add(name)
        return None


FORMAT = CustomFormat(
    name="predictions",
    card="Diffs by `instance_id`, for the harness of SWE-bench (`--predictions_path`).",
    shows_messages=False,
    takes_all=True,
    files=_PredictionFiles,
)
