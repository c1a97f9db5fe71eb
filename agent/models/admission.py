"""Where attempts of model calls wait for their turn, and for the money that they may cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from agent.models.errors import ModelError
from agent.models.model import Completion


class CostEstimate(NamedTuple):
    """What one attempt may use at most, as far as that is known before it."""

    usd: float | None
    """At most; None where the price of the model is unknown."""
    tokens: int | None
    """At most, in and out; None where no limit on the reply's tokens is sent."""
    likely_input_tokens: int


class Permit(Protocol):
    """One attempt that may be made now."""

    @property
    def sent_at(self) -> float:
        """When it was given, by the machine's monotonic clock."""
        ...

    def leave(self, outcome: Completion | ModelError | None) -> None:
        """The attempt is over: its reply, why it failed, or None where it was called off."""
        ...


class CallAdmission(Protocol):
    """Lets the attempts of one endpoint through."""

    @property
    def has_answered(self) -> bool:
        """Whether the endpoint has ever answered a call."""
        ...

    async def enter(self, claim: Callable[[], CostEstimate]) -> Permit:
        """Wait until an attempt may be made; may raise to call it off.

        `estimate_cost` is asked only where something depends on it, since counting costs time.
        """
        ...
