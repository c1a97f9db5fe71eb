"""The column `fork` of a row: the conversation that the samples of this row branch from.

Keys: `run` and `record` (the parent conversation), `turn` (the last that is shared), `drawn_as`
(the task id that model and toolsets were drawn with), `inherited` (what the shared turns cost),
and `events` (those of the parent, from its opening on).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.messages.message import Event, ForkedEvent, Message
from agent.state.trajectory import Trajectory
from batch_trajectories.dataset.column_names import FORK_COLUMN


@dataclass(frozen=True, slots=True)
class Fork:
    """The turns that the branches of a row share."""

    run: str
    record: str
    turn: int
    inherited: dict[str, Any]
    events: tuple[Event, ...]

    def event(self, *, branch: int, replay: dict[str, Any]) -> ForkedEvent:
        """The first event of a branch itself."""
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
    fork = columns.get(FORK_COLUMN)
    try:
        assert isinstance(fork, dict)
        events = tuple(fork["events"])
        trajectory = Trajectory(opening, events)
        is_whole = trajectory.turns == fork["turn"] and not trajectory.open_calls()
        texts = [fork["run"], fork["record"], fork["drawn_as"]]
        if is_whole and all(isinstance(text, str) for text in texts):
            return Fork(
                run=fork["run"],
                record=fork["record"],
                turn=fork["turn"],
                inherited=dict(fork["inherited"]),
                events=events,
            )
    except (AssertionError, KeyError, TypeError, ValueError, IndexError, AttributeError):
        pass
    raise ValueError(
        f"`{FORK_COLUMN}` is not the beginning of a conversation (make it by the command fork)"
    )


def without_events(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns of a row without the events of its fork, which its record has as messages."""
    fork = columns.get(FORK_COLUMN)
    if not isinstance(fork, dict) or "events" not in fork:
        return columns
    return {**columns, FORK_COLUMN: {key: fork[key] for key in fork if key != "events"}}
