"""Opens the connections of a session, and gives out kept ones only if nothing has happened to them.

aiohttp's own connector looks only at whether it has noticed the end of a kept connection. A server
that has closed a connection a moment ago would fail the next request, and bytes that nobody asked
for, such as a 408 for an idle connection, would be read as the reply to the next request.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING
from weakref import WeakSet

import aiohttp

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.connector import Connection
    from aiohttp.tracing import Trace


class LiveConnector(aiohttp.TCPConnector):
    """A connector that replaces kept connections which have ended, or have bytes to read."""

    _used: WeakSet[ResponseHandler] | None = None
    """The connections that have been given out before."""

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        """Return a new connection, or a kept one that waits for a request.

        Raises `aiohttp.ClientError`, `OSError` and `TimeoutError`.
        """
        if self._used is None:
            self._used = WeakSet()
        while True:
            try:
                connection = await super().connect(req, traces, timeout)
            except UnicodeError as error:  # such as of a name with two dots in a row
                raise aiohttp.InvalidURL(req.url, "its host is no valid name") from error
            protocol = connection.protocol
            assert protocol is not None
            if protocol not in self._used:
                self._used.add(protocol)
                return connection
            if not protocol.should_close and not _is_readable(connection):
                return connection
            connection.close()


def _is_readable(connection: Connection) -> bool:
    """Whether bytes or the end of a connection have arrived that the event loop has not read."""
    transport = connection.transport
    sock = None if transport is None else transport.get_extra_info("socket")
    if sock is None or (number := sock.fileno()) < 0:
        return True
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))
