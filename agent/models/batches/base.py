"""Batches of model calls, which providers answer within a day at about half the price.

One narrow seam, `Batches`, with a module for each provider's protocol behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BatchState:
    """The progress of a batch."""

    is_over: bool
    failure: str = ""
    """Why the batch as a whole was refused; "" where it was not."""
    is_for_want_of_room: bool = False
    """It was refused because too much is queued: the same may be taken later."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The outcome of one batch item."""

    id: str
    reply: bytes | None
    """The body that a live call would have got, None where there is none."""
    why: str = ""
    """Why there is no reply."""


@dataclass(frozen=True, slots=True)
class LostBatch:
    """A batch that may have been created, though its id never arrived."""

    name: str
    upload: str
    """The result of `upload`."""
    ids: frozenset[str]
    sent_at: float
    """Epoch seconds before it can have been created."""


class Undecided(Exception):
    """A lost batch may be one that is still in progress, and cannot be read yet."""


class Batches(Protocol):
    """The batches of one model at one endpoint. All methods raise `ModelError`."""

    max_items: int
    max_bytes: int
    """Maximum bytes of the lines of one batch."""

    def line(self, id: str, body: bytes) -> bytes:
        """One item, as a line of a file of items; `body` is that of a live request."""
        ...

    async def upload(self, items: Path) -> str:
        """Bring the items to the provider, where that is a step of its own; costs nothing yet."""
        ...

    async def create(self, name: str, items: Path, upload: str) -> str:
        """Begin a batch and return its id. From here on it costs."""
        ...

    async def state(self, id: str) -> BatchState:
        """The progress of a batch."""
        ...

    def results(self, id: str) -> AsyncIterator[ItemResult]:
        """The results of a batch that is over, in any order; some items may have none."""
        ...

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """The id of a batch whose creation was cut short, None where there is none so far.

        `known` are ids that belong to others. Raises `Undecided`.
        """
        ...

    async def withdraw(self, upload: str) -> None:
        """Make sure, where that can be done, that a creation still under way will fail."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...
