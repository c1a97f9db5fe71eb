"""Batches of model calls, which providers answer within a day at about half the price.

One narrow seam, `Batches`, with a module for each provider's protocol behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import orjson

from agent.models.model import Completion, ModelSettings, Request
from agent.models.names import SCRIPTED

LONGEST_NAME = 64
"""Characters that an item's id may have; letters, digits, '-' and '_' are allowed."""


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is."""

    is_over: bool
    failure: str = ""
    """Why the batch as a whole was refused; "" where it was not."""
    is_for_want_of_room: bool = False
    """It was refused because too much is queued: the same may be taken later."""


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What became of one item."""

    id: str
    reply: bytes | None
    """The body that a live call would have got, None where there is none."""
    why: str = ""
    """Why there is none."""


@dataclass(frozen=True, slots=True)
class LostBatch:
    """A batch that may have been created, though nobody was told its id."""

    name: str
    upload: str
    """What `upload` gave."""
    ids: frozenset[str]
    sent_at: float
    """Epoch seconds before it can have been created."""


class Undecided(Exception):
    """A lost batch may be one that is still being worked on, and cannot be looked into yet."""


class Batches(Protocol):
    """The batches of one model at one endpoint. All methods raise `ModelError`."""

    max_items: int
    max_bytes: int
    """Of the lines of one batch."""

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
        """How far a batch is."""
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


def has_batches(settings: ModelSettings) -> bool:
    """Whether a model is asked by an API that has batches; its endpoint may still have none."""
    return settings.api != SCRIPTED and settings.provider != "openrouter"


def open_batches(settings: ModelSettings, *, api_key: str) -> Batches:
    """The batches of a model, in the running event loop."""
    if settings.api == "anthropic_messages":
        from agent.models.anthropic_batches import AnthropicBatches

        return AnthropicBatches(settings, api_key)
    from agent.models.openai_batches import OpenAIBatches

    return OpenAIBatches(settings, api_key)


def body_of(request: Request, settings: ModelSettings) -> bytes:
    """The body that a live call would send, in one piece."""
    match settings.api:
        case "anthropic_messages":
            from agent.models import anthropic_messages

            return orjson.dumps(anthropic_messages.request_body(settings, request))
        case "openai_responses":
            from agent.models import openai_responses

            return orjson.dumps(openai_responses.request_body(settings, request))
        case _:
            from agent.models import openai_chat

            return orjson.dumps(openai_chat.request_body(settings, request))


def read_reply(body: bytes, settings: ModelSettings) -> Completion:
    """The reply in the body of an item's result, without its price. Raises `ModelError`."""
    match settings.api:
        case "anthropic_messages":
            from agent.models import anthropic_messages

            return anthropic_messages.read_reply(body)
        case "openai_responses":
            from agent.models import openai_responses

            return openai_responses.read_reply(body)
        case _:
            from agent.models import openai_chat

            return openai_chat.read_reply(body)
