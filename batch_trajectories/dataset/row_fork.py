"""The column `fork` of a row: the conversation that the samples of this row branch from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, Strict

from agent.messages.message import ForkedEvent, Message
from agent.state.trajectory import Trajectory
from batch_trajectories.dataset.columns import Text, read_value
from batch_trajectories.dataset.row_conversation import FORK_COLUMN


@dataclass(frozen=True, slots=True)
class Fork:
    """The turns that the branches of a row share."""

    run: Text
    record: Text
    """The parent conversation, by its id."""
    turn: Annotated[int, Strict()]
    """The last shared turn."""
    drawn_as: Text
    """The task id by which model and toolsets were drawn."""
    inherited: dict[str, Any]
    """The cost of the shared turns."""
    events: Annotated[tuple[Any, ...], PlainValidator(tuple)]
    """Events of the parent, from its opening on."""

    def event(self, *, branch: int, replay: dict[str, Any]) -> ForkedEvent:
        """The first event of a branch, after the shared ones."""
        return ForkedEvent(
            kind="forked",
            run=self.run,
            record=self.record,
            turn=self.turn,
            branch=branch,
            inherited=self.inherited,
            replay=replay,
        )


def read_fork(columns: Mapping[str, Any], opening: Sequence[Message]) -> Fork:
    """Read the column of a row. Raises `ValueError` if it does not hold whole turns."""
    try:
        fork: Fork = read_value(Fork, columns.get(FORK_COLUMN), FORK_COLUMN)
        trajectory = Trajectory(opening, fork.events)
        if trajectory.turns == fork.turn and not trajectory.open_calls():
            return fork
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        pass
    raise ValueError(
        f"`{FORK_COLUMN}` is not the beginning of a conversation (make it by the command fork)"
    )


def remove_fork_events(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row without the events of its fork, which its record has as messages."""
    fork = columns.get(FORK_COLUMN)
    if not isinstance(fork, dict) or "events" not in fork:
        return columns
    return {**columns, FORK_COLUMN: {key: fork[key] for key in fork if key != "events"}}
