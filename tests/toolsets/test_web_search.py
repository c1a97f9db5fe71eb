"""web_search: providers that are asked over loopback, and what happens when they fail."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.helpers.websites import Answer, Site, Visit, site
from toolsets.context import ToolContext
from toolsets.net.web_settings import KEY_VARIABLES, WebSettings
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox
from toolsets.web.web_tools import PROVIDERS, web_problem, web_search
from toolsets.workspace.workspace import Workspace

KEY = "canary-key-1234"
FOUND = [
    {"title": "One", "url": "https://one.example/", "snippet": "first hit"},
    {"title": "Two", "url": "https://two.example/", "snippet": ""},
]
TAVILY = {
    "results": [
        {"title": "One", "url": "https://one.example/", "content": "first\n hit", "score": 0.9},
        {"title": "Two", "url": "https://two.example/", "content": None},
        {"title": "nowhere"},
        "not a row",
    ]
}
BRAVE = {
    "web": {
        "results": [
            {"title": "One", "url": "https://one.example/", "description": "first hit"},
            {"title": "Two", "url": "https://two.example/"},
        ]
    }
}


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for variable in filter(None, KEY_VARIABLES.values()):
        monkeypatch.setenv(variable, KEY)
    with site() as served:
        yield served


def search(settings: WebSettings | None, query: str = "two words", **arguments: Any) -> ToolResult:
    toolbox = Toolbox([web_search], ToolContext(Workspace(Path("unused")), web=settings))
    return asyncio.run(toolbox.call("web_search", json.dumps({"query": query, **arguments})))


def tavily(served: Site, **more: Any) -> WebSettings:
    return WebSettings(provider="tavily", search_url=served.url(), **more)


def answering(content: Any) -> Answer:
    return Answer(json.dumps(content).encode(), "application/json")


def test_tavily_is_asked_with_its_key(provider: Site) -> None:
    provider.pages["/"] = answering(TAVILY)
    result = search(tavily(provider), max_results=7)
    assert json.loads(result.content) == FOUND
    [visit] = provider.visits
    assert visit.method == "POST"
    assert visit.headers["Authorization"] == f"Bearer {KEY}"
    assert json.loads(visit.body) == {"query": "two words", "max_results": 7}


def test_brave_is_asked_with_its_key(provider: Site) -> None:
    def page(visit: Visit) -> Answer:
        return answering(BRAVE)

    path = "/?q=two+words&count=5&text_decorations=false"
    provider.pages[path] = page
    result = search(WebSettings(provider="brave", search_url=provider.url()))
    assert json.loads(result.content) == FOUND
    [visit] = provider.visits
    assert parse_qs(urlsplit(visit.path).query)["q"] == ["two words"]
    assert visit.headers["X-Subscription-Token"] == KEY
    provider.pages[path] = answering({"type": "search"})
    nothing = search(WebSettings(provider="brave", search_url=provider.url()))
    assert nothing.content == "[]"


def test_no_more_results_than_asked_for(provider: Site) -> None:
    provider.pages["/"] = answering(TAVILY)
    assert json.loads(search(tavily(provider), max_results=1).content) == FOUND[:1]


def test_a_search_is_made_once_unless_it_found_nothing(provider: Site, tmp_path: Path) -> None:
    settings = tavily(provider, cache_dir=tmp_path)
    provider.pages["/"] = answering({"results": []})
    assert search(settings).content == "[]"
    provider.pages["/"] = answering(TAVILY)
    first = search(settings)
    del provider.pages["/"]
    assert search(settings) == first
    assert len(provider.visits) == 2
    assert search(settings, "other words").is_error
    assert search(settings, max_results=3).is_error
    paths = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"two words" in paths
    assert KEY.encode() not in paths


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(KEY.encode(), status=401), "HTTP 401; it does not accept the key in TAVILY_API_"),
        (Answer(b"", status=429), "HTTP 429; its rate limit or quota is used up"),
        (Answer(b"", status=500), "HTTP 500"),
        (Answer(b"<html>"), "its answer is not a JSON object"),
        (Answer(b"[]"), "its answer is not a JSON object"),
    ],
)
def test_a_provider_that_fails_is_named(
    provider: Site, answer: Answer, message: str, tmp_path: Path
) -> None:
    provider.pages["/"] = answer
    result = search(tavily(provider, cache_dir=tmp_path))
    assert result.is_error
    assert f"search provider tavily: {message}" in result.content
    assert KEY not in result.content
    assert list(tmp_path.rglob("*")) == []


def test_the_key_does_not_follow_a_redirect(provider: Site) -> None:
    with site() as other:
        provider.redirect("/", other.url())
        assert "HTTP 302" in search(tavily(provider)).content
        assert other.visits == []


def test_a_provider_that_is_silent_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TAVILY_API_KEY", KEY)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        settings = WebSettings(provider="tavily", search_url=url, timeout_s=0.2)
        assert "did not answer within 0.2 s" in search(settings).content


def test_a_missing_key_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BRAVE_API_KEY", raising=False)
    settings = WebSettings(provider="brave")
    assert "BRAVE_API_KEY" in (settings.problem() or "")
    assert "BRAVE_API_KEY" in search(settings).content
    assert WebSettings().problem() is None


def test_a_blank_query_is_refused() -> None:
    assert "query is blank" in search(None, " ").content


@pytest.mark.skipif(web_problem() is not None, reason=str(web_problem()))
def test_ddgs_without_a_network_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nobody listens, and nobody else gets the port
        monkeypatch.setenv("DDGS_PROXY", f"http://127.0.0.1:{silent.getsockname()[1]}")
        result = search(None)
    assert result.is_error
    assert "search provider ddgs got no answer from any search engine" in result.content
    assert result.content.endswith("see that this machine is online")
    assert "\n" not in result.content


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provider": "altavista"}, "unknown search provider 'altavista'; known: brave, ddgs"),
        ({"provider": "brave", "search_url": "ftp://x/"}, "must be an http or https URL"),
        ({"provider": "brave", "search_url": "https://u:p@x/"}, "without password"),
        ({"search_url": "https://x.example/"}, "provider ddgs"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WebSettings(**settings)


def test_every_provider_is_known_to_the_settings() -> None:
    assert PROVIDERS.keys() == KEY_VARIABLES.keys()
