"""A model behind an endpoint; it sends each call once, and `retrying` decides what comes next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from agent.models.bodies.dialect import dialect_of, read_asked
from agent.models.client.key_command import RenewableKey
from agent.models.client.relayed import RelayRequest
from agent.models.client.transport import Transport
from agent.models.client.unsupported_options import OF_RELAYED, UnsupportedOptions
from agent.models.model import Completion, ModelSettings, Request


class EndpointModel:
    """Asks one model of one endpoint, in the dialect of its settings."""

    def __init__(
        self,
        settings: ModelSettings,
        api_key: str | RenewableKey,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """See `UnsupportedOptions` for `say`."""
        self._dialect = dialect_of(settings.api)
        self._refusals = UnsupportedOptions(settings, say)
        self._transport = Transport(settings, api_key)

    @property
    def settings(self) -> ModelSettings:
        """See `Adapter`."""
        return self._refusals.settings

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        has_id = bool(request.conversation)
        if isinstance(request, RelayRequest):
            relay = partial(self._relay, request)
            return await self._refusals.ask(relay, has_id=has_id, sent=OF_RELAYED)
        return await self._refusals.ask(partial(self._ask, request), has_id=has_id)

    async def _ask(self, request: Request, settings: ModelSettings) -> Completion:
        dialect = self._dialect
        assembly = None if request.on_delta is None else dialect.assembly(request.on_delta)
        body = dialect.body(settings, request)
        conversation = request.conversation
        reply = await self._transport.post(dialect.path, body, settings, assembly, conversation)
        return read_asked(settings, reply, body)

    async def _relay(self, request: RelayRequest, settings: ModelSettings) -> Completion:
        """Add what is our own, unless the endpoint refuses it: the question for token ids, and the
        id of the conversation."""
        if request.conversation and not request.has_cache_key and settings.takes_cache_key:
            request = request.with_cache_key()
        if settings.token_ids and request.asking_for_tokens is not None:
            request = replace(request, body=request.asking_for_tokens)
        return request.read(await self._transport.relay(request, settings))

    async def close(self) -> None:
        """See `Adapter.close`."""
        await self._transport.close()
