"""The Message Batches API of Anthropic: the creation contains the requests, replies come as lines.

These batches carry no metadata of ours. A lost batch is recognized by its number of items, and for
certain by their ids, which can be read once it is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from agent.models.batches.base import BatchState, ItemResult, LostBatch, Undecided
from agent.models.batches.sdk_connection import SdkConnection, read_id
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import get_object, load_object
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
        """Ids of batches that turned out to be other ones."""

    def line(self, id: str, body: bytes) -> bytes:
        """See `Batches`."""
        return orjson.dumps({"custom_id": id})[:-1] + b',"params":' + body + b"}\n"

    async def upload(self, items: Path) -> str:
        """See `Batches`: this API has no such step."""
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
                content=_join_items(items),
                options={"headers": headers, "max_retries": 0},
            )
        )
        return read_id(batch)

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
        for batch in await self._connection.ask(partial(self._list_since, lost.sent_at)):
            if batch.id in known or batch.id in self._others or batch.size != len(lost.ids):
                continue
            if not batch.is_over:
                is_decided = False
            elif await self._has_items(batch.id, lost):
                return batch.id
        if not is_decided:
            raise Undecided
        return None

    async def withdraw(self, upload: str) -> None:
        """See `Batches`: this API cannot do it."""

    async def close(self) -> None:
        """See `Batches`."""
        await self._client.close()

    async def _list_since(self, moment: float) -> list[_ListedBatch]:
        """List the batches created since `moment` (epoch seconds), the newest first."""
        batches = []
        async for batch in self._client.messages.batches.list(limit=100):
            # A batch without a readable time may have been created at any time.
            at: Any = batch.created_at
            if isinstance(at, datetime) and at.timestamp() < moment - _SKEW_S:
                break
            request_counts: Any = batch.request_counts
            counts = [n for _, n in request_counts or () if isinstance(n, int)]
            is_over = batch.processing_status == "ended"
            batches.append(_ListedBatch(id=read_id(batch), size=sum(counts), is_over=is_over))
        return batches

    async def _has_items(self, id: str, lost: LostBatch) -> bool:
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


class _ListedBatch(NamedTuple):
    """A batch in the provider's list; `size` is its number of items."""

    id: str
    size: int
    is_over: bool


async def _join_items(items: Path) -> AsyncIterator[bytes]:
    """Join the lines of a file to the body of a creation, in parts."""
    yield _HEAD
    buffered = b""
    with items.open("rb") as file:
        while part := await asyncio.to_thread(file.read, 2**20):
            yield buffered
            # A request has no other newlines, since they are escaped in texts.
            buffered = part.replace(b"\n", b",")
    yield buffered[:-1]
    yield _TAIL


def _read_result(line: Mapping[str, Any]) -> ItemResult:
    id = str(line.get("custom_id"))
    result = get_object(line, "result")
    message = result.get("message")
    if result.get("type") == "succeeded" and isinstance(message, dict):
        return ItemResult(id, exact_json.dumps(message))
    error = get_object(get_object(result, "error"), "error")
    reason = f"{error.get('type')}: {error.get('message')}" if error else ""
    return ItemResult(id, None, reason or str(result.get("type")))
