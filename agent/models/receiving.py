"""The bytes of a reply as they arrive: how many are taken in, and who hears that some came."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import cast

import httpx2

from agent.models.errors import ModelError

MAX_REPLY_BYTES = 64 * 2**20
"""Most bytes of one reply that are held, unpacked; real ones are a hundred times smaller."""

MAX_EVENT_BYTES = 8 * 2**20
"""Most bytes of a stream without an event; to look for its end takes time that grows with its
square."""


async def bound_reply(response: httpx2.Response) -> None:
    """Event hook of an HTTP client: replies end at `MAX_REPLY_BYTES`, whoever reads them.

    Reading on raises `ModelError("malformed")`. The text of an error just ends there, since its
    status tells what it is.
    """
    stream = cast(httpx2.AsyncByteStream, response.stream)
    if "content-encoding" in response.headers:
        # Unpacked here, where it is counted: a few bytes on the wire can stand for gigabytes.
        stream = _Unpacked(response)
        del response.headers["content-encoding"]
    response.stream = ReceivedBytes(stream, is_error=response.is_error)


class ReceivedBytes(httpx2.AsyncByteStream):
    """The stream of one response, counted."""

    def __init__(self, stream: httpx2.AsyncByteStream, *, is_error: bool) -> None:
        """`is_error` tells whether the response has the status of an error."""
        self._stream = stream
        self._is_error = is_error
        self._left = MAX_REPLY_BYTES
        self.on_part: Callable[[int], None] | None = None
        """Called at each arrival with the number of bytes; it may raise."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._stream:
            self._left -= len(part)
            if self._left < 0:
                if self._is_error:
                    return
                size = f"{MAX_REPLY_BYTES // 2**20} MiB"
                raise ModelError("malformed", f"the reply is larger than {size}")
            if self.on_part is not None:
                self.on_part(len(part))
            yield part

    async def aclose(self) -> None:
        await self._stream.aclose()


class _Unpacked(httpx2.AsyncByteStream):
    """The stream of one response without its content encoding."""

    def __init__(self, response: httpx2.Response) -> None:
        self._packed = httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=response.stream,
            request=response.request,
        )

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._packed.aiter_bytes()

    async def aclose(self) -> None:
        await self._packed.aclose()
