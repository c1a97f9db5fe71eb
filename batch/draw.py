"""What is drawn at random for each task: always from the run's seed and the task's id."""

from __future__ import annotations

from agent.setup import Setup
from batch.config import RunConfig
from toolsets.distributions import draw_toolsets


def setup_of_task(common: Setup, config: RunConfig, task_id: str) -> Setup:
    """`common` with the toolsets that the task is offered: those that it draws, if it does."""
    distribution = config.toolset_percentages()
    if distribution is None:
        return common
    # What is disabled is not in `common`, and cannot be drawn.
    left = {name: distribution[name] for name in common.names()}
    return common.only(draw_toolsets(left, f"{config.seed}/{task_id}") if left else ())
