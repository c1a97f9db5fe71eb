"""The further messages of the user of an agent that runs as a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from agent.loop.steps import Finish
from agent.models.model import Model
from agent.runner import ConversationRunner
from agent.setup import Home, Setup
from agent.state.trajectory import Journal, Kept, Trajectory
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.dataset.row import RowTask
from batch_trajectories.runs.worker.calls import Calls, StoppableModel, Stops
from toolsets.context import ToolContext

FurtherMessage = Callable[[Sequence[str], Sequence[str]], Awaitable[str | Finish | None]]
"""See `ConversationRunner.further_message`."""


def further_messages(
    row: RowTask,
    trajectory: Trajectory,
    *,
    setup: Setup,
    context: ToolContext,
    journal: Journal,
    kept: Kept,
    config: RunConfig,
    calls: Calls,
    stops: Stops,
    conversation: str,
) -> FurtherMessage:
    """What gives the messages of a row, or of its simulated user."""

    def gated(model: Model) -> StoppableModel:
        return StoppableModel(stops, model, kept)

    home = Home(setup, context, calls.pool, config.tool_timeout_s, gate=gated, kept=kept)
    return ConversationRunner(
        trajectory=trajectory,
        spec=row.spec,
        model=home.model((), start=0),
        toolbox=home.toolbox(()),
        journal=journal,
        host=home,
        conversation=conversation,
    ).further_message
