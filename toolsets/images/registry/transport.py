"""One HTTP request to a registry, and how a failure is classified."""

from __future__ import annotations

import asyncio
import os
import ssl
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
import truststore
from yarl import URL

from batch_trajectories.basics.errors import HOST_ERRNOS, HostError, describe_errno

_CONNECT_S = 20.0
_SILENT_S = 60.0
"""Seconds without a byte after which a request has failed."""
_BUFFER_BYTES = 128 << 10
"""Maximum bytes that a lost connection costs: aiohttp drops data that was not read yet."""
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_BUSY = (429, 503)
_FAILED_FOR_NOW = (408, 425, 500, 502, 504)


class RequestRefused(Exception):
    """A server has answered that it will not do this; another attempt would not help."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class FailedForNow(Exception):
    """A request has failed in a way that another attempt may mend."""

    def __init__(self, message: str, *, wait_s: float | None = None) -> None:
        """`wait_s`: how long the server asks to wait; None if it does not say."""
        super().__init__(message)
        self.wait_s = wait_s


class Busy(FailedForNow):
    """The server has too many requests (429), or says when to come again."""


class RegistryTransport:
    """Sends requests. It follows redirects, and gives headers with secrets to no other host."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=truststore.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENT_S),
            read_bufsize=_BUFFER_BYTES,
            # What is counted and hashed is what was sent.
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )
        self._quiet_until: defaultdict[URL, float] = defaultdict(float)
        """The time at which a busy server may be asked again, by origin."""

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        headers: Mapping[str, str],
        *,
        data: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the answer to a request: any that is neither a redirect nor a failure for now.

        `Authorization` and `data` go to the origin of `url` only. Raises `HostError`,
        `FailedForNow`, and `RequestRefused` for a redirect that leads nowhere. Errors never quote
        headers or queries, which may hold secrets.
        """
        origin = url.origin()
        with _as_failures(url):
            for _ in range(_MAX_REDIRECTS + 1):
                await self._wait(url.origin())
                sent = dict(headers)
                if url.origin() != origin:
                    sent.pop("Authorization", None)
                async with self._session.request(
                    method,
                    url,
                    headers=sent,
                    data=data,
                    allow_redirects=False,
                    proxy=_proxy(url),
                ) as response:
                    if response.status not in _REDIRECTS:
                        self._check(url, response)
                        yield response
                        return
                    url = _next_url(url, response)
                    method, data = ("GET", None) if response.status == 303 else (method, data)
                    if data is not None and url.origin() != origin:
                        raise RequestRefused(
                            response.status,
                            f"{origin.host}: a redirect would send a login to {url.host}",
                        )
        raise RequestRefused(310, f"{origin.host}: more than {_MAX_REDIRECTS} redirects")

    async def _wait(self, origin: URL) -> None:
        while (left := self._quiet_until[origin] - time.monotonic()) > 0:
            await asyncio.sleep(left)

    def _check(self, url: URL, response: aiohttp.ClientResponse) -> None:
        status = response.status
        if status in _BUSY:
            wait_s = _parse_retry_after(response.headers.get("Retry-After"))
            if wait_s is not None and status == 429:
                until = time.monotonic() + min(wait_s, MAX_WAIT_S)
                self._quiet_until[url.origin()] = max(self._quiet_until[url.origin()], until)
            kind = Busy if status == 429 or wait_s is not None else FailedForNow
            raise kind(f"{url.host}: HTTP {status} {response.reason or ''}".rstrip(), wait_s=wait_s)
        if status in _FAILED_FOR_NOW or status > 504:
            raise FailedForNow(f"{url.host}: HTTP {status} {response.reason or ''}".rstrip())


MAX_WAIT_S = 900.0
"""The longest time in seconds that one request waits for a busy server."""


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return a whole body. Raises `RequestRefused` for a larger one, and `FailedForNow`."""
    parts, size = [], 0
    with _as_failures(response.url):
        async for piece in response.content.iter_chunked(64 << 10):
            size += len(piece)
            if size > max_bytes:
                raise RequestRefused(413, f"an answer has more than {max_bytes >> 20} MiB")
            parts.append(piece)
    return b"".join(parts)


@contextmanager
def _as_failures(url: URL) -> Iterator[None]:
    """Turn errors of connections into `FailedForNow`, `RequestRefused` or `HostError`."""
    host = f"{url.host}:{url.port}"
    try:
        yield
    except aiohttp.ClientConnectorCertificateError as error:
        raise RequestRefused(
            495, f"{host}: its certificate is not valid: {error.certificate_error}"
        ) from None
    except aiohttp.ClientConnectorDNSError:
        raise FailedForNow(f"{host}: this host name is not known") from None
    except TimeoutError:
        raise FailedForNow(f"{host}: no answer in time") from None
    except UnicodeError:
        raise RequestRefused(400, f"{host}: no valid name of a host") from None
    except (aiohttp.ClientError, OSError) as error:
        number = error.errno if isinstance(error, OSError) else None
        if number in HOST_ERRNOS:
            raise HostError(f"{host}: {describe_errno(number)}") from error
        reason = os.strerror(number) if number else type(error).__name__
        raise FailedForNow(f"{host}: {reason}") from None


def _next_url(url: URL, response: aiohttp.ClientResponse) -> URL:
    location = response.headers.get("Location", "")
    try:
        there = url.join(URL(location, encoded=True))
        is_valid = bool(location and there.host) and there.scheme in ("http", "https")
        if is_valid:
            there.origin()  # fails for a port that is none
    except ValueError:
        is_valid = False
    # A user or a password would be sent in place of `Authorization`.
    if not is_valid or there.user or there.password:
        raise RequestRefused(response.status, f"{url.host}: a redirect leads to no address")
    if url.scheme == "https" and there.scheme != "https":
        raise RequestRefused(
            response.status, f"{url.host}: a redirect leads to http, which is not safe"
        )
    return there


def _parse_retry_after(value: str | None) -> float | None:
    """Return the seconds of a `Retry-After`: a number, or a date."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return max((at - datetime.now(UTC)).total_seconds(), 0.0)


def _proxy(url: URL) -> str | None:
    """Return the proxy that the usual variables name.

    Not `trust_env` of aiohttp, which would also send what ~/.netrc has.
    """
    if not url.host or urllib.request.proxy_bypass(f"{url.host}:{url.port}"):
        return None
    proxies: dict[str, Any] = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")
