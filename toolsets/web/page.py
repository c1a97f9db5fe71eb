"""Extracts the text of a page: its main part as markdown, or else all of it as plain text."""

from __future__ import annotations

import codecs
import logging
import re
from typing import Any, NamedTuple

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import valid_utf8

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
"""Types that servers also state for text whose type they do not know."""

_PROBE_BYTES = 8192
_MAX_MARKDOWN_CHARS = 2 * 1024 * 1024
"""Longer HTML becomes plain text: finding its main part takes seconds per million characters."""

_LOOKS_LIKE_HTML = re.compile(rb"\s*<(!doctype html|html|head|body)\b", re.I)
_META_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w-]{1,40})", re.I)
_INVISIBLE = ("head", "noscript", "script", "style", "svg", "template")

_MORE_BLOCKS = (
    *("article", "aside", "br", "details", "figcaption", "figure", "footer", "header", "main"),
    *("nav", "section", "summary"),
)
"""Elements that end a line and are newer than lxml's list."""


class Page(NamedTuple):
    """A page as the model sees it."""

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
    """Extract the text of a downloaded page. Takes up to seconds: not for the event loop.

    `charset` is the one that the server stated, or None. Raises `ToolError` for binary content.
    """
    refuse_unreadable(url, content_type)
    is_html = content_type in _HTML or (
        content_type in _UNKNOWN and _LOOKS_LIKE_HTML.match(body, 0, _PROBE_BYTES) is not None
    )
    if charset is None and is_html and (declared := _META_CHARSET.search(body, 0, 2048)):
        charset = declared[1].decode("ascii", "replace")
    is_utf16 = body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    if is_utf16:
        charset = "utf-16"
    elif b"\0" in body[:_PROBE_BYTES] or body.startswith(b"%PDF-"):
        stated = content_type or "of no stated type"
        raise ToolError(f"{url}: its content is binary ({stated}), which cannot be read as text")
    text = _decoded(body, charset)
    if not is_html:
        return Page("", valid_utf8(text))
    return _from_html(url, text)


def _decoded(body: bytes, charset: str | None) -> str:
    for name in (charset or "utf-8-sig", "utf-8-sig"):
        try:
            return body.decode(name)
        except (UnicodeError, LookupError):
            continue
    # The default of the web if no charset is stated.
    return body.decode("utf-8" if charset else "cp1252", "replace")


def _from_html(url: str, html: str) -> Page:
    import lxml.html
    import trafilatura

    # Its messages about unusual pages are of no use in the log of a run.
    logging.getLogger("trafilatura").setLevel(logging.CRITICAL)
    # We encode, or the parser would guess an encoding or believe a wrong declaration.
    parser = lxml.html.HTMLParser(encoding="utf-8", remove_comments=True, remove_pis=True)
    try:
        tree = lxml.html.document_fromstring(html.encode("utf-8", "replace"), parser=parser)
    except lxml.etree.ParserError:  # it is empty
        return Page("", "")
    title = " ".join(str(tree.findtext(".//title") or "").split())
    text = None
    if len(html) <= _MAX_MARKDOWN_CHARS:
        text = trafilatura.extract(
            tree, url=url, output_format="markdown", include_links=True, include_formatting=True
        )
    return Page(valid_utf8(title), valid_utf8(text or _plain_text(tree)))


def _plain_text(tree: Any) -> str:
    """All text that a browser would show, line by line."""
    from lxml.html import defs

    for element in list(tree.iter(*_INVISIBLE)):
        if element.getparent() is not None:
            element.drop_tree()
    for element in tree.iter(*_MORE_BLOCKS, *defs.block_tags):
        element.text = f"\n{element.text or ''}"
        element.tail = f"\n{element.tail or ''}"
    lines = (" ".join(line.split()) for line in tree.text_content().split("\n"))
    return "\n".join(line for line in lines if line)
