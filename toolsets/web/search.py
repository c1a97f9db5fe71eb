"""The providers of web searches. All give their results in the same form."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, TypedDict

import aiohttp
import orjson

from batch_trajectories.basics.errors import ToolError
from batch_trajectories.basics.text import clip, valid_utf8
from toolsets.net.web_settings import KEY_VARIABLES, WebSettings
from toolsets.web.http import read_body, request_error

_MAX_SNIPPET_CHARS = 1000
_MAX_ANSWER_BYTES = 5 * 1024 * 1024


class SearchResult(TypedDict):
    """One result of a search."""

    title: str
    url: str
    snippet: str


Provider = Callable[[str, int, WebSettings], Awaitable[list[SearchResult]]]
"""Called with a query and a maximum number of results; raises `ToolError`."""


async def search(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    """Ask the provider that `settings` name. Raises `ToolError` with a message for the model."""
    try:
        async with asyncio.timeout(settings.timeout_s):
            found = await PROVIDERS[settings.provider](query, max_results, settings)
    except TimeoutError:
        raise ToolError(
            f"search provider {settings.provider} did not answer within {settings.timeout_s:g} s"
        ) from None
    return found[:max_results]


async def _ddgs(query: str, max_results: int, settings: WebSettings) -> list[SearchResult]:
    return await asyncio.to_thread(_ask_ddgs, query, max_results)


def _ask_ddgs(query: str, max_results: int) -> list[SearchResult]:
    from ddgs import DDGS
    from ddgs.exceptions import DDGSException

    # Both log each query and address.
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
"""The providers by the names of `KEY_VARIABLES`."""


async def _ask(settings: WebSettings, method: str, url: str, **request: Any) -> Any:
    """A provider's JSON answer. Redirects are not followed: no other host may see the key."""
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
    """The results of a provider in our form, without those that have no address."""
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
