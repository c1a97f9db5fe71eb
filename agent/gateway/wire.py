"""Requests of agents, and replies to them, in the words of one API.

`agent.models.dialects` writes requests and reads replies; a `Wire` is the opposite side: it reads
requests and writes replies. Bodies pass through unchanged; a wire says what they mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from agent.messages import Message, ToolCall

Operation = Literal["call", "count_tokens", "other"]
"""What a request asks for. A "call" is a model call; "other" has to be refused."""


class WireError(Exception):
    """A request that cannot be relayed; answered with `status` and these words."""

    def __init__(self, words: str, *, status: int = 400) -> None:
        super().__init__(words)
        self.status = status


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
    """One per message; see `agent.gateway.canonical`."""
    calls: Sequence[ToolCall]
    first_call: int
    """How many calls there are before it."""


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
    """What the body of one model call says."""

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
    """One per message; see `agent.gateway.canonical`."""
    parts: Sequence[Part] = field(default=(), repr=False)
    """What its messages were read from."""
    pieces: list[Any] = field(default_factory=list, repr=False)
    """The `raw` of all parts."""
    offer: Offer = field(default=_NO_OFFER, repr=False)
    """What its tools were read from."""


class Wire(Protocol):
    """One API, as agents speak it. Paths may have a query; they begin with a slash."""

    @property
    def api(self) -> str:
        """The dialect's name, as in `ModelSettings.api`."""
        ...

    @property
    def keepalive(self) -> bytes:
        """What can be sent in a stream at any time to show that it is alive."""
        ...

    def operation(self, method: str, path: str) -> Operation | None:
        """What a request to `path` asks for; None if it is not a request of this API."""
        ...

    def read(
        self,
        path: str,
        body: Mapping[str, Any],
        volatile: Volatile = NOTHING_VOLATILE,
        before: Sequence[WireRequest] = (),
    ) -> WireRequest:
        """Read the body of a model call.

        `before` are earlier requests of the same agent (see `Threads.recent`): what the body
        repeats of them is not read again. Raises `WireError`.
        """
        ...

    def rewritten(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
        without_server_tools: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Path and body with another model name, a limit on the reply of at most `max_tokens`, or
        without the tools that the provider would run. `body` is not altered.
        """
        ...

    def upstream_path(self, path: str) -> str:
        """Where the request goes, below the root of an endpoint."""
        ...

    def request_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those of an agent's headers (names in any case) that are passed on, names lower-case.

        Never keys, cookies, or headers of the connection.
        """
        ...

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """A recorded reply as the body that answers a request without streaming."""
        ...

    def stream_of(self, body: Mapping[str, Any]) -> list[bytes]:
        """A recorded reply as the events that answer a request with streaming.

        Their assembly is `body` again.
        """
        ...

    def last_event(self, data: str) -> bool:
        """Whether a stream's event with this data ends the reply: it and all later events have to
        wait until the reply is durable.
        """
        ...

    def error(self, status: int, kind: str, words: str) -> bytes:
        """The body of an error reply. `kind` is a word such as "budget" or "stopped"."""
        ...

    def stream_error(self, kind: str, words: str) -> bytes:
        """An event that ends a stream whose headers are sent, as an error not worth repeating."""
        ...
