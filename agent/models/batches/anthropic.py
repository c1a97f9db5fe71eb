"""The Message Batches API of Anthropic: requests go in with the creation, replies come as lines.

These batches carry no words of ours. One whose creation was cut short is known by how many items
it has, and for certain by their ids, which can be read once it is over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from agent.models.batches.base import BatchState, ItemResult, LostBatch, Undecided
from agent.models.batches.transfer import get_lines, get_object, id_of, read_file
from agent.models.client.transport import Transport
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import load_object, object_of
from toolsets import exact_json

_PATH = "/v1/messages/batches"

_HEAD, _TAIL = b'{"requests":[', b"]}"

_SKEW_S = 3600
"""How much the clocks here and there may differ."""


class AnthropicBatches:
    """See `Batches`."""

    max_items = 100_000
    max_bytes = 256 * 10**6

    def __init__(self, settings: ModelSettings, api_key: str) -> None:
        self._silence_s = settings.attempt_timeout_s
        self._transport = Transport(settings, api_key)
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
        # Every newline but the last becomes a comma, so the size is known before.
        size = len(_HEAD) + items.stat().st_size - 1 + len(_TAIL)
        exchange = self._transport.exchange(
            "POST",
            _PATH,
            silence_s=self._silence_s,
            body=_as_one_object(items),
            headers={"Content-Length": str(size)},
        )
        async with exchange as response:
            return id_of(load_object(self._transport.clean(await response.read())))

    async def state(self, id: str) -> BatchState:
        """See `Batches`."""
        batch = await self._get(f"{_PATH}/{id}")
        return BatchState(batch.get("processing_status") == "ended")

    async def results(self, id: str) -> AsyncIterator[ItemResult]:
        """See `Batches`."""
        path = f"{_PATH}/{id}/results"
        async for line in get_lines(self._transport, path, self._silence_s):
            yield _read_result(load_object(line))

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """See `Batches`."""
        is_decided = True
        async for batch in self._since(lost.sent_at - _SKEW_S):
            id = id_of(batch)
            counts = [n for n in object_of(batch, "request_counts").values() if isinstance(n, int)]
            if id in known or id in self._others or sum(counts) != len(lost.ids):
                continue
            if batch.get("processing_status") != "ended":
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
        await self._transport.close()

    async def _since(self, moment: float) -> AsyncIterator[dict[str, Any]]:
        """The batches created since, the newest first."""
        after = ""
        while True:
            page = await self._get(f"{_PATH}?limit=100{after}")
            batches = page.get("data")
            for batch in batches if isinstance(batches, list) else ():
                if _epoch(batch.get("created_at")) < moment:
                    return
                yield batch
            if not page.get("has_more"):
                return
            after = f"&after_id={page.get('last_id')}"

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

    async def _get(self, path: str) -> dict[str, Any]:
        return await get_object(self._transport, path, self._silence_s)


async def _as_one_object(items: Path) -> AsyncIterator[bytes]:
    """A file of lines as the body of a creation, in parts."""
    yield _HEAD
    held = b""
    async for part in read_file(items):
        yield held
        # A request has no other newlines: those in texts are escaped.
        held = part.replace(b"\n", b",")
    yield held[:-1]
    yield _TAIL


def _epoch(moment: Any) -> float:
    """Epoch seconds of an RFC 3339 text; the future where it is none: then it may be any time."""
    try:
        return datetime.fromisoformat(str(moment)).timestamp()
    except ValueError:
        return float("inf")


def _read_result(line: Mapping[str, Any]) -> ItemResult:
    id = str(line.get("custom_id"))
    result = object_of(line, "result")
    message = result.get("message")
    if result.get("type") == "succeeded" and isinstance(message, dict):
        return ItemResult(id, exact_json.dumps(message))
    error = object_of(object_of(result, "error"), "error")
    words = f"{error.get('type')}: {error.get('message')}" if error else ""
    return ItemResult(id, None, words or str(result.get("type")))
