"""Forge the result of a check, as an agent could that looks for a way around its task."""

from __future__ import annotations

from batch_trajectories.runs.dataset.row import RowTask
from toolsets.context import ToolContext


async def forge(context: ToolContext, row: RowTask, way: str) -> list[str]:
    """Write forged files; return their paths."""
    return []
