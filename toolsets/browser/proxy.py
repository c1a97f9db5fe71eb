"""The only way out of the browser: a SOCKS proxy that judges each address as it connects to it.

Chromium resolves no names itself while it has such a proxy: it sends them here with every
connection, be it for a page, a redirect, an image or a web socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from toolsets.net.guard import Guard

REFUSED = "refused, because its host is not at a public address"
_NO_ADDRESS = "its host has no known address"
_UNREACHABLE = "cannot connect to its host"

_CONNECT_S = 20.0
_CHUNK_BYTES = 64 * 1024
_MAX_CONNECTIONS = 512
_MAX_FAILURES = 1000
_IPV4, _NAME, _IPV6 = 1, 3, 4  # RFC 1928
_CODES = {REFUSED: 2, _NO_ADDRESS: 4, _UNREACHABLE: 5}


class _Failed(Exception):
    """No connection was made; the message says why."""


class Proxy:
    """Connects one browser to what a guard permits. Used in one event loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._failures: dict[tuple[str, int], str] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Take connections from `listener`, which belongs to the proxy from now on."""
        self._server = await asyncio.start_server(self._accept, sock=listener, limit=_CHUNK_BYTES)

    async def close(self) -> None:
        """End all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def failure(self, host: str, port: int) -> str | None:
        """Why the last connection to a place was not made; None where it was."""
        return self._failures.get((host, port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve_one(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Both sides hang up as they like; whatever is wrong with that is the page's trouble.
        with contextlib.suppress(OSError, EOFError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECT_S):
                host, port = await _asked_for(reader, writer)
                try:
                    ahead = await self._connect(host, port)
                except _Failed as failed:
                    self._note(host, port, str(failed))
                    writer.write(_reply(_CODES[str(failed)]))
                    await writer.drain()
                    return
            self._failures.pop((host, port), None)
            writer.write(_reply(0))
            with contextlib.closing(ahead[1]):
                await _join((reader, writer), ahead)

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _Failed(_NO_ADDRESS) from None
        permitted = [one for one in found if self._guard.permits(host, port, str(one[4][0]))]
        if not permitted:
            raise _Failed(REFUSED)
        for family, kind, protocol, _, address in permitted:
            ahead = socket.socket(family, kind, protocol)
            try:
                ahead.setblocking(False)
                await loop.sock_connect(ahead, address)
                return await asyncio.open_connection(sock=ahead, limit=_CHUNK_BYTES)
            except OSError:
                ahead.close()
            except BaseException:
                ahead.close()
                raise
        raise _Failed(_UNREACHABLE)

    def _note(self, host: str, port: int, why: str) -> None:
        self._failures[host, port] = why
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]


async def _asked_for(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> tuple[str, int]:
    """The host and port that a client wants; `EOFError` where it speaks something else."""
    version, methods = await reader.readexactly(2)
    await reader.readexactly(methods)
    if version != 5:
        raise EOFError
    writer.write(b"\x05\x00")
    version, command, _, kind = await reader.readexactly(4)
    if version != 5 or command != 1:
        raise EOFError
    if kind == _NAME:
        (length,) = await reader.readexactly(1)
        host = (await reader.readexactly(length)).decode("ascii", "replace")
    elif kind in (_IPV4, _IPV6):
        packed = await reader.readexactly(4 if kind == _IPV4 else 16)
        host = socket.inet_ntop(socket.AF_INET if kind == _IPV4 else socket.AF_INET6, packed)
    else:
        raise EOFError
    (port,) = struct.unpack("!H", await reader.readexactly(2))
    return host.lower(), port


def _reply(code: int) -> bytes:
    return bytes((5, code, 0, _IPV4)) + bytes(6)


async def _join(
    near: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    far: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass bytes both ways until one side ends."""
    ways = {
        asyncio.create_task(_pass(near[0], far[1])),
        asyncio.create_task(_pass(far[0], near[1])),
    }
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
