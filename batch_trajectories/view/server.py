"""The server: its addresses, and how it answers errors."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web

from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import RunError
from batch_trajectories.view import api
from batch_trajectories.view.conversation import NoSuchRecord
from batch_trajectories.view.events import events
from batch_trajectories.view.guard import HEADERS, AccessGuard, AccessRefused
from batch_trajectories.view.index.filters import BadFilter
from batch_trajectories.view.page import frame
from batch_trajectories.view.runs import NoSuchRun
from batch_trajectories.view.state import State

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""The bytes that a request's body may have."""
_LOGIN_PAUSE_S = 1.0

MOST_LINE_BYTES = 4 << 20
"""The bytes that a request line may have; browsers send no longer ones."""
_MAX_ADDRESS_BYTES = 64 << 10
"""A selection of many rows is longer than the 8 KB that aiohttp takes on its own."""

T = TypeVar("T")


class ViewServer:
    """Answers requests about the runs of a `State`."""

    def __init__(self, state: State, guard: AccessGuard) -> None:
        self._state, self._guard = state, guard
        self._logins = asyncio.Lock()

    def application(self) -> web.Application:
        """The application to serve."""
        app = web.Application(middlewares=[self._answer_errors], client_max_size=MOST_BYTES)
        app.add_routes(
            [
                web.get("/", self._page),
                web.get("/favicon.ico", self._nothing),
                web.get("/static/page.js", self._script),
                web.get("/static/page.css", self._style),
                web.post("/api/login", self._login),
                web.get("/api/events", self._events),
                *(web.get(path, self._make_handler(read)) for path, read in api.READS.items()),
                *(web.post(path, self._make_handler(do)) for path, do in api.WRITES.items()),
            ]
        )
        return app

    @web.middleware
    async def _answer_errors(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Check who asks, and turn errors into answers."""
        try:
            if len(request.raw_path) > _MAX_ADDRESS_BYTES:
                most = f"{_MAX_ADDRESS_BYTES >> 10} KiB"
                raise web.HTTPRequestURITooLong(reason=f"the address is longer than {most}")
            self._guard.check_origin(request)
            if request.path.startswith("/api/") and request.path != "/api/login":
                self._guard.check_access(request)
            response = await handler(request)
        except web.HTTPException as error:
            response = _refusal(error.status, error.reason)
        except AccessRefused as error:
            needs = {"login": self._guard.has_password} if error.status == 401 else {}
            response = _refusal(error.status, str(error), **needs)
        except (NoSuchRun, NoSuchRecord) as error:
            response = _refusal(404, str(error))
        except (BadFilter, api.BadRequest) as error:
            response = _refusal(400, str(error))
        except (RunError, OSError) as error:
            response = _refusal(409, str(error))
        except Exception:
            log.exception("%s %s", request.method, request.path)
            response = _refusal(500, "a bug in this program; its terminal has the details")
        if not response.prepared:
            response.headers.update(HEADERS)
        return response

    def _make_handler(
        self, do: Callable[[State, api.Query, Any], Any]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        """A handler that calls `do` in a thread, with what the request holds."""

        async def handler(request: web.Request) -> web.Response:
            body = await _body(request) if request.method == "POST" else None
            query = api.Query(request.query, request.match_info.get("run", ""))
            content = await asyncio.to_thread(lambda: _json(do(self._state, query, body)))
            return web.Response(body=content, content_type="application/json")

        return handler

    async def _page(self, request: web.Request) -> web.Response:
        """The page; with the token of the printed address, a cookie first."""
        if (token := request.query.get("token")) is not None:
            if not self._guard.is_token(token):
                raise AccessRefused(
                    401, "this token is of another start; open the address printed last"
                )
            response = web.Response(status=303, headers={"Location": "/"})
            self._guard.give_access(request, response)
            return response
        return _text(frame.html(), "text/html")

    async def _nothing(self, request: web.Request) -> web.Response:
        """Answer a request that browsers make on their own."""
        return web.Response(status=204)

    async def _script(self, request: web.Request) -> web.Response:
        return _text(frame.script(), "text/javascript")

    async def _style(self, request: web.Request) -> web.Response:
        return _text(frame.style(), "text/css")

    async def _login(self, request: web.Request) -> web.Response:
        body = await _body(request)
        password = body.get("password") if isinstance(body, dict) else None
        async with self._logins:  # one at a time, so that guessing takes long
            if not isinstance(password, str) or not self._guard.is_password(password):
                await asyncio.sleep(_LOGIN_PAUSE_S)
                raise AccessRefused(401, "this is not the password")
        response = web.json_response({})
        self._guard.give_access(request, response)
        return response

    async def _events(self, request: web.Request) -> web.StreamResponse:
        return await events(request, self._state)


def _refusal(status: int, text: str, **more: Any) -> web.Response:
    return web.Response(
        status=status, body=_json({"error": text, **more}), content_type="application/json"
    )


def _text(content: bytes, content_type: str) -> web.Response:
    return web.Response(body=content, content_type=content_type, charset="utf-8")


def _json(value: Any) -> bytes:
    try:
        return orjson.dumps(value)
    except TypeError:  # integers of more than 64 bits, half surrogates
        return exact_json.dumps(value)


async def _body(request: web.Request) -> Any:
    try:
        return orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise api.BadRequest(f"the body is not JSON: {error}") from None
