"""The values that a request of an agent is read into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from agent.messages.message import Message, ToolCall

Operation = Literal["call", "count_tokens", "other"]
"""The purpose of a request. A "call" is a model call; "other" has to be refused."""


class WireError(Exception):
    """A request that cannot be relayed; it is answered with status 400 and the message."""


@dataclass(frozen=True, slots=True)
class Volatile:
    """Values that differ between two starts of an agent and do not decide the reply.

    The keys of requests leave them out. Requests are sent and recorded with them.
    """

    fields: tuple[str, ...] = ()
    """Dotted paths of body fields beside messages and tools; `*` stands for any key."""
    texts: tuple[str, ...] = ()
    """Regular expressions; their matches are cut from all texts."""


NOTHING_VOLATILE = Volatile()


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a request that was read: an item of its messages, or several that belong together.

    A later request that repeats the piece reuses the part.
    """

    raw: Any
    """The piece as it was in the body."""
    messages: Sequence[Message]
    digests: Sequence[bytes]
    """A digest per message, in the order of the messages; see `agent.wires.reading`."""
    calls: Sequence[ToolCall]
    first_call: int
    """The number of tool calls before this part."""


Earlier = Callable[[str], Part | None]
"""Finds the messages up to the reply with an id, or up to the last reply of the conversation with
that id. Returns None for an unknown id."""


def nothing_earlier(id: str) -> None:
    """Find no reply; see `Earlier`."""
    del id


@dataclass(frozen=True, slots=True)
class Offer:
    """The tools that a request offers."""

    raw: Any
    """The tools as they were in the body."""
    tools: list[dict[str, Any]]
    """The schemas of the tools that the agent runs, in OpenAI form."""
    server_tools: tuple[str, ...]
    """The names of the tools that the provider would run."""
    digest: bytes


_NO_OFFER = Offer(None, [], (), b"")


@dataclass(frozen=True, slots=True)
class WireRequest:
    """The content of one model call's body."""

    api: str
    model: str
    """The model's name as the agent sent it."""
    messages: list[Message]
    """All messages, with the system prompt. Images and unknown parts are placeholders in the text,
    and whole in `provider_blocks`."""
    tools: list[dict[str, Any]]
    """The schemas of the tools that the agent runs, in OpenAI form."""
    is_stream: bool
    max_tokens: int | None
    """The limit on the reply in the body; None without one."""
    key: str
    """A digest of everything that decides the reply; see `ExchangeEvent.key`."""
    server_tools: tuple[str, ...] = ()
    """The names of tools that the provider would run, such as web search and remote MCP servers."""
    digests: list[bytes] = field(default_factory=list, repr=False)
    """A digest per message; those of results are in the order of calls."""
    parts: Sequence[Part] = field(default=(), repr=False)
    """The parts that the messages were read from."""
    pieces: list[Any] = field(default_factory=list, repr=False)
    """The `raw` of all parts."""
    offer: Offer = field(default=_NO_OFFER, repr=False)
    follows: str = ""
    """The id of the reply, or of the conversation, that the request continues without repeating it;
    "" if it repeats everything."""
    is_instructed: bool = False
    """Whether the first message holds instructions for this call only. A later call that continues
    the reply by id does not inherit them."""
