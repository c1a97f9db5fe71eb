"""The gateway of one agent: an HTTP server that speaks the APIs of model providers."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from agent.gateway.answers import Answer, ListModels, Refusal, list_names
from agent.gateway.relay import AgentCall, Relay
from agent.models.dialects.openai_responses import API
from agent.wires.base import SERVER_ERROR, Wire
from agent.wires.reading import strip_query
from agent.wires.wire import WireError
from agent.wires.wires import WIRES, find_wires
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.closing import close_all

# Background responses, which an agent requests by their ids.
#
# OpenAI's Responses API answers a request with `background` at once; the client then polls for
# the response by its id until it is complete. Here the call is an ordinary one, with the retries,
# limits and records of all calls; only the agent does not wait for it. A recorded response can be
# requested by its id, too, also after a crash.

_RESPONSES_PATH = "/responses/"
_CANCEL = "/cancel"


@dataclass
class _BackgroundResponse:
    """A response that is being made."""

    body: dict[str, Any]
    """The placeholder response that is returned while the model still answers."""
    reply: Answer
    reading: asyncio.Task[None]
    """A reader of the reply, so that an equal request does not join it."""


class StoredResponses:
    """The responses of one agent, by their ids."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._begun: dict[str, _BackgroundResponse] = {}

    def answer(self, call: AgentCall) -> Answer:
        """Return the reply to a model call, or the id of one in the background.

        Raises `WireError`.
        """
        if call.wire.api != API:
            return self._relay.answer(call)
        is_background = call.body.get("background") is True
        body = {name: value for name, value in call.body.items() if name != "background"}
        earlier = self._begun.get(str(body.get("previous_response_id")))
        if earlier is not None:
            if not earlier.reply.is_done or earlier.reply.refusal is not None:
                raise WireError("previous_response_id: that response is not completed")
            body["previous_response_id"] = _parse_reply(earlier.reply)["id"]
        if is_background or earlier is not None:
            call = call._replace(body=body, content=exact_json.dumps(body))
        reply = self._relay.answer(call)
        # An agent waits for a stream. A reply that is complete is returned at once.
        if not is_background or reply.is_stream or reply.is_done:
            return reply
        return self._begin(body, reply)

    def _begin(self, body: Mapping[str, Any], reply: Answer) -> Answer:
        id = f"resp_{secrets.token_hex(24)}"
        begun = {
            "id": id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "queued",
            "background": True,
            "error": None,
            "incomplete_details": None,
            "model": body.get("model"),
            "output": [],
            "usage": None,
            "instructions": body.get("instructions"),
            "metadata": body.get("metadata") or {},
            "tools": body.get("tools") or [],
            "tool_choice": body.get("tool_choice", "auto"),
            "parallel_tool_calls": body.get("parallel_tool_calls", True),
        }
        reading = asyncio.create_task(self._read(reply))
        self._begun[id] = _BackgroundResponse(begun, reply, reading)
        return _respond(begun)

    async def _read(self, reply: Answer) -> None:
        with self._relay.answers.reading(reply):
            await reply.wait_until_done()

    def operate(self, method: str, wire: Wire, path: str) -> Answer | None:
        """Answer a request that names a response; return None for other requests."""
        plain = strip_query(path)
        _, place, id = plain.rpartition(_RESPONSES_PATH)
        if wire.api != API or not place:
            return None
        if method == "GET" and "/" not in id:
            return self._state(id, path)
        if method == "POST" and id.endswith(_CANCEL):
            return self._cancel(id.removesuffix(_CANCEL), path)
        if method == "DELETE" and "/" not in id:
            return _respond({"id": id, "object": "response", "deleted": True})
        return None

    def _state(self, id: str, path: str) -> Answer:
        if "stream=true" in path:
            message = "a response is given whole here: ask for it without stream=true"
            return Answer(Refusal(400, "bad_request", message))
        begun = self._begun.get(id)
        if begun is None:
            return self._find_reply(id)
        if not begun.reply.is_done or begun.body["status"] == "cancelled":
            return _respond(begun.body)
        if (refusal := begun.reply.refusal) is not None:
            code = SERVER_ERROR if refusal.status >= 500 else "invalid_prompt"
            error = {"code": code, "message": f"{refusal.message} ({refusal.kind})"}
            return _respond({**begun.body, "status": "failed", "error": error})
        return _respond(_parse_reply(begun.reply))

    def _cancel(self, id: str, path: str) -> Answer:
        """Cancel a response for the agent. The endpoint completes it: it is paid and recorded."""
        begun = self._begun.get(id)
        if begun is not None and not begun.reply.is_done:
            begun.body["status"] = "cancelled"
        return self._state(id, path)

    def _find_reply(self, id: str) -> Answer:
        for exchange in self._relay.exchanges:
            if exchange["body"].get("id") == id:
                return _respond(exchange["body"])
        message = f"Response with id '{id}' not found: send its request again."
        return Answer(Refusal(404, "not_found", message))


def _parse_reply(reply: Answer) -> dict[str, Any]:
    made: dict[str, Any] = exact_json.loads(b"".join(reply.parts))
    return made


def _respond(body: Mapping[str, Any]) -> Answer:
    answer = Answer()
    answer.finish([exact_json.dumps(body)])
    return answer


log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 64 * 2**20
"""Maximum bytes of a request; real ones are a hundred times smaller."""

KEEPALIVE_S = 3.0
"""Silence after which a stream sends a sign of life: agents give up on silent connections."""

_CLOSE_S = 2.0
"""Time for connections to read the end of their replies when the gateway closes."""

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_JSON = "application/json"
_CODINGS: Mapping[str, Literal["gzip", "brotli", "zstd"] | None]
_CODINGS = {"gzip": "gzip", "deflate": None, "br": "brotli", "zstd": "zstd"}
"""Accepted values of Content-Encoding, and pyarrow's codec for each. None: zlib, as pyarrow lacks
deflate."""
NO_NAMES = list_names(())
"""The answer to requests for a list of models if none is known."""


class Gateway:
    """Relays the model calls of one agent and records them; see `Relay`."""

    def __init__(
        self,
        relay: Relay,
        *,
        wires: Collection[str],
        models: ListModels = NO_NAMES,
        keepalive_s: float = KEEPALIVE_S,
    ) -> None:
        """`wires` are the dialects that the agent may speak; `models` answers with its models."""
        self.relay = relay
        self._models = models
        self._wires = find_wires(wires)
        self._stored = StoredResponses(relay)
        self._keepalive_s = keepalive_s
        self._key: str | None = None
        self._servers: list[tuple[asyncio.Server, web.Server]] = []

    async def serve_unix(self, path: Path) -> None:
        """Listen on a socket at `path`. Whoever can open it is taken for the agent."""
        loop = asyncio.get_running_loop()
        server = make_server(self.handle)
        self._servers.append((await loop.create_unix_server(server, path), server))

    async def serve_tcp(self) -> tuple[int, str]:
        """Listen on a free port of 127.0.0.1; return the port and the key that requests need."""
        loop = asyncio.get_running_loop()
        self._key = secrets.token_urlsafe(24)
        server = make_server(self.handle)
        listener = await loop.create_server(server, "127.0.0.1", 0)
        self._servers.append((listener, server))
        return listener.sockets[0].getsockname()[1], self._key

    async def close(self) -> None:
        """Accept no more connections, wait for the calls in flight, and record them.

        Raises the error that made further calls impossible; see `Relay.close`.
        """
        for listener, _ in self._servers:
            listener.close()
        try:
            await self.relay.close()
        finally:
            for _, server in self._servers:
                server.pre_shutdown()
            await close_all(*(partial(server.shutdown, _CLOSE_S) for _, server in self._servers))

    async def handle(self, request: web.BaseRequest, path: str | None = None) -> web.StreamResponse:
        """Answer a request; `path` is used instead of its own path."""
        path = request.raw_path if path is None else path
        wire = next((w for w in self._wires if w.operation(request.method, path)), None)
        if self._key is not None and not has_key(request, self._key):
            return _error_response(
                wire, Refusal(401, "auth", "the key is not that of this gateway")
            )
        if wire is None:
            return await self._answer_probe(request, path)
        operation = wire.operation(request.method, path)
        if operation == "other":
            if "upgrade" in request.headers:
                return web.Response(status=426)  # clients then send the request in the usual way
            if (stored := self._stored.operate(request.method, wire, path)) is not None:
                return _body_response(wire, stored)
            return self._refuse_unknown(wire, request, path)
        try:
            call = await _read(request, wire, path)
            if operation == "count_tokens":
                reply = await self.relay.count_tokens(call)
            else:
                reply = self._stored.answer(call)
        except WireError as error:
            self.relay.refused = str(error)
            return _error_response(wire, Refusal(400, "bad_request", str(error)))
        except web.HTTPRequestEntityTooLarge:
            message = f"the request is larger than {MAX_REQUEST_BYTES // 2**20} MiB"
            self.relay.refused = message
            return _error_response(wire, Refusal(413, "bad_request", message))
        with self.relay.answers.reading(reply):
            if reply.is_stream:
                return await self._send_events(request, reply, wire)
            await reply.wait_until_done()
            response = _body_response(wire, reply)
            await response.prepare(request)
            await response.write_eof()
            return response

    async def _answer_probe(self, request: web.BaseRequest, path: str) -> web.Response:
        """Answer requests by which clients check that a server responds, and list its models."""
        plain = strip_query(path)
        if request.method in ("GET", "HEAD"):
            if not plain:
                return web.Response()
            if plain.endswith("/models"):
                reply = await self._models(path, _request_headers(request))
                return _body_response(None, reply)
        return self._refuse_unknown(None, request, path)

    def _refuse_unknown(
        self, wire: Wire | None, request: web.BaseRequest, path: str
    ) -> web.Response:
        """Refuse a request that is no model call of this agent's APIs."""
        message = f"{request.method} {path}: the gateway answers model calls only"
        others = (other for other in WIRES.values() if other.operation(request.method, path))
        if wire is None and (other := next(others, None)) is not None:
            message = f"{request.method} {path}: `speaks` of the agent does not name {other.api}"
            self.relay.refused = message
        elif request.method == "POST":  # others ask whether something is there
            self.relay.refused = self.relay.refused or message
        return _error_response(wire, Refusal(404, "not_found", message))

    async def _send_events(
        self, request: web.BaseRequest, reply: Answer, wire: Wire
    ) -> web.StreamResponse:
        """Send a reply as it comes. The status is sent with the first part."""
        await self._wait_for_more(reply, 0)
        if reply.refusal is not None and not reply.parts:
            response: web.StreamResponse = _error_response(wire, reply.refusal)
            await response.prepare(request)
            await response.write_eof()
            return response
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        sent = 0
        while True:
            parts = reply.parts[sent:]
            sent += len(parts)
            if parts:
                await response.write(b"".join(parts))
            elif not reply.is_done:
                await response.write(wire.keepalive)
            if reply.is_done and sent == len(reply.parts):
                break
            await self._wait_for_more(reply, sent)
        if reply.refusal is not None:
            status, kind, message, _ = reply.refusal
            await response.write(wire.write_stream_error(status, kind, message))
        await response.write_eof()
        return response

    async def _wait_for_more(self, reply: Answer, known: int) -> None:
        """Wait for more parts of a reply, at most for the keep-alive interval."""
        try:
            async with asyncio.timeout(self._keepalive_s):
                await reply.wait_for_more(known)
        except TimeoutError:
            return


def make_server(
    handler: Callable[[web.BaseRequest], Any],
) -> web.Server:
    """Make an HTTP server whose handler is cancelled when its client disconnects."""
    loop = asyncio.get_running_loop()

    def make_request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> Any:
        return web.BaseRequest(
            message, payload, protocol, writer, task, loop, client_max_size=MAX_REQUEST_BYTES
        )

    return web.Server(
        handler,
        request_factory=make_request,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # aiohttp's decoder knows neither br nor zstd
    )


def request_key(request: web.BaseRequest) -> str:
    """The API key of a request, from the header or query of any API; "" without one."""
    headers = request.headers
    for name in ("x-api-key", "x-goog-api-key", "api-key"):
        if name in headers:
            return headers[name]
    return headers.get("Authorization", "").removeprefix("Bearer ") or request.query.get("key", "")


def has_key(request: web.BaseRequest, key: str) -> bool:
    """Whether a request has this key."""
    return hmac.compare_digest(request_key(request).encode(), key.encode())


async def read_body(request: web.BaseRequest) -> bytes:
    """Read the body of a request and decompress it.

    Raises `WireError`, and `web.HTTPRequestEntityTooLarge` above `MAX_REQUEST_BYTES`.
    """
    content = await request.read()
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding == "identity":
        return content
    if coding not in _CODINGS:
        known = ", ".join(_CODINGS)
        raise WireError(f"Content-Encoding {coding!r} is not known: send {known}, or none")
    try:
        # In a thread: a small body can take seconds, and other conversations must go on.
        unpacked = await asyncio.to_thread(_unpack, content, coding)
    except (OSError, zlib.error) as error:
        raise WireError(f"the request is not {coding}, as it says: {error}") from error
    if len(unpacked) > MAX_REQUEST_BYTES:
        raise web.HTTPRequestEntityTooLarge(MAX_REQUEST_BYTES, len(unpacked))
    return unpacked


def _unpack(content: bytes, coding: str) -> bytes:
    """Decompress up to one byte more than a request may have.

    Raises `OSError` and `zlib.error`.
    """
    if (codec := _CODINGS[coding]) is None:
        inflating = zlib.decompressobj()
        unpacked = inflating.decompress(content, MAX_REQUEST_BYTES + 1)
        if not inflating.eof and len(unpacked) <= MAX_REQUEST_BYTES:
            raise zlib.error("it is cut")
        return unpacked
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(content), codec) as stream:
        return bytes(stream.read(MAX_REQUEST_BYTES + 1))


async def _read(request: web.BaseRequest, wire: Wire, path: str) -> AgentCall:
    content = await read_body(request)
    has_halves = False
    try:
        body = exact_json.loads(content)
    except exact_json.JSONDecodeError:
        try:
            body = exact_json.loads_with_valid_text(content)
        except exact_json.JSONDecodeError as error:
            raise WireError(f"the request is not JSON: {error}") from error
        has_halves = True
    if not isinstance(body, dict):
        raise WireError("the request is not a JSON object")
    if key := exact_json.repeated_key(content, body):
        raise WireError(
            f"{key}: it is there twice; servers differ in which one they take: send it once"
        )
    headers = _request_headers(request)
    repeats = headers.get("x-stainless-retry-count", "0")
    return AgentCall(
        wire=wire,
        path=path,
        headers=headers,
        content=content,
        body=body,
        is_repeat=repeats not in ("", "0"),
        has_halves=has_halves,
    )


def _request_headers(request: web.BaseRequest) -> Mapping[str, str]:
    return {name.lower(): value for name, value in request.headers.items()}


def _body_response(wire: Wire | None, reply: Answer) -> web.Response:
    if reply.refusal is not None:
        return _error_response(wire, reply.refusal)
    return web.Response(body=b"".join(reply.parts), content_type=_JSON)


def _error_response(wire: Wire | None, refusal: Refusal) -> web.Response:
    status, kind, message, body = refusal
    if body is None:
        error = {"error": {"message": message, "type": kind}}
        body = exact_json.dumps(error) if wire is None else wire.write_error(status, kind, message)
    # Some SDKs decide by this header, not by the status, whether to repeat a call.
    headers = {"x-should-retry": "false"} if status == 400 else {}
    return web.Response(status=status, body=body, content_type=_JSON, headers=headers)
