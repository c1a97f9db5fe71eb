"""The web tools: search the web by one of its providers, and read one page of it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypedDict

import aiohttp
import orjson
from pydantic import Field

from batch_trajectories.basics.errors import ToolError, install_command
from batch_trajectories.basics.process import lock_file
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.context import ToolContext
from toolsets.function_threads import call_in_thread
from toolsets.net.web_settings import KEY_VARIABLES, WebSettings
from toolsets.tool import ToolResult, tool
from toolsets.web.http import read_body, request_error

_SHARDS = 16
_LOCK = ".lock"
_TEMPORARY = ".tmp"


class WebCache:
    """JSON values by key on disk. It blocks: do not call it in the event loop.

    Several processes may use one directory. The first one to store a key wins; the others get its
    value. The next store in a shard removes temporary files that a crash left there. Entries are
    not synced: an entry that a power loss damaged counts as missing and is stored again.
    """

    def __init__(self, directory: Path, max_bytes: int) -> None:
        """The directory is created by the first store; it holds at most `max_bytes`."""
        self._directory = directory
        self._max_shard_bytes = max_bytes // _SHARDS

    def get(self, key: str) -> Any | None:
        """Return the value of `key`; None if there is none."""
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
        with lock_file(path.parent / _LOCK):
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
        """Remove the oldest entries of a locked shard until it has at most `max_bytes`.

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
    """Return why the web tools cannot work here, and what to install; None if they work."""
    if all(find_spec(package) is not None for package in _PACKAGES):
        return None
    return f"it needs further packages: {install_command('web')}"


@tool(effects="none")
async def web_search(
    context: ToolContext,
    query: Annotated[str, Field(min_length=1, max_length=1000, description="What to search for.")],
    max_results: Annotated[int, Field(ge=1, le=20, description="How many results at most.")] = 5,
) -> list[Any]:
    """Search the web. Gives a list of results with title, url and snippet."""

    if not query.strip():
        raise ToolError("query is blank")
    settings = context.web or WebSettings()
    key = f"search {settings.provider} {max_results} {query}"
    return list(await _get_cached(settings, key, lambda: search(query, max_results, settings)))


@tool(effects="none")
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
    page = await _get_page(url, settings)
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


async def _get_page(url: str, settings: WebSettings) -> Any:
    """Return the page at `url`: url, type, title and text."""
    from toolsets.net.guard import check_url
    from toolsets.web.http import download, read_page

    async def fetch() -> dict[str, str]:
        got = await download(url, settings)
        page = await call_in_thread(
            partial(read_page, got.url, got.content_type, got.charset, got.body)
        )
        return {"url": got.url, "type": got.content_type, "title": page.title, "text": page.text}

    return await _get_cached(settings, f"GET {check_url(url)}", fetch)


async def _get_cached(settings: WebSettings, key: str, get: Callable[[], Awaitable[Any]]) -> Any:
    """Return the value of `key` in the cache, or else get it and store it.

    An empty value is not stored: a search without results is usually a failure of the provider.
    """
    if settings.cache_dir is None:
        return await get()
    cache = WebCache(settings.cache_dir, settings.cache_bytes)
    if (cached := await asyncio.to_thread(cache.get, key)) is not None:
        return cached
    if not (value := await get()):
        return value
    # Another process may have stored the key meanwhile: then its value counts.
    return await asyncio.to_thread(cache.put, key, value)


_MAX_SNIPPET_CHARS = 1000
_MAX_ANSWER_BYTES = 5 * 1024 * 1024


class SearchResult(TypedDict):
    """One result of a search."""

    title: str
    url: str
    snippet: str


Provider = Callable[[str, int, WebSettings], Awaitable[list[SearchResult]]]
"""Searches for a query with a maximum number of results; raises `ToolError`."""


async def search(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    """Search with the provider in `settings`. Raises `ToolError` with a message for the model."""
    try:
        async with asyncio.timeout(settings.timeout_s):
            results = await PROVIDERS[settings.provider](query, max_results, settings)
    except TimeoutError:
        raise ToolError(
            f"search provider {settings.provider} did not answer within {settings.timeout_s:g} s"
        ) from None
    return results[:max_results]


async def _ddgs(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    return await asyncio.to_thread(_ask_ddgs, query, max_results)


def _ask_ddgs(query: str, max_results: int) -> list[SearchResult]:
    from ddgs import DDGS
    from ddgs.exceptions import DDGSException

    # These packages log each query and address.
    for name in ("ddgs", "primp"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        rows = DDGS().text(query, max_results=max_results)
    except DDGSException as error:
        message = str(error)
        if message == "No results found.":
            return []
        kind = clip(message.partition(":")[0], max_chars=80)  # the rest names one engine of many
        raise ToolError(
            f"search provider ddgs got no answer from any search engine ({kind}); try later, and "
            "see that this machine is online"
        ) from error
    return _results(rows, title="title", url="href", snippet="body")


async def _tavily(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    answer = await _ask(
        settings,
        "POST",
        "https://api.tavily.com/search",
        headers={"Authorization": f"Bearer {_key(settings)}"},
        json={"query": query, "max_results": max_results},
    )
    return _results(answer.get("results"), title="title", url="url", snippet="content")


async def _brave(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    answer = await _ask(
        settings,
        "GET",
        "https://api.search.brave.com/res/v1/web/search",
        headers={"X-Subscription-Token": _key(settings)},
        params={"q": query, "count": str(max_results), "text_decorations": "false"},
    )
    web = answer.get("web") or {}  # a search without results has none
    return _results(web.get("results"), title="title", url="url", snippet="description")


PROVIDERS: Mapping[str, Provider] = MappingProxyType(
    {"brave": _brave, "ddgs": _ddgs, "tavily": _tavily}
)
"""The search functions by the names in `KEY_VARIABLES`."""


async def _ask(settings: WebSettings, method: str, url: str, **request: Any) -> Any:
    """Return a provider's JSON answer. Redirects are refused: no other host may see the key."""
    name = settings.provider
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
            session.request(
                method, settings.search_url or url, allow_redirects=False, **request
            ) as response,
        ):
            if response.status != 200:
                raise ToolError(f"search provider {name}: {_refusal(name, response.status)}")
            body = await read_body(response, _MAX_ANSWER_BYTES)
    except aiohttp.ClientError as error:
        raise request_error(error, f"search provider {name}") from error
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = None
    if not isinstance(answer, dict):
        raise ToolError(f"search provider {name}: its answer is not a JSON object")
    return answer


def _refusal(name: str, status: int) -> str:
    if status in (401, 403):
        return f"HTTP {status}; it does not accept the key in {KEY_VARIABLES[name]}"
    if status in (402, 429, 432, 433):
        return f"HTTP {status}; its rate limit or quota is used up, try later"
    return f"HTTP {status}"


def _key(settings: WebSettings) -> str:
    if (problem := settings.problem()) is not None:
        raise ToolError(problem)
    return os.environ[KEY_VARIABLES[settings.provider] or ""]


def _results(rows: Any, *, title: str, url: str, snippet: str) -> list[SearchResult]:
    """Return a provider's results in our form, without results that have no address."""
    return [
        SearchResult(
            title=_text(row.get(title)), url=_text(row[url]), snippet=_text(row.get(snippet))
        )
        for row in rows or ()
        if isinstance(row, Mapping) and row.get(url)
    ]


def _text(value: Any) -> str:
    text = valid_utf8(" ".join(str(value or "").split()))
    return clip(text, max_chars=_MAX_SNIPPET_CHARS)
