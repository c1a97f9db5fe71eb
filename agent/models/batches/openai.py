"""The Batch API of OpenAI: a file of requests is uploaded, and files of replies are fetched.

A batch carries metadata, by which one is found again whose creation was cut short; and it is made
from an uploaded file, so that deleting the file keeps a late creation from succeeding.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from agent.models.batches.base import BatchState, ItemResult, LostBatch
from agent.models.batches.transfer import get_lines, get_object, id_of
from agent.models.client.transport import Transport
from agent.models.dialects.registry import DIALECTS
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.parsing import load_object, object_of
from toolsets import exact_json

_OVER = frozenset({"completed", "failed", "expired", "cancelled"})

_NO_ROOM = frozenset({"token_limit_exceeded", "request_limit_exceeded"})
"""Codes of batches that were refused because too much is queued already."""

_SKEW_S = 3600
"""How much the clocks here and there may differ."""

_NAME = "wave"
"""The metadata under which a batch has our name for it."""


class OpenAIBatches:
    """See `Batches`."""

    max_items = 50_000
    max_bytes = 200 * 10**6

    def __init__(self, settings: ModelSettings, api_key: str) -> None:
        self._path = "/v1" + DIALECTS[settings.api].path
        self._silence_s = settings.attempt_timeout_s
        self._transport = Transport(settings, api_key)

    def line(self, id: str, body: bytes) -> bytes:
        """See `Batches`."""
        head = {"custom_id": id, "method": "POST", "url": self._path}
        return orjson.dumps(head)[:-1] + b',"body":' + body + b"}\n"

    async def upload(self, items: Path) -> str:
        """See `Batches`."""
        with items.open("rb") as file, aiohttp.MultipartWriter("form-data") as form:
            form.append("batch").set_content_disposition("form-data", name="purpose")
            form.append(file, {"Content-Type": "application/jsonl"}).set_content_disposition(
                "form-data", name="file", filename=items.name
            )
            headers = {"Content-Type": form.headers["Content-Type"]}
            return id_of(await self._send("POST", "/files", form, headers))

    async def create(self, name: str, items: Path, upload: str) -> str:
        """See `Batches`."""
        body = {
            "input_file_id": upload,
            "endpoint": self._path,
            "completion_window": "24h",
            "metadata": {_NAME: name},
        }
        return id_of(await self._send("POST", "/batches", orjson.dumps(body)))

    async def state(self, id: str) -> BatchState:
        """See `Batches`."""
        batch = await self._get(f"/batches/{id}")
        is_over = batch.get("status") in _OVER
        if batch.get("status") != "failed":
            return BatchState(is_over)
        errors = object_of(batch, "errors").get("data")
        first = errors[0] if isinstance(errors, list) and errors else {}
        words = f"{first.get('code')}: {first.get('message')}"
        return BatchState(is_over, words, first.get("code") in _NO_ROOM)

    async def results(self, id: str) -> AsyncIterator[ItemResult]:
        """See `Batches`."""
        batch = await self._get(f"/batches/{id}")
        for name in ("output_file_id", "error_file_id"):
            if isinstance(file := batch.get(name), str):
                path = f"/files/{file}/content"
                async for line in get_lines(self._transport, path, self._silence_s):
                    yield _read_result(load_object(line))

    async def find(self, lost: LostBatch, known: Collection[str]) -> str | None:
        """See `Batches`."""
        after = ""
        while True:
            page = await self._get(f"/batches?limit=100{after}")
            batches = page.get("data")
            for batch in batches if isinstance(batches, list) else ():
                if object_of(batch, "metadata").get(_NAME) == lost.name:
                    return id_of(batch)
            oldest = batches[-1] if isinstance(batches, list) and batches else {}
            is_past = float(oldest.get("created_at") or 0) < lost.sent_at - _SKEW_S
            if is_past or not page.get("has_more"):
                return None
            after = f"&after={id_of(oldest)}"

    async def withdraw(self, upload: str) -> None:
        """See `Batches`: without its file no batch can be made."""
        with contextlib.suppress(_Gone):
            await self._send("DELETE", f"/files/{upload}")

    async def close(self) -> None:
        """See `Batches`."""
        await self._transport.close()

    async def _get(self, path: str) -> dict[str, Any]:
        return await get_object(self._transport, path, self._silence_s)

    async def _send(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        exchange = self._transport.exchange(
            method, path, silence_s=self._silence_s, body=body, headers=headers
        )
        try:
            async with exchange as response:
                return load_object(self._transport.clean(await response.read()))
        except ModelError as error:
            if error.kind == "not_found" and method == "DELETE":
                raise _Gone from error
            raise


class _Gone(Exception):
    """What was to be deleted is not there."""


def _read_result(line: Mapping[str, Any]) -> ItemResult:
    """A line of an output file or of an error file."""
    id = str(line.get("custom_id"))
    response = object_of(line, "response")
    body = response.get("body")
    if response.get("status_code") == 200 and isinstance(body, dict):
        return ItemResult(id, exact_json.dumps(body))
    error = object_of(line, "error") or object_of(object_of(response, "body"), "error")
    why = f"{error.get('code') or response.get('status_code')}: {error.get('message')}"
    return ItemResult(id, None, why)
