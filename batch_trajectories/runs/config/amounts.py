"""Costs, and the limits of an endpoint: values that parent and workers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars and tokens; a unit without a budget stays 0."""

    usd: float = 0.0
    tokens: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.usd + other.usd, self.tokens + other.tokens)

    def __sub__(self, other: Cost) -> Cost:
        return Cost(self.usd - other.usd, self.tokens - other.tokens)

    def covers(self, other: Cost) -> bool:
        """Whether `other` can be paid from this."""
        return self.usd >= other.usd and self.tokens >= other.tokens

    def to_json(self) -> list[float]:
        """For a message."""
        return [self.usd, self.tokens]


class EndpointLimits(NamedTuple):
    """The user's limits on calls to one endpoint."""

    start: int
    """Initial limit on calls in flight."""
    ceiling: int
    """Maximum of that limit."""
    rpm: float | None
    """Requests per minute."""
    tpm: float | None
    """Tokens per minute, in and out."""
