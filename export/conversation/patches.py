"""The diff of a record as text."""

from __future__ import annotations

from export.conversation.validity import Reason, Rejected
from runs.store.record_types import Record


def patch_of(record: Record) -> str:
    """What the conversation changed in its repository, as `git apply` takes it.

    Raises `Rejected` where the record does not hold all of it.
    """
    diff = record.diff
    if diff is None or not isinstance(diff.get("patch"), str):
        detail = "it has no diff, which only conversations in an image with a repository have"
        raise Rejected(Reason.NO_PATCH, detail)
    if error := diff.get("error"):
        raise Rejected(Reason.NO_PATCH, str(error))
    if diff.get("truncated"):
        kept = len(diff["patch"])
        raise Rejected(Reason.CUT_PATCH, f"the record holds only the first {kept:,} characters")
    if "base64" in diff:
        raise Rejected(Reason.NO_PATCH, "its diff is not UTF-8; `diff.base64` of the record has it")
    return str(diff["patch"])


def prediction_of(record: Record) -> dict[str, str]:
    """A line of a file of predictions for SWE-bench's harness. Raises `Rejected`."""
    own = record.row.get("instance_id")
    return {
        "instance_id": own if isinstance(own, str) else record.prompt_id,
        "model_name_or_path": record.model or "unknown",
        "model_patch": patch_of(record),
    }
