"""The web tools: search the web, and read one page of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field

from batch_trajectories.basics.errors import ToolError, install
from batch_trajectories.basics.locked import locked
from batch_trajectories.basics.text import valid_utf8
from toolsets.context import ToolContext
from toolsets.net.web_settings import WebSettings
from toolsets.tool import ToolResult, tool
from toolsets.toolbox import in_thread

_SHARDS = 16
_LOCK = ".lock"
_TEMPORARY = ".tmp"


class WebCache:
    """JSON values by key. It blocks on the disk: do not call it in the event loop.

    Several processes may use one directory. The first one to store a key wins; the others get its
    value. Temporary files that a crash left are removed by the next store in their shard. Entries
    are not synced: one that a power loss damaged is unreadable, counts as missing and is stored
    again.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """The directory, of at most `max_bytes`, is created when something is stored."""
        self._directory = directory
        self._max_shard_bytes = max_bytes // _SHARDS

    def get(self, key: str) -> Any | None:
        """The value of `key`; None if there is none."""
        try:
            entry = orjson.loads(self._path(key).read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return None
        return entry.get("value") if isinstance(entry, dict) else None

    def put(self, key: str, value: Any) -> Any:
        """Store `value` unless `key` has a value already; return the value of `key`.

        A value that is too large for the cache is not stored.
        """
        content = orjson.dumps({"key": valid_utf8(key), "value": value})
        if len(content) > self._max_shard_bytes:
            return value
        path = self._path(key)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.parent / _LOCK):
            if (stored := self.get(key)) is not None:
                return stored
            self._make_room(path.parent, self._max_shard_bytes - len(content))
            descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=_TEMPORARY)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(temporary).replace(path)
            except BaseException:
                Path(temporary).unlink(missing_ok=True)
                raise
        return value

    def _path(self, key: str) -> Path:
        digest = hashlib.sha256(valid_utf8(key).encode()).hexdigest()
        return self._directory / digest[0] / digest

    def _make_room(self, shard: Path, max_bytes: int) -> None:
        """Remove the oldest entries of a locked shard until no more than `max_bytes` are left.

        Temporary files are removed, too: the holder of the lock has none yet.
        """
        entries = []
        with os.scandir(shard) as scan:
            for entry in scan:
                if entry.name.endswith(_TEMPORARY):
                    Path(entry.path).unlink(missing_ok=True)
                elif entry.name != _LOCK:
                    entries.append((entry.stat(), entry.path))
        entries.sort(key=lambda pair: pair[0].st_mtime_ns)
        size = sum(stat.st_size for stat, _ in entries)
        for stat, path in entries:
            if size <= max_bytes:
                return
            Path(path).unlink(missing_ok=True)
            size -= stat.st_size


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
