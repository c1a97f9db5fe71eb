"""Look for the solution where an agent could read it."""

from __future__ import annotations

from typing import Any

from batch_trajectories.runs.audit.reference import Reference
from batch_trajectories.runs.dataset.row import RowTask
from toolsets.context import ToolContext


async def find_leaks(
    context: ToolContext, row: RowTask, reference: Reference | None, expected: str | None
) -> list[dict[str, Any]]:
    """Where the solution can be read: `what` in words, `where`."""
    return []
