"""Dollars, tokens and limits: the quantities that parent and workers speak of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars and tokens; of what the run does not bound always 0."""

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
    """What the user says about the calls to one endpoint."""

    start: int
    """Calls in flight to begin with."""
    ceiling: int
    rpm: float | None
    """Requests per minute."""
    tpm: float | None
    """Tokens per minute, in and out."""
