"""Sends POST requests on aiohttp's connections, without the objects that aiohttp makes per request.

A `ClientSession` makes a request, its payload, a writer, a task and a response for each call, which
takes as long as all that this program does for a call. Here the head of a request is encoded once
for all requests to a URL, and head and body are one write. aiohttp's connector still opens, keeps
and closes the connections, with TLS, and its parser reads the responses: their heads, lengths,
chunks and compression. `DirectRequests` says which requests are left to the session.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, Protocol

import aiohttp
from aiohttp.http import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

if TYPE_CHECKING:
    from aiohttp.connector import Connection
    from multidict import CIMultiDictProxy

_KNOWN_VERSION = "3.14."
"""The versions of aiohttp whose connections are used directly; others may name things otherwise."""

_UNUSUAL = frozenset(
    {
        "connection",
        "content-encoding",
        "content-length",
        "cookie",
        "expect",
        "host",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers of a request that change how its body is sent, or how its connection is used."""

_FORBIDDEN = re.compile("[\x00-\x08\x0a-\x1f\x7f]")
"""Characters that no header may have; aiohttp forbids the same ones."""

_JOINED_BYTES = 64 << 10
"""Maximum bytes of a body that is copied behind its head, so that both are one write."""


class Response(Protocol):
    """The parts of a response that a call reads; responses of aiohttp have them, too."""

    @property
    def status(self) -> int:
        """The status code."""
        ...

    @property
    def reason(self) -> str | None:
        """The text beside the status code."""
        ...

    @property
    def headers(self) -> CIMultiDictProxy[str]:
        """The headers."""
        ...

    @property
    def content(self) -> aiohttp.StreamReader:
        """The body, without its chunks and compression."""
        ...


class DirectResponse(NamedTuple):
    """A response whose body may still arrive."""

    status: int
    reason: str | None
    headers: CIMultiDictProxy[str]
    content: aiohttp.StreamReader


class _Target(NamedTuple):
    """The URL and the head that all requests with the same headers share."""

    request: aiohttp.ClientRequest
    """Says to the connector where to connect; it is never sent itself."""
    head: bytes
    """The head of a request up to the length of its body."""
    taken: frozenset[str]
    """The lower-case names of headers that a single request cannot add."""


class DirectRequests:
    """The requests of one session that it need not send itself. Needs a running event loop."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        *,
        timeout: aiohttp.ClientTimeout,
        max_header_bytes: int,
    ) -> None:
        """Share the connections of `session`, which must use no proxy and has to be closed.

        `timeout` is that of the session, and `max_header_bytes` the maximum length of one line of
        a response's head.
        """
        assert session.connector is not None
        self.connector = session.connector
        self.timeout = timeout
        self.max_header_bytes = max_header_bytes
        self._session = session
        self._find_target = lru_cache(maxsize=16)(self._make_target)

    def post(
        self, url: URL, headers: Mapping[str, str], added: Mapping[str, str], body: bytes
    ) -> DirectPost | None:
        """Prepare a POST request with `headers` and the headers `added`, to be entered.

        None: the session must send it, as a header changes how the body is sent, a header is added
        that `headers` has, the URL is no usual one, or this version of aiohttp is not known.
        """
        target = self._find_target(url, tuple(headers.items()))
        if target is None or not target.taken.isdisjoint(map(str.lower, added)):
            return None
        lines = _encode_headers(added)
        head = b"%b%bContent-Length: %d\r\n\r\n" % (target.head, lines, len(body))
        return DirectPost(self, target.request, head, body)

    def _make_target(self, url: URL, headers: tuple[tuple[str, str], ...]) -> _Target | None:
        if not aiohttp.__version__.startswith(_KNOWN_VERSION) or url.user or url.password:
            return None
        # The session has the errors of URLs that cannot be asked.
        if url.scheme not in ("http", "https") or not url.raw_host:
            return None
        if any(name.lower() in _UNUSUAL for name, _ in headers):
            return None
        given = CIMultiDict[str]()
        for name, value in headers:
            given[name] = value  # as in a session, the last one counts
        # It knows the headers that aiohttp adds, such as Accept-Encoding.
        request = aiohttp.ClientRequest(
            "POST", url, headers=given, loop=asyncio.get_running_loop(), session=self._session
        )
        request.headers.pop("Content-Length", None)
        request.headers.setdefault("Content-Type", "application/octet-stream")
        lines = _encode_headers(request.headers)
        path = request.url.raw_path_qs
        if _FORBIDDEN.search(path) is not None:
            raise ValueError(f"the URL {str(url)!r} has a control character, such as a line break")
        head = f"POST {path} HTTP/1.1\r\n".encode() + lines
        return _Target(request, head, _UNUSUAL.union(map(str.lower, request.headers)))


class DirectPost:
    """One POST request: a context that begins with its response and ends its use of a connection.

    Raises what aiohttp raises: `aiohttp.ClientError`, `OSError` and `TimeoutError`.
    """

    __slots__ = ("_body", "_connection", "_head", "_request", "_requests")

    def __init__(
        self, requests: DirectRequests, request: aiohttp.ClientRequest, head: bytes, body: bytes
    ) -> None:
        self._requests = requests
        self._request = request
        self._head = head
        self._body = body
        self._connection: Connection | None = None

    async def __aenter__(self) -> DirectResponse:
        requests = self._requests
        try:
            connection = await requests.connector.connect(self._request, [], requests.timeout)
        except TimeoutError as error:
            msg = f"Connection timeout to host {self._request.url}"
            raise aiohttp.ConnectionTimeoutError(msg) from error
        except aiohttp.ClientError:
            raise
        except OSError as error:
            raise aiohttp.ClientOSError(*error.args) from error
        try:
            protocol = connection.protocol
            if protocol is None or protocol.transport is None or protocol.transport.is_closing():
                # A server may close a connection as soon as it has accepted it.
                raise aiohttp.ClientConnectionResetError("the server closed a new connection")
            protocol.set_response_params(
                read_until_eof=True,
                max_line_size=requests.max_header_bytes,
                max_field_size=requests.max_header_bytes,
            )
            if len(self._body) <= _JOINED_BYTES:
                protocol.transport.write(self._head + self._body)
            else:
                protocol.transport.write(self._head)
                protocol.transport.write(self._body)
            message, content = await protocol.read()
            while 100 <= message.code < 200 and message.code != 101:
                message, content = await protocol.read()
        except HttpProcessingError as error:
            connection.close()
            raise aiohttp.ClientResponseError(
                self._request.request_info,
                (),
                status=error.code,
                message=error.message,
                headers=error.headers,
            ) from error
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return DirectResponse(message.code, message.reason, message.headers, content)

    async def __aexit__(self, *exception: object) -> None:
        connection = self._connection
        assert connection is not None
        protocol = connection.protocol
        assert protocol is not None
        # A response can come before all of the request is sent.
        if protocol.transport is not None and protocol.transport.get_write_buffer_size():
            connection.close()
        else:
            connection.release()  # closes the connection if the response has not ended
            # Bytes that come now belong to no response. Without a parser they are kept as they are,
            # and `LiveConnector` sees them.
            protocol._parser = None


def _encode_headers(headers: Mapping[str, str]) -> bytes:
    """The lines of headers. Raises `ValueError` for a control character in a name or a value."""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    if _FORBIDDEN.search("".join(lines)) is not None:
        name = next(n for n, line in zip(headers, lines, strict=True) if _FORBIDDEN.search(line))
        raise ValueError(f"the header {name!r} has a control character, such as a line break")
    # Lone surrogates, which are bytes that were no text, are left out as by aiohttp.
    return "".join([f"{line}\r\n" for line in lines]).encode(errors="ignore")
