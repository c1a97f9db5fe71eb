"""A dialect: how an API has its requests written and its replies read; all of them by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, get_args

from agent.messages.message import Message, Usage
from agent.models.bodies.assembly import Assembly
from agent.models.error_bodies import error_behind_200, find_error, quote
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request
from agent.models.parsing import load_object, text_or_none
from agent.models.providers import ONLY_RELAYED, Api
from agent.models.stream_events import StreamHandler
from agent.models.usage import hour_writes_in, reported_cost


class Dialect(NamedTuple):
    """Requests and replies of one API."""

    path: str
    """Of a request, below the root of the endpoint."""
    headers: Callable[[ModelSettings, str], dict[str, str]]
    """Of every request, with the key in them."""
    body: Callable[[ModelSettings, Request], dict[str, Any]]
    """Of one request, to be sent as JSON."""
    read: Callable[[bytes], Completion]
    """Reads the body of a reply; raises `ModelError`."""
    usage: Callable[[Mapping[str, Any]], Usage | None]
    """The token counts in such a body, even if other parts of it are wrong."""
    assembly: Callable[[StreamHandler], Assembly]
    """Puts a streamed reply together, and passes its parts to the handler."""


RELAYED = get_args(Api)
"""All dialects, by their names in `ModelSettings.api`."""

DIALECTS = tuple(api for api in RELAYED if api not in ONLY_RELAYED)
"""The dialects of our own requests."""


@cache
def dialect_of(api: str) -> Dialect:
    """The dialect that `ModelSettings.api` names; its module is imported by the first call."""
    if api not in RELAYED:
        raise ValueError(f"no such API: {api!r}")
    dialect = import_module(f"agent.models.dialects.{api}").DIALECT
    assert isinstance(dialect, Dialect)
    return dialect


def read_asked(
    settings: ModelSettings, body: bytes, request: Mapping[str, Any] | None = None
) -> Completion:
    """The reply to a request of ours; see `read_reply`. `request` is its body, if at hand."""
    completion = read_reply(settings.api, body)
    if not settings.token_ids:
        return completion
    from agent.models.bodies.token_ids import with_tokens

    return with_tokens(completion, settings, request)


def read_reply(api: str, body: bytes) -> Completion:
    """What the body of a reply says in the dialect `api`.

    Raises `ModelError`, which has what was charged for the reply where the body says that.
    """
    dialect = dialect_of(api)
    try:
        return dialect.read(body)
    except ModelError as error:
        if error.kind == "malformed":
            error = _explained(error, body)
        with suppress(ModelError):
            reply = load_object(body)
            error.paid = _paid(dialect, reply)
            error.had_begun = error.kind == "overloaded" or any(map(reply.get, _OUTPUTS))
        raise error from None


def _explained(error: ModelError, body: bytes) -> ModelError:
    """The error that the body itself reports, else the error with a quote of the body."""
    try:
        reply = load_object(body)
    except ModelError:
        return error  # it has the quote already
    if reply.get("error"):
        return error  # it is that error
    if (reported := find_error(reply)) is not None:
        return error_behind_200(reported, "a 200 reply")
    return ModelError("malformed", f"{error}: {quote(body)}")


_OUTPUTS = ("choices", "content", "output", "candidates")
"""Where the APIs have what a model has written."""


def _paid(dialect: Dialect, reply: Mapping[str, Any]) -> Completion | None:
    """The reply without its text, None if its body has no token counts."""
    usage = dialect.usage(reply)
    if usage is None or not (usage["input_tokens"] or usage["output_tokens"]):
        return None
    return Completion(
        message=Message(role="assistant", content=""),
        finish_reason="stop",
        usage=usage,
        model=text_or_none(reply.get("model") or reply.get("modelVersion")),
        response_id=text_or_none(reply.get("id") or reply.get("responseId")),
        cost_usd=reported_cost(reply),
        hour_cache_writes=hour_writes_in(reply, usage),
    )
