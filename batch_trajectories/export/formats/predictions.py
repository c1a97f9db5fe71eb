"""Predictions for SWE-bench's harness: the diff of each conversation."""

from __future__ import annotations

from batch_trajectories.export.conversation.texts import patch_of
from batch_trajectories.runs.store.record_types import Record


def prediction_of(record: Record) -> dict[str, str]:
    """A line of a file of predictions for SWE-bench's harness. Raises `Rejected`."""
    own = record.row.get("instance_id")
    return {
        "instance_id": own if isinstance(own, str) else record.prompt_id,
        "model_name_or_path": record.model or "unknown",
        "model_patch": patch_of(record),
    }
