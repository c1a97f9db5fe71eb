"""The web tools: search the web, and read one page of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from batch_trajectories.basics.errors import ToolError, install
from toolsets.context import ToolContext
from toolsets.net.web_settings import WebSettings
from toolsets.tool import ToolResult, tool
from toolsets.toolbox import in_thread
from toolsets.web.cache import WebCache

_PACKAGES = ("aiohttp", "ddgs", "lxml_html_clean", "trafilatura")
_MAX_CHARS = 80_000


def web_problem() -> str | None:
    """Why the web tools cannot work here, and what to install; None if they can."""
    if all(find_spec(package) is not None for package in _PACKAGES):
        return None
    return f"it needs further packages: {install('web')}"


@tool(idempotent=True)
async def web_search(
    context: ToolContext,
    query: Annotated[str, Field(min_length=1, max_length=1000, description="What to search for.")],
    max_results: Annotated[int, Field(ge=1, le=20, description="How many results at most.")] = 5,
) -> list[Any]:
    """Search the web. Gives a list of results with title, url and snippet."""
    from toolsets.web.search import search

    if not query.strip():
        raise ToolError("query is blank")
    settings = context.web or WebSettings()
    key = f"search {settings.provider} {max_results} {query}"
    return list(await _cached(settings, key, lambda: search(query, max_results, settings)))


@tool(idempotent=True)
async def web_fetch(
    context: ToolContext,
    url: Annotated[str, Field(min_length=1, description="Address of the page: http or https.")],
    max_chars: Annotated[
        int, Field(ge=1, le=_MAX_CHARS, description="How many characters of text to show at most.")
    ] = 20_000,
    offset: Annotated[int, Field(ge=0, description="First character of the text to show.")] = 0,
) -> ToolResult:
    """Read a web page: its title and main text as markdown with links; text and JSON as they are.

    A long page is shown in part, with a note on how to read on.
    """
    settings = context.web or WebSettings()
    page = await _page(url, settings)
    text = page["text"]
    if offset and offset >= len(text):
        raise ToolError(f"the text has only {len(text)} characters")
    end = min(offset + max_chars, len(text))
    lines = [f"Title: {page['title']}"] if page["title"] else []
    lines += [f"URL: {page['url']}", "", text[offset:end] or "[no text]"]
    if is_part := end < len(text):
        lines.append(f"[characters {offset}-{end} of {len(text)}; go on with offset={end}]")
    details = {"url": page["url"], "type": page["type"], "chars": len(text), "truncated": is_part}
    return ToolResult("\n".join(lines), details=details)


async def _page(url: str, settings: WebSettings) -> Any:
    """The page at `url`: url, type, title and text."""
    from toolsets.net.guard import checked
    from toolsets.web.http import download
    from toolsets.web.page import read_page

    async def fetch() -> dict[str, str]:
        got = await download(url, settings)
        page = await in_thread(partial(read_page, got.url, got.content_type, got.charset, got.body))
        return {"url": got.url, "type": got.content_type, "title": page.title, "text": page.text}

    return await _cached(settings, f"GET {checked(url)}", fetch)


async def _cached(settings: WebSettings, key: str, get: Callable[[], Awaitable[Any]]) -> Any:
    """The value of `key` in the cache; else what `get` gives, which is stored unless it is empty.

    A search without results is more often a failure of the provider than a fact about the web.
    """
    if settings.cache_dir is None:
        return await get()
    cache = WebCache(settings.cache_dir, settings.cache_bytes)
    if (cached := await asyncio.to_thread(cache.get, key)) is not None:
        return cached
    # Another process may have stored the key meanwhile: then its value counts.
    return await asyncio.to_thread(cache.put, key, value) if (value := await get()) else value
