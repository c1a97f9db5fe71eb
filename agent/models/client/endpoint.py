"""A model behind an endpoint; it sends each call once, and `retrying` decides what comes next."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from agent.models.bodies.dialect import dialect_of, read_asked
from agent.models.client.key_command import RenewableKey
from agent.models.client.relayed import RelayRequest
from agent.models.client.transport import Transport
from agent.models.client.unsupported_options import OF_RELAYED, UnsupportedOptions
from agent.models.connection import Share
from agent.models.errors import ModelError
from agent.models.model import Completion, ModelSettings, Request

if TYPE_CHECKING:
    from agent.models.client.fleet import Fleet


class EndpointModel:
    """Asks one model of one endpoint, in the dialect of its settings."""

    def __init__(
        self,
        settings: ModelSettings,
        api_key: str | RenewableKey,
        say: Callable[[str], None] | None = None,
        share: Share | None = None,
        fleets: MutableMapping[str, Fleet] | None = None,
    ) -> None:
        """See `open_model` for `say`, `share` and `fleets`."""
        self._dialect = dialect_of(settings.api)
        self._refusals = UnsupportedOptions(settings, say)
        self._fleet: Fleet | None = None
        at_each = (replace(settings, base_url=url) for url in settings.urls)
        self._transports = [Transport(one, api_key) for one in at_each]
        if (replication := settings.connection.replication) is not None:
            from agent.models.client.fleet import Fleet  # most endpoints have one URL

            known = {} if fleets is None else fleets
            if settings.endpoint not in known:
                known[settings.endpoint] = Fleet(replication, self._transports, share or Share())
            self._fleet = known[settings.endpoint]

    @property
    def settings(self) -> ModelSettings:
        """See `Adapter`."""
        return self._refusals.settings

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        if self._fleet is None:
            return await self._complete(request, self._transports[0])
        unreached = set[int]()
        while True:
            try:
                async with self._fleet.replica_for(request, unreached) as number:
                    return await self._complete(request, self._transports[number])
            except ModelError as error:
                # Nothing was sent, so another replica can be asked in the same attempt.
                if not unreached or error.kind != "connection" or not error.is_by_load:
                    raise
                if len(unreached) == self._fleet.size:
                    raise

    async def _complete(self, request: Request, transport: Transport) -> Completion:
        has_id = bool(request.conversation)
        if isinstance(request, RelayRequest):
            relay = partial(self._relay, request, transport)
            return await self._refusals.ask(relay, has_id=has_id, sent=OF_RELAYED)
        ask = partial(self._ask, request, transport)
        return await self._refusals.ask(ask, has_id=has_id)

    async def _ask(
        self, request: Request, transport: Transport, settings: ModelSettings
    ) -> Completion:
        dialect = self._dialect
        assembly = None if request.on_delta is None else dialect.assembly(request.on_delta)
        body = dialect.body(settings, request)
        conversation = request.conversation
        reply = await transport.post(dialect.path, body, settings, assembly, conversation)
        return read_asked(settings, reply, body)

    async def _relay(
        self, request: RelayRequest, transport: Transport, settings: ModelSettings
    ) -> Completion:
        """Add what is our own, unless the endpoint refuses it: the question for token ids, and the
        id of the conversation."""
        if request.conversation and not request.has_cache_key and settings.takes_cache_key:
            request = request.with_cache_key()
        if settings.token_ids and request.asking_for_tokens is not None:
            request = replace(request, body=request.asking_for_tokens)
        return request.read(await transport.relay(request, settings))

    async def close(self) -> None:
        """See `Adapter.close`."""
        if self._fleet is not None:
            await self._fleet.close()
        for transport in self._transports:
            await transport.close()
