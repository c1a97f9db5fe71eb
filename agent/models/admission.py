"""The interface by which call attempts wait for their turn and for their share of a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from agent.models.errors import ModelError
from agent.models.model import Completion


class CostEstimate(NamedTuple):
    """The most that one attempt can use, as far as is known beforehand."""

    usd: float | None
    """Maximum dollars; None if the price of the model is unknown."""
    tokens: int | None
    """Maximum tokens, in and out; None if the request does not limit the reply."""
    likely_input_tokens: int


class Permit(Protocol):
    """Permission for one attempt."""

    @property
    def sent_at(self) -> float:
        """The time when the permit was granted (monotonic clock)."""
        ...

    def leave(self, outcome: Completion | ModelError | None) -> None:
        """End the attempt with its reply or its failure; None: it was cancelled."""
        ...


class CallAdmission(Protocol):
    """Admits attempts at one endpoint."""

    @property
    def has_answered(self) -> bool:
        """Whether the endpoint has ever answered a call."""
        ...

    async def enter(self, claim: Callable[[], CostEstimate]) -> Permit:
        """Wait until an attempt may be made; may raise to call it off.

        `claim` estimates the most that the attempt can use. It is called only if a limit depends on
        it, since counting takes time.
        """
        ...
