"""The further messages of the user of an agent that runs as a command."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from agent.loop.steps import Finish
from agent.models.model import Model
from agent.runner import ConversationRunner
from agent.setup import Home
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.worker.calls import Calls, StoppableModel, Stops

if TYPE_CHECKING:
    from batch_trajectories.runs.worker.agents.agent_runner import AgentTask

FurtherMessage = Callable[[Sequence[str], Sequence[str]], Awaitable[str | Finish | None]]
"""See `ConversationRunner.further_message`."""


def further_messages(
    task: AgentTask, config: RunConfig, calls: Calls, stops: Stops
) -> FurtherMessage:
    """What gives the messages of the row, or of its simulated user."""

    def gated(model: Model) -> StoppableModel:
        return StoppableModel(stops, model, task.kept)

    home = Home(
        task.setup, task.context, calls.pool, config.tool_timeout_s, gate=gated, kept=task.kept
    )
    return ConversationRunner(
        trajectory=task.trajectory,
        spec=task.row.spec,
        model=home.model((), start=0),
        toolbox=home.toolbox(()),
        journal=task.journal,
        host=home,
    ).further_message
