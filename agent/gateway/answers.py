"""Answers on their way to agents, and lists of models.

A reply that an agent requests again while it is under way is not paid for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from agent.models.dialects.anthropic_messages import API as MESSAGES
from agent.models.dialects.gemini import API as GEMINI
from agent.models.dialects.gemini import PATH as GEMINI_PATH
from agent.wires.wire import WireRequest
from batch_trajectories.basics import exact_json


class Refusal(NamedTuple):
    """The reason, for the agent, that a call has no reply."""

    status: int
    kind: str
    """A word such as "budget" or "stopped"."""
    message: str
    body: bytes | None = None
    """The endpoint's own JSON, which is passed on unchanged; None: the message is sent."""


class Answer:
    """A reply that is still coming. Several connections can read it, each from the beginning."""

    def __init__(self, refusal: Refusal | None = None, *, is_stream: bool = False) -> None:
        self.is_stream = is_stream
        self.parts: list[bytes] = []
        """The events of a stream, or the whole body; the last one only once it is recorded."""
        self.is_done = refusal is not None
        """Whether no part will follow."""
        self.refusal = refusal
        """The reason that the reply is not complete; None if it is, or may still be."""
        self.readers = 0
        self._changed = asyncio.Event()

    def add(self, part: bytes) -> None:
        """Add the next part."""
        self.parts.append(part)
        self._changed.set()

    def finish(self, parts: list[bytes]) -> None:
        """Add the last parts."""
        self.parts += parts
        self.is_done = True
        self._changed.set()

    def fail(self, refusal: Refusal) -> None:
        """End the reply before it is complete."""
        self.refusal = refusal
        self.finish([])

    async def wait_for_more(self, known: int) -> None:
        """Wait until there are more than `known` parts, or the reply is done."""
        while not self.is_done and len(self.parts) <= known:
            self._changed.clear()  # wakes all readers first: each looks before it waits again
            await self._changed.wait()

    async def wait_until_done(self) -> None:
        """Wait until the reply is done."""
        while not self.is_done:
            await self.wait_for_more(len(self.parts))


class Answers:
    """The answers, by request, that the agent has not read completely."""

    def __init__(self) -> None:
        self._unread: dict[tuple[str, bool], list[Answer]] = {}

    def begin(self, request: WireRequest) -> Answer:
        """Make a new reply to a request."""
        reply = Answer(is_stream=request.is_stream)
        self._unread.setdefault((request.key, request.is_stream), []).append(reply)
        return reply

    def join(self, request: WireRequest, *, is_repeat: bool) -> Answer | None:
        """Find the reply to an equal request whose connection is gone; None if there is none.

        If the agent says that this `is_repeat`, the connection of the other may be open. Otherwise
        equal requests with open connections are different calls.
        """
        for reply in self._unread.get((request.key, request.is_stream), ()):
            if is_repeat or not reply.readers:
                return reply
        return None

    @contextmanager
    def reading(self, reply: Answer) -> Iterator[None]:
        """Count a connection as reader of a reply; on a normal exit, forget the reply as read."""
        reply.readers += 1
        try:
            yield
        finally:
            reply.readers -= 1
        self.forget(reply)

    def forget(self, reply: Answer) -> None:
        """Forget a reply that was read or failed: an equal request is another call."""
        for key, answers in self._unread.items():
            if reply in answers:
                answers.remove(reply)
                if not answers:
                    del self._unread[key]
                return


ListModels = Callable[[str, Mapping[str, str]], Coroutine[Any, Any, Answer]]
"""Answers a request for the list of models, given its path and headers (names lower-case)."""

_BELOW_ROOT = {MESSAGES: "/v1/models", GEMINI: GEMINI_PATH}


def list_names(names: Iterable[str]) -> ListModels:
    """Make the answer that lists these names, in one body that clients of every API can read."""
    known = list(dict.fromkeys(names))
    body = {
        "object": "list",
        "data": [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "run",
                "type": "model",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
            }
            for name in known
        ],
        "has_more": False,
        "first_id": None,
        "last_id": None,
        "models": [
            {"name": f"models/{name}", "supportedGenerationMethods": ["generateContent"]}
            for name in known
        ],
    }

    async def answer(path: str, headers: Mapping[str, str]) -> Answer:
        del path, headers
        reply = Answer()
        reply.finish([exact_json.dumps(body)])
        return reply

    return answer


def guess_api(path: str, headers: Mapping[str, str], otherwise: str) -> str:
    """Return the API by which a client asks for the list of models."""
    # The path of Anthropic and OpenAI is the same.
    if path.startswith("/v1beta"):
        return GEMINI
    return MESSAGES if "anthropic-version" in headers else otherwise


def models_path(api: str, path: str) -> str:
    """Return the path of the list of models at an endpoint, with the query of the client's path."""
    _, mark, query = path.partition("?")
    return _BELOW_ROOT.get(api, "/models") + mark + query
