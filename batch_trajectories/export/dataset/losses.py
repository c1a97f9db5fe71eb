"""Describes what became of the tasks of an export, in the words of the glossary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from batch_trajectories.basics.text import plural
from batch_trajectories.export.training_files import FAILED

_DRAWS = ("balance", "max_per", "runs")
"""Reasons in manifests for sound conversations in place of which the recipe draws others."""


def kind_of_loss(reason: str) -> str:
    """The word for tasks that a manifest counts as rejected for this reason."""
    if reason == FAILED:
        return FAILED
    return "not drawn" if reason in _DRAWS else "rejected"


def task_counts(manifest: Mapping[str, Any]) -> dict[str, int]:
    """The tasks of a manifest by what became of them; kinds without a task are left out.

    Keys, in this order: `discarded`, `failed` (with or without a record), `pending`, `rejected`,
    `not drawn`.
    """
    counts = Counter({key: int(manifest[key]) for key in ("discarded", FAILED, "pending")})
    for reason, count in manifest["rejected_by_reason"].items():
        counts[kind_of_loss(reason)] += count
    names = ("discarded", FAILED, "pending", "rejected", "not drawn")
    return {name: counts[name] for name in names if counts[name]}


def describe_losses(manifest: Mapping[str, Any], part: Mapping[str, Any] | None = None) -> str:
    """The reason why there are no more rows: "9 tasks: 3 pending, 6 rejected as require_passed".

    `manifest` is that of a dataset, and `part` its part about a format; or `manifest` is that of
    the training file, which has no parts.
    """
    counts = task_counts(manifest)
    told = [(counts.get(key, 0), key) for key in ("discarded", FAILED, "pending")]
    told.append((manifest.get("partial", 0), "ended early"))
    told += [
        (count, f"{kind_of_loss(reason)} as {reason}")
        for reason, count in manifest["rejected_by_reason"].items()
        if reason != FAILED
    ]
    of_part = {} if part is None else part["rejected_by_reason"]
    told += [(count, f"not used as {reason}") for reason, count in of_part.items()]
    words = ", ".join(f"{count:,} {what}" for count, what in sorted(told, reverse=True) if count)
    return f"{plural(manifest['tasks'], 'task')}: {words or 'none ended'}"
