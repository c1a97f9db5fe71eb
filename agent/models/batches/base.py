"""Batches of model calls, which providers answer within a day at about half the price.

`Batches` is the interface; each provider's protocol has a module of its own.
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
    """The reason why the batch as a whole was refused; "" if it was not."""
    is_for_want_of_room: bool = False
    """The batch was refused because too much is queued, so it may be accepted later."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The outcome of one batch item."""

    id: str
    reply: bytes | None
    """The body that a live call would have got; None if the item has no reply."""
    why: str = ""
    """The reason why there is no reply; "" if there is one."""


@dataclass(frozen=True, slots=True)
class LostBatch:
    """A batch that may have been created, though its id never arrived."""

    name: str
    upload: str
    """The result of `Batches.upload`."""
    ids: frozenset[str]
    """The ids of the items in the batch."""
    sent_at: float
    """Epoch seconds at which the creation was sent."""


class Undecided(Exception):
    """A lost batch may be one that is still in progress, whose items cannot be read yet."""


class Batches(Protocol):
    """The batches of one model at one endpoint. All methods raise `ModelError`."""

    max_items: int
    max_bytes: int
    """Maximum bytes of the lines of one batch."""

    def line(self, id: str, body: bytes) -> bytes:
        """Encode an item as a line of the file of items; `body` is the body of a live request."""
        ...

    async def upload(self, items: Path) -> str:
        """Upload the items, if the provider has such a step, which costs nothing yet."""
        ...

    async def create(self, name: str, items: Path, upload: str) -> str:
        """Create a batch, which costs money, and return its id."""
        ...

    async def state(self, id: str) -> BatchState:
        """Fetch the progress of a batch."""
        ...

    def results(self, id: str) -> AsyncIterator[ItemResult]:
        """Fetch the results of a batch that is over, in any order; some items may have none."""
        ...

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """Find the id of a lost batch; None if it was not created so far.

        `known` are ids of other batches. Raises `Undecided`.
        """
        ...

    async def withdraw(self, upload: str) -> None:
        """Make a creation that may still be under way fail, if the provider's API allows it."""
        ...

    async def close(self) -> None:
        """Release all connections."""
        ...
