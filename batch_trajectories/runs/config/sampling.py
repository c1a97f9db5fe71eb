"""Random choices for each task, determined by the run's seed and the task's id."""

from __future__ import annotations

import random

from agent.setup import Setup
from batch_trajectories.runs.config.models import Setups
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.dataset.column_names import MODEL_COLUMN
from batch_trajectories.runs.store.tasks import Task


def setup_of_task(setups: Setups, config: RunConfig, task: Task) -> Setup:
    """The model and toolsets of a task, drawn if the config says so."""
    setup = setups[_model_of(config, task)]
    distribution = config.toolset_percentages()
    if distribution is None:
        return setup
    from toolsets.catalog.distributions import draw_toolsets

    # Disabled toolsets are not in `setup` and cannot be drawn.
    left = {name: distribution[name] for name in setup.names()}
    drawn_as = f"{config.seed}/{_drawn_as(config, task)}"
    return setup.only(draw_toolsets(left, drawn_as) if left else ())


def _model_of(config: RunConfig, task: Task) -> str:
    """That of the cascade, else the row's own, else one drawn by weight."""
    if config.escalate_after is not None:
        return task.model or next(iter(config.model_weights()))
    weights = config.model_weights()
    if len(weights) == 1:
        return next(iter(weights))
    own = task.columns.get(MODEL_COLUMN)
    if isinstance(own, str):
        return own
    draw = random.Random(f"{config.seed}/{_drawn_as(config, task)}/model")
    names = sorted(weights)
    return draw.choices(names, [weights[name] for name in names])[0]


def _drawn_as(config: RunConfig, task: Task) -> str:
    """The id that a task draws with; a branch uses its parent's, to draw the same."""
    return str(task.columns["fork"]["drawn_as"]) if config.forks else task.id
