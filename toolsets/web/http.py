"""Downloading one page, with bounds on where it may come from, how long it takes and its size."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from toolsets.errors import ToolError, machine_failure
from toolsets.net.guard import Guard, checked
from toolsets.net.web_settings import WebSettings
from toolsets.text import clip
from toolsets.web.page import refuse_unreadable

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; batch-trajectories)",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9,*/*;q=0.5",
    # What the body reader is known to bound while it decompresses.
    "Accept-Encoding": "gzip, deflate",
}


class Download(NamedTuple):
    """A page as it came."""

    url: str
    """Where it was in the end, after redirects."""
    content_type: str
    """Lower case, without parameters; "" where the server did not say."""
    charset: str | None
    body: bytes


class _Refused(OSError):
    """The address is not one that may be connected to."""


async def download(
    url: str, settings: WebSettings, *, resolver: AbstractResolver | None = None
) -> Download:
    """Get a page, following up to `MAX_REDIRECTS` redirects.

    Every address is judged by a `Guard` at the very moment of connecting to it, so neither a
    redirect nor a name that changes its address leads around it. No proxy is used. `resolver`
    None asks the system for addresses. Raises `ToolError` with words for the model.
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
        raise describe(error, str(here)) from error
    raise ToolError(f"{url}: more than {MAX_REDIRECTS} redirects")


async def read_body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The decompressed body. Raises `ToolError` as soon as it is longer than `max_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ToolError(f"{response.url}: the page is larger than {max_bytes} bytes")
    return bytes(body)


def describe(error: aiohttp.ClientError, url: str) -> Exception:
    """What to raise for a failed request: the machine's own failures stay what they are."""
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

    # A connector per request: its sockets belong to this host alone, and no answer of the
    # resolver is used for more than the one connection that it was asked for.
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
        raise ToolError(f"{url}: redirects to what is no URL") from None
    return checked(str(target))
