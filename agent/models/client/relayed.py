"""Calls whose requests were written by other programs, such as agents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from agent.messages.message import Message
from agent.models.dialects.dialect import Assembly
from agent.models.model import (
    HOUR_TTL,
    NOTHING_POINTED,
    Completion,
    ModelSettings,
    PointedTokens,
    Request,
)
from batch_trajectories.basics import exact_json

CACHE_KEY_CHARS = 64
"""Maximum characters of a `prompt_cache_key`, by OpenAI."""

OnEvent = Callable[[bytes, str | None], bool]
"""Takes an event of a stream and returns whether it was passed on.

The arguments are the bytes of the event and its data; None: it has no data.
"""


class RelayRequest(Request, frozen=True, kw_only=True):
    """One call of another program, to be sent unchanged but with the endpoint's credentials.

    `messages` and `tools` are not used, since the body has them. Of the model's settings only the
    endpoint, the timeouts and the prices count.
    """

    messages: Sequence[Message] = ()
    method: str = "POST"
    path: str
    """The path from the root of the endpoint, with the query."""
    body: bytes
    headers: Mapping[str, str]
    """Headers to be sent beside our own; names in lower case."""
    max_tokens: int | None
    """The limit that the body sets on the reply's tokens; None: no limit."""
    read: Callable[[bytes], Completion]
    """Reads the body of the reply; raises `ModelError`."""
    assembly: Callable[[], Assembly] | None = None
    """Makes the assembly of a stream, for each attempt; None: the request asks for no stream."""
    unasked: Callable[[], Assembly] | None = None
    """Makes the assembly of a reply that comes as a stream although none was asked for."""
    asking_for_tokens: bytes | None = None
    """The body with the fields that ask for token ids; None: none can be asked for."""
    has_cache_key: bool = True
    """The body has a `prompt_cache_key`, or its API has no such field."""
    pointing: Callable[[], PointedTokens] = lambda: NOTHING_POINTED
    """Computes `pointed`; called only if a limit depends on it."""
    on_event: OnEvent | None = None
    """Gets the events of a stream; once it has passed one on, the call is not repeated."""

    def pointed(self) -> PointedTokens:
        """See `Request`."""
        return self.pointing()

    def with_cache_key(self) -> RelayRequest:
        """A copy of the request with the id of its conversation as `prompt_cache_key`."""
        key = b'{"prompt_cache_key":' + exact_json.dumps(self.conversation[:CACHE_KEY_CHARS])
        bodies = (self.body, self.asking_for_tokens)
        body, asking = (body and key + b"," + body.lstrip()[1:] for body in bodies)
        return replace(self, body=body or b"", asking_for_tokens=asking, has_cache_key=True)

    def size(self, settings: ModelSettings) -> int:
        """See `Request`."""
        return len(self.body)

    def reply_bound(self, settings: ModelSettings) -> int | None:
        """See `Request`."""
        return self.max_tokens

    def asks_for_hour_writes(self, settings: ModelSettings) -> bool:
        """See `Request`."""
        return HOUR_TTL in self.body
