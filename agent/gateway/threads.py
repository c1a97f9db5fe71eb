"""The fold of an agent's calls into conversations.

A thread is a sequence of messages that only grows. A call continues the thread whose messages it
repeats; if it repeats only the beginning of one, a new thread branches off there. A restart sets
all calls aside; those that are asked for again become part of their conversations again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent.gateway.wire import NOTHING_VOLATILE, Volatile, WireRequest
from agent.messages import AgentEvent, AgentExitEvent, ExchangeEvent, Message


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a request belongs; see the fields of `ExchangeEvent`."""

    thread: int
    shared: int
    added: list[Message]
    tools: list[dict[str, Any]] | None
    of: int | None = None
    echoes: Sequence[tuple[int, int]] = ()


class Threads:
    """The calls of one agent, as conversations; see `Trajectory.agent_calls`."""

    def __init__(self) -> None:
        self.volatile: Volatile = NOTHING_VOLATILE
        """Decides how requests are placed; set before the first `place`."""
        self.exchanges: list[ExchangeEvent] = []
        """All recorded calls, by number."""
        self.starts = 1
        """How often the agent's command was started."""
        self.exit: AgentExitEvent | None = None
        """How the last start ended, if it did."""

    @property
    def next_number(self) -> int:
        """The number of the next call to be recorded."""
        return len(self.exchanges)

    @property
    def calls(self) -> int:
        """How many calls were paid for."""
        return len(self.exchanges)

    @property
    def recent(self) -> Sequence[WireRequest]:
        """The latest requests of the threads, for `Wire.read`; empty after a resume."""
        raise NotImplementedError

    @property
    def set_aside(self) -> list[ExchangeEvent]:
        """Calls before the last restart that were not asked for again."""
        raise NotImplementedError

    @property
    def diverged_at(self) -> int | None:
        """How many calls the last start answered before its first new one, while others were set
        aside; None if none are set aside.
        """
        raise NotImplementedError

    def apply(self, event: AgentEvent) -> None:
        """Take one event into the fold."""
        raise NotImplementedError

    def place(self, request: WireRequest) -> Placement:
        """Where a request belongs now: call it once its reply is complete."""
        raise NotImplementedError

    def unanswered(self, key: str) -> ExchangeEvent | None:
        """The earliest call with this key that is set aside, if there is one."""
        raise NotImplementedError
