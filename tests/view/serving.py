"""Starts the server in this process and asks it over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

from batch_trajectories.view.guard import AccessGuard
from batch_trajectories.view.runs import Places
from batch_trajectories.view.server import MOST_LINE_BYTES, ViewServer
from batch_trajectories.view.state import State


class Answer(NamedTuple):
    """What the server answered."""

    status: int
    body: Any
    headers: Mapping[str, str]


class Viewer:
    """A browser's part: it has the address and the token."""

    def __init__(self, port: int, token: str) -> None:
        self.port, self.token = port, token

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        headers: Mapping[str, str] | None = None,
        is_known: bool = True,
        **query: object,
    ) -> Answer:
        """GET a path of the API, or POST a body; `is_known`: with the token."""
        url = f"http://127.0.0.1:{self.port}{path}"
        if query:
            url += "?" + urllib.parse.urlencode(query, doseq=True)
        given = {"Authorization": f"Bearer {self.token}"} if is_known else {}
        data = None if body is None else json.dumps(body).encode()
        if data is not None:
            given["Content-Type"] = "application/json"
        request = urllib.request.Request(url, data, given | dict(headers or {}))
        try:
            with urllib.request.build_opener(_Stays).open(request, timeout=60) as response:
                return _answer(response)
        except urllib.error.HTTPError as error:
            return _answer(error)

    def get(self, path: str, **query: Any) -> Any:
        """The body of a GET that works."""
        answer = self.ask(f"/api{path}", **query)
        assert answer.status == 200, answer.body
        return answer.body

    def post(self, path: str, body: object) -> Any:
        """The body of a POST that works."""
        answer = self.ask(f"/api{path}", body)
        assert answer.status == 200, answer.body
        return answer.body


class _Stays(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _answer(response: Any) -> Answer:
    content = response.read()
    is_json = response.headers.get_content_type() == "application/json"
    return Answer(response.status, json.loads(content) if is_json else content, response.headers)


@contextmanager
def viewing(*places: Path | str, who: str = "ann", password: str | None = None) -> Iterator[Viewer]:
    """Serve these places on a free port of loopback."""
    state = State(Places([str(place) for place in places]), who)
    guard = AccessGuard("127.0.0.1", password)
    loop = asyncio.new_event_loop()
    started: list[int] = []
    is_up = threading.Event()

    async def run() -> None:
        runner = web.AppRunner(
            ViewServer(state, guard).application(),
            handler_cancellation=True,
            max_line_size=MOST_LINE_BYTES,
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.append(runner.addresses[0][1])
        is_up.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(run(),))
    thread.start()
    try:
        assert is_up.wait(60)
        yield Viewer(started[0], guard.token)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
        loop.close()
        state.close()
