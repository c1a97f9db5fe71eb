"""Batch calls in the dialect of their model: makes the bodies of requests, and reads replies."""

from __future__ import annotations

from agent.models.batches.base import Batches
from agent.models.dialects.dialect import get_dialect, read_own_reply
from agent.models.model import Completion, ModelSettings, Request
from agent.models.providers import NO_KEY, find_provider
from agent.models.resolve import SCRIPTED
from batch_trajectories.basics import exact_json


def has_batches(settings: ModelSettings) -> bool:
    """Whether a model's endpoint has batches; an endpoint that the table lacks may still have none.

    Raises `UnusableClient` if the client of the endpoint cannot be made.
    """
    connection = settings.connection
    if connection.replication is not None:
        return False  # a batch belongs to one server
    if connection.client is not None:
        from agent.models.sdk_clients import is_async, is_cloud_client, open_client

        # The batches of clouds cannot be used; the user's own client must be asynchronous.
        client = open_client(connection, settings.name, settings.key_env or NO_KEY)
        return is_async(client) and not is_cloud_client(connection)
    if settings.api == SCRIPTED:
        return False
    known = find_provider(settings.base_url or "")
    return known is None or known.has_batches


def open_batches(settings: ModelSettings, *, api_key: str) -> Batches:
    """Open the batches of a model in the running event loop."""
    if settings.api == "anthropic_messages":
        from agent.models.batches.anthropic import AnthropicBatches

        return AnthropicBatches(settings, api_key)
    from agent.models.batches.openai import OpenAIBatches

    return OpenAIBatches(settings, api_key)


def live_body(request: Request, settings: ModelSettings) -> bytes:
    """The body that a live call would send, without a request for a stream."""
    body = get_dialect(settings.api).body(settings, request)
    body.pop("stream", None)  # batches have no streams, and may refuse the word
    return exact_json.dumps(body)


def read_reply(body: bytes, settings: ModelSettings) -> Completion:
    """Read the reply in the body of an item's result, without its price. Raises `ModelError`."""
    return read_own_reply(settings, body)
