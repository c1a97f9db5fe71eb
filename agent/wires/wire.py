"""Requests of agents, as they were read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agent.messages.message import Message, ToolCall

Operation = Literal["call", "count_tokens", "other"]
"""What a request asks for. A "call" is a model call; "other" has to be refused."""


class WireError(Exception):
    """A request that cannot be relayed; answered with status 400 and these words."""


@dataclass(frozen=True, slots=True)
class Volatile:
    """What differs between two starts of an agent and does not decide the reply.

    It is left out of the keys of requests and never changed in what is sent or recorded.
    """

    fields: tuple[str, ...] = ()
    """Dotted paths of body fields beside messages and tools; `*` stands for any key."""
    texts: tuple[str, ...] = ()
    """Regular expressions; what they match is cut from all texts."""


NOTHING_VOLATILE = Volatile()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a request that was read: an item of its messages, or several that belong together.

    A later request that repeats the piece reuses what was read of it.
    """

    raw: Any
    messages: Sequence[Message]
    digests: Sequence[bytes]
    """One per message, in the order of the messages; see `agent.wires.reading`."""
    calls: Sequence[ToolCall]
    first_call: int
    """How many calls there are before it."""


Earlier = Callable[[str], Part | None]
"""Gives what the model read and wrote up to the reply with this id, or up to the last reply of the
conversation with this id; None if it is unknown."""


def nothing_earlier(id: str) -> None:
    """Knows no reply; see `Earlier`."""
    del id


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools of a request."""

    raw: Any
    tools: list[dict[str, Any]]
    server_tools: tuple[str, ...]
    digest: bytes


_NO_OFFER = Offer(None, [], (), b"")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """The content of one model call's body."""

    api: str
    model: str
    """The name that the agent asked for."""
    messages: list[Message]
    """The system prompt included. Images and unknown parts are placeholders in the text, and whole
    in `provider_blocks`."""
    tools: list[dict[str, Any]]
    """The schemas of tools that the agent runs, in OpenAI form."""
    is_stream: bool
    max_tokens: int | None
    """The limit on the reply that the body sets."""
    key: str
    """Identifies all that decides the reply; see `ExchangeEvent.key`."""
    server_tools: tuple[str, ...] = ()
    """Names of tools that the provider would run, such as web search and remote MCP servers."""
    digests: list[bytes] = field(default_factory=list, repr=False)
    """One per message, those of results in the order of calls; see `agent.wires.reading`."""
    parts: Sequence[Part] = field(default=(), repr=False)
    """The parts that its messages were read from."""
    pieces: list[Any] = field(default_factory=list, repr=False)
    """The `raw` of all parts."""
    offer: Offer = field(default=_NO_OFFER, repr=False)
    """What its tools were read from."""
    follows: str = ""
    """The id of the reply, or of the conversation, that it continues without repeating it."""
    is_instructed: bool = False
    """The first message is for this call alone: what continues its reply by id does not have it."""
