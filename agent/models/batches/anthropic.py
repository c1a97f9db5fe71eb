"""The Message Batches API of Anthropic: requests go in with the creation, replies come as lines.

These batches carry no words of ours. One whose creation was cut short is known by how many items
it has, and for certain by their ids, which can be read once it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agent.models.batches.base import BatchState, ItemResult, LostBatch, Undecided
from agent.models.batches.sdk_connection import SdkConnection, id_of
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import load_object, object_of
from batch_trajectories.basics import exact_json

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

_HEAD, _TAIL = b'{"requests":[', b"]}"

_SKEW_S = 3600
"""Maximum difference in seconds between our clock and the provider's."""


class AnthropicBatches:
    """See `Batches`."""

    max_items = 100_000
    max_bytes = 256 * 10**6

    def __init__(self, settings: ModelSettings, api_key: str) -> None:
        from anthropic import AsyncAnthropic

        self._connection = SdkConnection(settings, api_key, AsyncAnthropic)
        self._client: AsyncAnthropic = self._connection.client
        self._others: set[str] = set()
        """Batches that turned out to belong to others."""

    def line(self, id: str, body: bytes) -> bytes:
        """See `Batches`."""
        return orjson.dumps({"custom_id": id})[:-1] + b',"params":' + body + b"}\n"

    async def upload(self, items: Path) -> str:
        """See `Batches`: nothing is done before the creation."""
        return ""

    async def create(self, name: str, items: Path, upload: str) -> str:
        """See `Batches`."""
        from anthropic.types.messages import MessageBatch

        # Every newline but the last becomes a comma, so the size is known before.
        size = len(_HEAD) + items.stat().st_size - 1 + len(_TAIL)
        headers = {"Content-Type": "application/json", "Content-Length": str(size)}
        # Not `batches.create`, which holds all items in memory as objects. A retry would pay
        # twice if only the answer was lost: the caller looks for the batch.
        batch = await self._connection.ask(
            lambda: self._client.post(
                "/v1/messages/batches",
                cast_to=MessageBatch,
                content=_as_one_object(items),
                options={"headers": headers, "max_retries": 0},
            )
        )
        return id_of(batch)

    async def state(self, id: str) -> BatchState:
        """See `Batches`."""
        batch = await self._connection.ask(lambda: self._client.messages.batches.retrieve(id))
        return BatchState(batch.processing_status == "ended")

    async def results(self, id: str) -> AsyncIterator[ItemResult]:
        """See `Batches`."""
        download = partial(self._client.messages.batches.results, id)
        async for line in self._connection.lines(download):
            yield _read_result(load_object(line))

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """See `Batches`."""
        is_decided = True
        for id, size, is_over in await self._connection.ask(partial(self._since, lost.sent_at)):
            if id in known or id in self._others or size != len(lost.ids):
                continue
            if not is_over:
                is_decided = False
            elif await self._is_of(id, lost):
                return id
        if not is_decided:
            raise Undecided
        return None

    async def withdraw(self, upload: str) -> None:
        """See `Batches`: it cannot be done here."""

    async def close(self) -> None:
        """See `Batches`."""
        await self._client.close()

    async def _since(self, moment: float) -> list[tuple[str, int, bool]]:
        """Id and size of the batches created since, newest first, and whether they are over."""
        batches = []
        async for batch in self._client.messages.batches.list(limit=100):
            # One without a readable time may be of any time.
            at: Any = batch.created_at
            if isinstance(at, datetime) and at.timestamp() < moment - _SKEW_S:
                break
            request_counts: Any = batch.request_counts
            counts = [n for _, n in request_counts or () if isinstance(n, int)]
            batches.append((id_of(batch), sum(counts), batch.processing_status == "ended"))
        return batches

    async def _is_of(self, id: str, lost: LostBatch) -> bool:
        try:
            async for result in self.results(id):
                if result.id in lost.ids:
                    return True
                break
        except ModelError as error:
            if error.kind != "not_found":  # deleted, or canceled before it began
                raise
        self._others.add(id)
        return False


async def _as_one_object(items: Path) -> AsyncIterator[bytes]:
    """A file of lines as the body of a creation, in parts."""
    yield _HEAD
    held = b""
    with items.open("rb") as file:
        while part := await asyncio.to_thread(file.read, 2**20):
            yield held
            # A request has no other newlines: those in texts are escaped.
            held = part.replace(b"\n", b",")
    yield held[:-1]
    yield _TAIL


def _read_result(line: Mapping[str, Any]) -> ItemResult:
    id = str(line.get("custom_id"))
    result = object_of(line, "result")
    message = result.get("message")
    if result.get("type") == "succeeded" and isinstance(message, dict):
        return ItemResult(id, exact_json.dumps(message))
    error = object_of(object_of(result, "error"), "error")
    reason = f"{error.get('type')}: {error.get('message')}" if error else ""
    return ItemResult(id, None, reason or str(result.get("type")))
