"""Downloads one page, with limits on its address, its time and its size."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from batch_trajectories.basics.errors import ToolError, machine_failure
from batch_trajectories.basics.text import clip
from toolsets.net.guard import Guard, checked
from toolsets.net.web_settings import WebSettings
from toolsets.web.page import refuse_unreadable

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; batch-trajectories)",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9,*/*;q=0.5",
    # Encodings whose decompression the body reader limits.
    "Accept-Encoding": "gzip, deflate",
}


class Download(NamedTuple):
    """A downloaded page."""

    url: str
    """Its address after redirects."""
    content_type: str
    """Lower case, without parameters; "" if the server did not state it."""
    charset: str | None
    body: bytes


class _Refused(OSError):
    """The guard does not permit the address."""


async def download(
    url: str, settings: WebSettings, *, resolver: AbstractResolver | None = None
) -> Download:
    """Get a page, following up to `MAX_REDIRECTS` redirects.

    A `Guard` checks every address when a socket connects to it; neither redirects nor DNS changes
    get around it. No proxy is used. `resolver` None: the system resolves names. Raises `ToolError`
    with a message for the model.
    """
    guard = Guard(settings.allow)
    cookies = aiohttp.CookieJar()
    here = checked(url)
    try:
        async with asyncio.timeout(settings.timeout_s):
            for _ in range(MAX_REDIRECTS + 1):
                answer = await _get(here, settings, guard, cookies, resolver)
                if isinstance(answer, Download):
                    return answer
                here = answer
    except TimeoutError:
        raise ToolError(f"{here}: not loaded within {settings.timeout_s:g} s") from None
    except aiohttp.ClientError as error:
        raise request_error(error, str(here)) from error
    raise ToolError(f"{url}: more than {MAX_REDIRECTS} redirects")


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The decompressed body. Raises `ToolError` as soon as it is longer than `max_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ToolError(f"{response.url}: the page is larger than {max_bytes} bytes")
    return bytes(body)


def request_error(error: aiohttp.ClientError, url: str) -> Exception:
    """The exception to raise for a failed request: failures of this machine unchanged."""
    if machine_failure(error) is not None:
        return error
    match error:
        case aiohttp.ClientConnectorDNSError():
            words = "its host has no known address"
        case aiohttp.ClientConnectorCertificateError():
            words = "its certificate is not valid"
        case aiohttp.ClientConnectorError(os_error=_Refused()):
            words = "refused, because its host is not at a public address"
        case aiohttp.ClientConnectorError():
            words = "cannot connect to its host"
        case aiohttp.ServerDisconnectedError():
            words = "the server closed the connection without an answer"
        case _:
            words = f"{type(error).__name__}: {clip(str(error), max_chars=200)}"
    return ToolError(f"{url}: {words}")


async def _get(
    url: URL,
    settings: WebSettings,
    guard: Guard,
    cookies: aiohttp.CookieJar,
    resolver: AbstractResolver | None,
) -> Download | URL:
    """One request: the page, or where it redirects to."""

    def open_socket(info: Any) -> socket.socket:
        family, kind, protocol, _, address = info
        if not guard.permits(url.host or "", url.port or 0, str(address[0])):
            raise _Refused("not a public address")
        return socket.socket(family, kind, protocol)

    # One connector per request: its sockets are for this host alone, and each connection resolves
    # the name again.
    connector = aiohttp.TCPConnector(
        resolver=resolver, use_dns_cache=False, socket_factory=open_socket, force_close=True
    )
    async with (
        aiohttp.ClientSession(
            connector=connector,
            cookie_jar=cookies,
            headers=_HEADERS,
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session,
        session.get(url, allow_redirects=False) as response,
    ):
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location:
            return _redirected(url, location)
        if not 200 <= response.status < 300:
            reason = clip(response.reason or "", max_chars=100)
            raise ToolError(f"{url}: HTTP {response.status} {reason}".rstrip())
        content_type = response.content_type if "Content-Type" in response.headers else ""
        refuse_unreadable(str(url), content_type)
        body = await read_body(response, settings.max_bytes)
        return Download(str(url), content_type, response.charset, body)


def _redirected(url: URL, location: str) -> URL:
    try:
        target = url.join(URL(location))
    except ValueError:
        raise ToolError(f"{url}: redirects to an invalid URL") from None
    return checked(str(target))
