"""The browser's only way to the network: a SOCKS proxy that checks each address it connects to.

With a SOCKS proxy, Chromium does not resolve names: it sends the name with every connection, for
pages, redirects, images and web sockets alike.
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
    """Connects one browser to addresses that a guard permits. Used in one event loop."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._failures: dict[tuple[str, int], str] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Accept connections from `listener`, which the proxy closes."""
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
        """Why the last connection to a host and port failed; None if it did not."""
        return self._failures.get((host, port))

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS:
            writer.close()
            return
        task = asyncio.create_task(self._serve_one(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Either side may close at any time; the page sees a failed connection.
        with contextlib.suppress(OSError, EOFError, TimeoutError), contextlib.closing(writer):
            async with asyncio.timeout(_CONNECT_S):
                host, port = await _read_target(reader, writer)
                try:
                    server = await self._connect(host, port)
                except _Failed as failed:
                    self._note(host, port, str(failed))
                    writer.write(_reply(_CODES[str(failed)]))
                    await writer.drain()
                    return
            self._failures.pop((host, port), None)
            writer.write(_reply(0))
            with contextlib.closing(server[1]):
                await _join((reader, writer), server)

    async def _connect(
        self, host: str, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise _Failed(_NO_ADDRESS) from None
        permitted = [info for info in addresses if self._guard.permits(host, port, str(info[4][0]))]
        if not permitted:
            raise _Failed(REFUSED)
        for family, kind, protocol, _, address in permitted:
            server = socket.socket(family, kind, protocol)
            try:
                server.setblocking(False)
                await loop.sock_connect(server, address)
                return await asyncio.open_connection(sock=server, limit=_CHUNK_BYTES)
            except OSError:
                server.close()
            except BaseException:
                server.close()
                raise
        raise _Failed(_UNREACHABLE)

    def _note(self, host: str, port: int, why: str) -> None:
        self._failures[host, port] = why
        if len(self._failures) > _MAX_FAILURES:
            del self._failures[next(iter(self._failures))]


async def _read_target(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> tuple[str, int]:
    """The host and port that a client asks for; raises `EOFError` if it does not speak SOCKS 5."""
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
    client: tuple[asyncio.StreamReader, asyncio.StreamWriter],
    server: tuple[asyncio.StreamReader, asyncio.StreamWriter],
) -> None:
    """Pass bytes both ways until one side ends."""
    directions = {
        asyncio.create_task(_pass(client[0], server[1])),
        asyncio.create_task(_pass(server[0], client[1])),
    }
    try:
        await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for direction in directions:
            direction.cancel()
        await asyncio.gather(*directions, return_exceptions=True)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK_BYTES):
        writer.write(chunk)
        await writer.drain()
