"""The APIs that are spoken: how a request is written in each, and how its reply is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from agent.models import anthropic_messages, openai_chat, openai_responses
from agent.models.anthropic_stream import MessagesAssembly
from agent.models.model import Completion, ModelSettings, Request
from agent.models.openai_stream import ChatAssembly
from agent.models.responses_stream import ResponsesAssembly
from agent.models.streaming import Assembly
from agent.stream import StreamHandler


class Dialect(NamedTuple):
    """What one API wants to be told, and how it answers."""

    path: str
    """Of a request, below the root of the endpoint."""
    headers: Callable[[ModelSettings, str], dict[str, str]]
    """Of every request, with the key in them."""
    body: Callable[[ModelSettings, Request], dict[str, Any]]
    """Of one request, to be sent as JSON."""
    read: Callable[[bytes], Completion]
    """What the body of a reply says; raises `ModelError`."""
    assembly: Callable[[StreamHandler], Assembly]
    """Puts a streamed reply together, and tells the handler of its parts."""


DIALECTS: Mapping[str, Dialect] = {
    openai_chat.API: Dialect(
        "/chat/completions",
        openai_chat.headers_of,
        openai_chat.request_body,
        openai_chat.read_reply,
        ChatAssembly,
    ),
    openai_responses.API: Dialect(
        "/responses",
        openai_chat.headers_of,
        openai_responses.request_body,
        openai_responses.read_reply,
        ResponsesAssembly,
    ),
    anthropic_messages.API: Dialect(
        "/v1/messages",
        anthropic_messages.headers_of,
        anthropic_messages.request_body,
        anthropic_messages.read_reply,
        MessagesAssembly,
    ),
}
"""By what settings call their `api`."""
