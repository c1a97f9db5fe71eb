"""What is sent to the endpoint for a call of an agent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from agent.gateway.pointing import Replies, check_pointed, pointed_at
from agent.messages.message import Message
from agent.models.bodies.dialect import read_reply
from agent.models.bodies.token_ids import asking_body, asks_for_ids, with_tokens
from agent.models.client.relayed import RelayRequest
from agent.models.dialects.openai_chat import API as CHAT
from agent.models.model import (
    NOTHING_POINTED,
    Completion,
    ModelSettings,
    Pointed,
    replies_asked_for,
)
from agent.models.providers import AGENTS_SESSION_HEADERS
from agent.models.usage import NOTHING_USED
from agent.wires.wire import WireError, WireRequest
from agent.wires.wire_base import Wire
from batch_trajectories.basics import exact_json


class AgentCall(NamedTuple):
    """One agent request."""

    wire: Wire
    path: str
    headers: Mapping[str, str]
    content: bytes
    """The body as it came."""
    body: dict[str, Any]
    """The same, read; half an emoji is U+FFFD here, as records have it."""
    is_repeat: bool
    """The agent says that it made this request before."""
    has_halves: bool = False
    """`content` holds half an emoji, as programs write that cut texts."""


def request_of(
    call: AgentCall,
    settings: ModelSettings,
    name: str | None,
    request: WireRequest | None,
    replies: Replies,
    conversation: str = "",
) -> RelayRequest:
    """The request to send: the agent's own, unless a part of it has to change.

    `name` is what the model is called at its endpoint, if the agent calls it otherwise;
    `request` is None for a request that costs nothing. `replies` are the agent's recorded calls.
    `conversation` is our id of its thread; one that the agent sends itself counts instead.
    Raises `WireError`, under a budget also for a request that can cost more than is known.
    """
    wire, path, content, body = call.wire, call.path, call.content, call.body
    write: Callable[[Any], bytes] = exact_json.dumps
    if call.has_halves:  # what is sent has them as the agent does, also where a part changes
        body, write = exact_json.loads_with_halves(content), exact_json.dumps_with_halves
    max_tokens: int | None = 0
    bound, tools = None, False
    if request is not None:
        max_tokens, tools = request.max_tokens, bool(request.server_tools)
        if max_tokens is None and settings.needs_bound:
            max_tokens = bound = settings.reply_bound
            if bound is None:
                raise WireError(
                    "the request does not limit the reply's tokens, so the budget of the run "
                    "cannot be kept: set its limit, or --max_tokens"
                )
    if name is not None or bound is not None or tools:
        path, body = wire.rewritten(
            path, body, model=name, max_tokens=bound, without_server_tools=tools
        )
        content = write(body)
    if request is not None and settings.needs_bound:
        check_pointed(wire, body, settings, replies)
    asking = None
    read: Callable[[bytes], Completion] = free
    if request is not None:
        read, is_chat = wire.read_reply, wire.layout.api == CHAT
        if is_chat and settings.token_ids:
            asking = asking_body(settings, body)
        if asking is not None or (is_chat and asks_for_ids(body)):
            read = partial(_read_tokens, settings, asking or body)
    own = sessions_in(call.headers, settings)
    return RelayRequest(
        path=wire.upstream_path(path),
        body=content,
        headers=wire.request_headers(call.headers) | own,
        conversation=next(iter(own.values()), conversation),
        has_cache_key=request is None or "prompt_cache_key" in body or not settings.takes_cache_key,
        max_tokens=None if max_tokens is None else max_tokens * replies_asked_for(body),
        read=read,
        unasked=None if request is None else call.wire.assembly,
        pointing=nothing if request is None else partial(pointed_at, wire, body, settings, replies),
        asking_for_tokens=None if asking is None else write(asking),
    )


def sessions_in(headers: Mapping[str, str], settings: ModelSettings) -> dict[str, str]:
    """The ids that an agent gives its conversation itself, by header, the best known first.

    Anything but ASCII is no id that could be sent on in a body.
    """
    names = (*map(str.lower, settings.session_headers), *AGENTS_SESSION_HEADERS)
    given = {name: headers[name] for name in names if headers.get(name)}
    return {name: value for name, value in given.items() if value.isascii()}


def nothing() -> Pointed:
    """What a request points at that costs nothing."""
    return NOTHING_POINTED


def free(body: bytes) -> Completion:
    """The completion of a reply that no model wrote."""
    message = Message(role="assistant", content="")
    return Completion(message, "stop", NOTHING_USED, None, None, cost_usd=0.0)


def _read_tokens(settings: ModelSettings, sent: Mapping[str, Any], body: bytes) -> Completion:
    """The reply to a relayed request that asked for token ids."""
    return with_tokens(read_reply(CHAT, body), settings, sent)
