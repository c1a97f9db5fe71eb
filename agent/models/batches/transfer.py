"""What both providers' batches need of the transport: objects, long files of lines, and uploads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from agent.models.client.transport import MAX_REPLY_BYTES, Transport
from agent.models.errors import ModelError
from agent.models.parsing import load_object


async def get_object(transport: Transport, path: str, silence_s: float) -> dict[str, Any]:
    """GET one JSON object."""
    async with transport.exchange("GET", path, silence_s=silence_s) as response:
        return load_object(transport.clean(await response.read()))


async def get_lines(transport: Transport, path: str, silence_s: float) -> AsyncIterator[bytes]:
    """GET the lines of a file that need not fit into memory; blank ones are passed over."""
    headers = {"Accept": "application/binary"}  # for a file, as the clients of both APIs say it
    async with transport.exchange("GET", path, silence_s=silence_s, headers=headers) as response:
        rest = bytearray()
        async for part in response.content.iter_any():
            rest += part
            if b"\n" not in part:
                if len(rest) > MAX_REPLY_BYTES:
                    words = f"a line of more than {MAX_REPLY_BYTES // 2**20} MiB in the results"
                    raise ModelError("malformed", words)
                continue
            *lines, last = rest.split(b"\n")
            rest = bytearray(last)
            for line in lines:
                if line.strip():
                    yield transport.clean(bytes(line))
        if rest.strip():
            yield transport.clean(bytes(rest))


async def read_file(path: Path) -> AsyncIterator[bytes]:
    """The content of a file in parts, read beside the event loop."""
    with path.open("rb") as file:
        while part := await asyncio.to_thread(file.read, 2**20):
            yield part


def id_of(given: Mapping[str, Any]) -> str:
    """The id in a reply; raises `ModelError("malformed")` where it has none."""
    id = given.get("id")
    if not isinstance(id, str) or not id:
        raise ModelError("malformed", "the reply has no id")
    return id
