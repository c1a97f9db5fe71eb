"""The Batch API of OpenAI: a file of requests is uploaded, and files of replies are fetched.

A lost batch is found again by metadata that it carries. A batch is made from an uploaded file, so
deleting the file makes a late creation fail.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from agent.models.batches.base import BatchState, ItemResult, LostBatch
from agent.models.batches.sdk_connection import SdkConnection, read_id
from agent.models.dialects.dialect import get_dialect
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import get_object, load_object
from batch_trajectories.basics import exact_json

if TYPE_CHECKING:
    from openai import AsyncOpenAI

_OVER = frozenset({"completed", "failed", "expired", "cancelled"})
"""Statuses of batches that are over."""

_NO_ROOM = frozenset({"token_limit_exceeded", "request_limit_exceeded"})
"""Codes of batches that were refused because too much is queued already."""

_SKEW_S = 3600
"""Maximum difference in seconds between our clock and the provider's."""

_NAME = "wave"
"""The metadata key for our name of a batch."""


class OpenAIBatches:
    """See `Batches`."""

    max_items = 50_000
    max_bytes = 200 * 10**6

    def __init__(self, settings: ModelSettings, api_key: str) -> None:
        from openai import AsyncOpenAI

        self._path: Any = "/v1" + get_dialect(settings.api).path
        self._connection = SdkConnection(settings, api_key, AsyncOpenAI)
        self._client: AsyncOpenAI = self._connection.client

    def line(self, id: str, body: bytes) -> bytes:
        """See `Batches`."""
        head = {"custom_id": id, "method": "POST", "url": self._path}
        return orjson.dumps(head)[:-1] + b',"body":' + body + b"}\n"

    async def upload(self, items: Path) -> str:
        """See `Batches`."""
        with items.open("rb") as file:
            # As a file and not as a path, which the package would read into memory.
            given = (items.name, file, "application/jsonl")
            create = partial(self._client.files.create, file=given, purpose="batch")
            return read_id(await self._connection.ask(create))

    async def create(self, name: str, items: Path, upload: str) -> str:
        """See `Batches`."""
        # A retry would pay twice if only the answer was lost: the caller looks for the batch.
        create = partial(
            self._client.with_options(max_retries=0).batches.create,
            input_file_id=upload,
            endpoint=self._path,
            completion_window="24h",
            metadata={_NAME: name},
        )
        return read_id(await self._connection.ask(create))

    async def state(self, id: str) -> BatchState:
        """See `Batches`."""
        batch = await self._connection.ask(lambda: self._client.batches.retrieve(id))
        is_over = batch.status in _OVER
        if batch.status != "failed":
            return BatchState(is_over)
        errors = getattr(batch.errors, "data", None)
        first = errors[0] if isinstance(errors, list) and errors else None
        code = getattr(first, "code", None)
        message = f"{code}: {getattr(first, 'message', None)}"
        return BatchState(is_over, message, code in _NO_ROOM)

    async def results(self, id: str) -> AsyncIterator[ItemResult]:
        """See `Batches`."""
        batch = await self._connection.ask(lambda: self._client.batches.retrieve(id))
        for file in filter(None, (batch.output_file_id, batch.error_file_id)):
            async for line in self._lines(file):
                yield _read_result(load_object(line))

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """See `Batches`."""

        async def search() -> str | None:
            async for batch in self._client.batches.list(limit=100):
                if (batch.metadata or {}).get(_NAME) == lost.name:
                    return read_id(batch)
                if (batch.created_at or 0) < lost.sent_at - _SKEW_S:
                    break
            return None

        return await self._connection.ask(search)

    async def withdraw(self, upload: str) -> None:
        """See `Batches`: without its file a batch cannot be created."""
        try:
            await self._connection.ask(lambda: self._client.files.delete(upload))
        except ModelError as error:
            if error.kind != "not_found":  # deleted already
                raise

    async def close(self) -> None:
        """See `Batches`."""
        await self._client.close()

    async def _lines(self, file: str) -> AsyncIterator[bytes]:
        content = self._client.files.with_streaming_response.content
        async with AsyncExitStack() as stack:
            async for line in self._connection.lines(
                lambda: stack.enter_async_context(content(file))
            ):
                yield line


def _read_result(line: Mapping[str, Any]) -> ItemResult:
    """Read a line of an output file or of an error file."""
    id = str(line.get("custom_id"))
    response = get_object(line, "response")
    body = response.get("body")
    if response.get("status_code") == 200 and isinstance(body, dict):
        return ItemResult(id, exact_json.dumps(body))
    error = get_object(line, "error") or get_object(get_object(response, "body"), "error")
    why = f"{error.get('code') or response.get('status_code')}: {error.get('message')}"
    return ItemResult(id, None, why)
