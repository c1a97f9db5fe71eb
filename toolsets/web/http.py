"""Downloads one page, with limits on its address, its time and its size."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from typing import Any, NamedTuple

import aiohttp
from aiohttp.abc import AbstractResolver
from yarl import URL

from batch_trajectories.basics.errors import ToolError, machine_failure
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.net.guard import Guard, check_url
from toolsets.net.web_settings import WebSettings
from toolsets.web.charsets import decode_page, find_codec, marked_codec

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
    """The address after redirects."""
    content_type: str
    """The type in lower case, without parameters; "" if the server did not state it."""
    charset: str | None
    body: bytes


class _Refused(OSError):
    """The guard does not permit the address."""


async def download(
    url: str, settings: WebSettings, *, resolver: AbstractResolver | None = None
) -> Download:
    """Download a page; follow up to `MAX_REDIRECTS` redirects.

    A `Guard` checks every address when a socket connects to it; neither redirects nor DNS changes
    get around it. No proxy is used. `resolver` None: the system resolves names. Raises `ToolError`
    with a message for the model.
    """
    guard = Guard(settings.allow)
    cookies = aiohttp.CookieJar()
    here = check_url(url)
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
    """Return the decompressed body. Raises `ToolError` as soon as it exceeds `max_bytes`."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            raise ToolError(f"{response.url}: the page is larger than {max_bytes} bytes")
    return bytes(body)


def request_error(error: aiohttp.ClientError, url: str) -> Exception:
    """Return the exception to raise for a failed request.

    A failure of this machine is returned unchanged.
    """
    if machine_failure(error) is not None:
        return error
    match error:
        case aiohttp.ClientConnectorDNSError():
            message = "its host has no known address"
        case aiohttp.ClientConnectorCertificateError():
            message = "its certificate is not valid"
        case aiohttp.ClientConnectorError(os_error=_Refused()):
            message = "refused, because its host is not at a public address"
        case aiohttp.ClientConnectorError():
            message = "cannot connect to its host"
        case aiohttp.ServerDisconnectedError():
            message = "the server closed the connection without an answer"
        case _:
            message = f"{type(error).__name__}: {clip(str(error), max_chars=200)}"
    return ToolError(f"{url}: {message}")


async def _get(
    url: URL,
    settings: WebSettings,
    guard: Guard,
    cookies: aiohttp.CookieJar,
    resolver: AbstractResolver | None,
) -> Download | URL:
    """Make one request; return the page, or the address that it redirects to."""

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
            return _follow_redirect(url, location)
        if not 200 <= response.status < 300:
            reason = clip(response.reason or "", max_chars=100)
            raise ToolError(f"{url}: HTTP {response.status} {reason}".rstrip())
        content_type = response.content_type if "Content-Type" in response.headers else ""
        refuse_unreadable(str(url), content_type)
        body = await read_body(response, settings.max_bytes)
        return Download(str(url), content_type, response.charset, body)


def _follow_redirect(url: URL, location: str) -> URL:
    try:
        target = url.join(URL(location))
    except ValueError:
        raise ToolError(f"{url}: redirects to an invalid URL") from None
    return check_url(str(target))


_HTML = frozenset({"text/html", "application/xhtml+xml"})
_TEXT = frozenset(
    {
        "application/ecmascript",
        "application/javascript",
        "application/json",
        "application/toml",
        "application/x-httpd-php",
        "application/x-javascript",
        "application/x-ndjson",
        "application/x-sh",
        "application/x-yaml",
        "application/xml",
        "application/yaml",
    }
)
_UNKNOWN = frozenset({"", "application/octet-stream", "binary/octet-stream"})
"""Types that servers state if they do not know the type; the body may be text."""

_PROBE_BYTES = 8192
_MAX_MARKDOWN_CHARS = 2 * 1024 * 1024
"""Longer HTML becomes plain text, as finding its main part takes seconds per million characters."""

_MAX_ELEMENTS = 30_000
"""A page with more elements becomes plain text, as finding its main part takes minutes."""

_LOOKS_LIKE_HTML = re.compile(rb"(?:\xef\xbb\xbf)?\s*<(!doctype html|html|head|body)\b", re.I)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w-]{1,40})", re.I)
_CODECS_WITH_ZEROS = ("utf-16-le", "utf-16-be")
_INVISIBLE = ("head", "noscript", "script", "style", "svg", "template")

_MORE_BLOCKS = (
    "article",
    "aside",
    "br",
    "details",
    "figcaption",
    "figure",
    "footer",
    "header",
    "main",
    "nav",
    "section",
    "summary",
)
"""Elements that end a line but are missing in lxml's older list."""


class Page(NamedTuple):
    """A page as title and text for the model."""

    title: str
    text: str


def refuse_unreadable(url: str, content_type: str) -> None:
    """Raise `ToolError` for a content type that is not text."""
    known = _HTML | _TEXT | _UNKNOWN
    if not (
        content_type in known
        or content_type.startswith("text/")
        or content_type.endswith(("+json", "+xml", "+yaml"))
    ):
        raise ToolError(
            f"{url}: its type is {content_type}, which cannot be read as text; "
            "look for the same in HTML or plain text"
        )


def read_page(url: str, content_type: str, charset: str | None, body: bytes) -> Page:
    """Extract the text of a downloaded page. Takes up to seconds: call it in a thread.

    `charset` is the one that the server stated, or None. Raises `ToolError` for binary content.
    """
    refuse_unreadable(url, content_type)
    is_html = content_type in _HTML or (
        content_type in _UNKNOWN and _LOOKS_LIKE_HTML.match(body, 0, _PROBE_BYTES) is not None
    )
    if charset is None and is_html and (declared := _META_CHARSET.search(body, 0, 2048)):
        charset = declared[1].decode("ascii", "replace")
        if find_codec(charset) in _CODECS_WITH_ZEROS:
            charset = "utf-8"  # the declaration could be read, so the page is not in UTF-16
    codec = marked_codec(body) or find_codec(charset or "")
    has_zeros = b"\0" in body[:_PROBE_BYTES] and codec not in _CODECS_WITH_ZEROS
    if has_zeros or body.startswith(b"%PDF-"):
        stated = content_type or "of no stated type"
        raise ToolError(f"{url}: its content is binary ({stated}), which cannot be read as text")
    text = decode_page(body, charset)
    if not is_html:
        return Page("", valid_utf8(text))
    return _read_html(url, text)


def _read_html(url: str, html: str) -> Page:
    import lxml.html
    import trafilatura

    # trafilatura's messages about unusual pages are of no use in the log of a run.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # We encode, or the parser would guess an encoding or believe a wrong declaration.
    parser = lxml.html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        tree = lxml.html.document_fromstring(html.encode("utf-8", "replace"), parser=parser)
    except lxml.etree.ParserError:  # it is empty
        return Page("", "")
    title = " ".join(str(tree.findtext(".//title") or "").split())
    text = None
    if len(html) <= _MAX_MARKDOWN_CHARS and sum(1 for _ in tree.iter()) <= _MAX_ELEMENTS:
        text = trafilatura.extract(
            tree, url=url, output_format="markdown", include_links=True, include_formatting=True
        )
    return Page(valid_utf8(title), valid_utf8(text or _plain_text(tree)))


def _plain_text(tree: Any) -> str:
    """Return all text that a browser would show, line by line."""
    from lxml.html import defs

    for element in list(tree.iter(*_INVISIBLE)):
        if element.getparent() is not None:
            element.drop_tree()
    for element in tree.iter(*_MORE_BLOCKS, *defs.block_tags):
        element.text = f"\n{element.text or ''}"
        element.tail = f"\n{element.tail or ''}"
    lines = (" ".join(line.split()) for line in tree.text_content().split("\n"))
    return "\n".join(line for line in lines if line)
