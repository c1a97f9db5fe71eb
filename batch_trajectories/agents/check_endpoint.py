"""A model server on loopback that makes an agent run two commands, and keeps every request."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from aiohttp import web

from agent.gateway.server import make_server
from agent.wires.base import MadeCall, Wire
from agent.wires.wire import WireError, WireRequest
from agent.wires.wires import WIRES
from batch_trajectories.basics import exact_json

_COMMAND_FIELDS = ("command", "cmd", "commands", "script")
"""Names of the argument in which tools take a command."""

_FILLERS: Mapping[str, Any] = {
    "string": "check",
    "boolean": False,
    "integer": 10_000,
    "number": 10_000,
    "array": [],
    "object": {},
}
"""Values for other required arguments, by type. The number suits a timeout in milliseconds."""


def new_call(name: str, arguments: dict[str, Any]) -> MadeCall:
    """Make a call with a unique id, as real models do."""
    return MadeCall(f"call_{secrets.token_hex(8)}", name, arguments)


def command_call(tools: Sequence[Mapping[str, Any]], command: str) -> MadeCall | None:
    """Make a call that runs a command; None if no tool (in OpenAI form) takes one."""
    for tool in tools:
        function = tool["function"]
        schema = function.get("parameters") or {}
        properties = schema.get("properties") or {}
        field = next((name for name in _COMMAND_FIELDS if name in properties), None)
        if field is None:
            continue
        is_list = properties[field].get("type") == "array"
        arguments: dict[str, Any] = {field: ["bash", "-c", command] if is_list else command}
        for name in schema.get("required") or ():
            if name not in arguments:
                arguments[name] = _filler(properties.get(name) or {})
        return new_call(function["name"], arguments)
    return None


def _filler(schema: Mapping[str, Any]) -> Any:
    if choices := schema.get("enum"):
        return choices[0]
    kind = schema.get("type")
    return _FILLERS.get(kind if isinstance(kind, str) else "string", "check")


def reply_body(api: str, model: str, text: str, calls: Sequence[MadeCall]) -> dict[str, Any]:
    """Write the body of a reply with a text and calls."""
    return WIRES[api].write_reply(f"check_{secrets.token_hex(8)}", model, text, calls)


COMMANDS = ("echo checked > check.txt && cat check.txt", "cat check.txt && echo again")
"""The commands that the agent has to run, one per reply."""

ANSWER = "Both commands have run."
"""The final answer."""

_CLOSE_S = 2.0
"""Time for replies in flight when the server closes; 0 would be no limit."""

_TITLE = "Check"
"""The reply to requests that offer no tools, such as those for a title."""


class AnsweredCall(NamedTuple):
    """A model call of the agent, and the reply."""

    wire: Wire
    body: dict[str, Any]
    read: WireRequest
    text: str
    calls: tuple[MadeCall, ...]


class CheckEndpoint:
    """Answers each request by the number of commands whose results it has."""

    def __init__(self, final_command: str | None) -> None:
        """`final_command` replaces the answer for agents that end by a call; else None."""
        self.requests: list[AnsweredCall] = []
        """The answered requests, in order."""
        self.has_all_results = asyncio.Event()
        """Set once a request has the results of all commands."""
        self.may_end = asyncio.Event()
        """Releases such requests, which wait for it."""
        self._final_command = final_command
        self._steps: dict[str, int] = {}
        """The number of commands before a reply, by the id of the reply."""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Listen on a free port of 127.0.0.1; yields the URL."""
        server = make_server(self._handle)
        listener = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        finally:
            listener.close()
            await server.shutdown(_CLOSE_S)

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path = request.raw_path
        wire, operation = next(
            ((wire, what) for wire in WIRES.values() if (what := wire.operation("POST", path))),
            (None, "other"),
        )
        if wire is None or request.method != "POST" or operation == "other":
            return web.json_response({"data": [], "object": "list"})
        body = exact_json.loads(await request.read())
        if operation == "count_tokens":
            return web.json_response({"input_tokens": 10, "totalTokens": 10})
        try:
            read = wire.read(path, body)
        except WireError as error:
            return web.Response(status=400, body=wire.write_error(400, "bad_request", str(error)))
        return await self._answer(request, wire, body, read)

    async def _answer(
        self, request: web.BaseRequest, wire: Wire, body: dict[str, Any], read: WireRequest
    ) -> web.StreamResponse:
        step = self._steps.get(read.follows, 0) + sum(
            message["role"] == "tool" for message in read.messages
        )
        text, call = self._next_reply(read, step)
        if read.tools and step >= len(COMMANDS):
            self.has_all_results.set()
            await self.may_end.wait()
        calls = () if call is None else (call,)
        reply = reply_body(wire.api, read.model, text, calls)
        self._steps[reply.get("id", "")] = step
        self.requests.append(AnsweredCall(wire=wire, body=body, read=read, text=text, calls=calls))
        if not read.is_stream:
            return web.Response(body=wire.write_whole(reply), content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"".join(wire.write_stream(reply)))
        await response.write_eof()
        return response

    def _next_reply(self, read: WireRequest, step: int) -> tuple[str, MadeCall | None]:
        """Return the text of the next reply, and its call; None without one."""
        if not read.tools:
            return _TITLE, None
        if step < len(COMMANDS):
            call = command_call(read.tools, COMMANDS[step])
            return ("" if call else ANSWER), call
        if self._final_command is not None:
            return "", command_call(read.tools, self._final_command)
        return ANSWER, None
