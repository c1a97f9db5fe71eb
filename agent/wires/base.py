"""The server side of an API that agents speak, with OpenAI's behaviour as the default.

`agent.models.dialects` is the client side: it writes requests and reads replies. A `Wire` reads
requests and writes replies. Bodies pass through unchanged; a wire tells their meaning.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from agent.models.dialects.dialect import Assembly, get_dialect, read_reply
from agent.models.model import Completion, ignore_event
from agent.wires.reading import CallFields, Layout, Schemas, read_request, strip_query
from agent.wires.wire import (
    NOTHING_VOLATILE,
    Earlier,
    Operation,
    Volatile,
    WireRequest,
    nothing_earlier,
)
from batch_trajectories.basics import exact_json

_TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}

SERVER_ERROR = "server_error"
"""OpenAI's type for a temporary error."""


def sse(data: Any, *, event: str = "") -> bytes:
    """Write a server-sent event: JSON data, and a name if the API names its events."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + exact_json.dumps(data) + b"\n\n"


def error_type(status: int) -> str:
    """The type of an error with this HTTP status, as OpenAI and Anthropic name it."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def lower_limit(limit: int, given: Any) -> int:
    """Return `given` if it is an integer below the limit, else the limit."""
    return min(limit, given) if type(given) is int else limit


class MadeCall(NamedTuple):
    """A tool call of a reply."""

    id: str
    name: str
    arguments: dict[str, Any]


class Wire(ABC):
    """The server side of one API. Paths begin with a slash and may have a query.

    The defaults are OpenAI's; an API that differs overrides them.
    """

    api: str
    """The API of the endpoints that answer, as in `ModelSettings.api`."""
    layout: Layout
    keepalive = b": keepalive\n\n"
    """A comment that can be sent in a stream at any time to show that it is alive."""
    call_path: str
    """The end of the paths of model calls."""
    count_path = ""
    """The path behind `call_path` of requests that count tokens; "" if the API has none."""
    headers = frozenset[str]()
    """The headers of agents that are passed on, lower-case."""
    limits: tuple[str, ...]
    """The fields of a body that limit the reply; a body without any gets the first."""
    server_field = ""
    """The field beside `tools` that makes the provider run tools; "" for none."""
    automatic: Any = "auto"
    """The value of `tool_choice` that leaves the choice to the model."""
    closing = b""
    """The event that ends every stream; b"" for none."""
    ends: tuple[str, ...]
    """Strings of which each event that ends a reply has one; see `is_end`."""

    def operation(self, method: str, path: str) -> Operation | None:
        """Return the purpose of a request; None if it is not a request of this API."""
        plain = strip_query(path)
        if plain.endswith(self.call_path):
            return "call" if method == "POST" else "other"
        if not self.count_path or f"{self.call_path}/" not in plain:
            return None
        counts = plain.endswith(self.call_path + self.count_path) and method == "POST"
        return "count_tokens" if counts else "other"

    def read(
        self,
        path: str,
        body: Mapping[str, Any],
        volatile: Volatile = NOTHING_VOLATILE,
        before: Sequence[WireRequest] = (),
        earlier: Earlier = nothing_earlier,
    ) -> WireRequest:
        """Read the body of a model call.

        `before` are earlier requests of the same agent, whose parts are reused if the body repeats
        them. `earlier` finds the messages that the body continues by an id. Raises `WireError`.
        """
        return read_request(
            self.layout, body, self.read_fields(path, body), volatile, before, earlier
        )

    def insert_items(
        self, body: Mapping[str, Any], items: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Replace references to items of earlier replies by the `items` with these ids."""
        del items
        return body

    def read_fields(self, path: str, body: Mapping[str, Any]) -> CallFields:
        """Extract the fields of a call that each API names in its own way."""
        del path
        system, messages = self.split_messages(body)
        return CallFields(
            model=body.get("model"),
            system=system,
            messages=messages,
            tools=self.collect_tools(body),
            is_stream=body.get("stream") is True,
            max_tokens=next(
                (body[name] for name in self.limits if body.get(name) is not None), None
            ),
            follows=self.continued_id(body),
        )

    def continued_id(self, body: Mapping[str, Any]) -> str:
        """The id of the reply or conversation that a call continues; "" if it repeats all."""
        del body
        return ""

    def has_read_earlier(self, request: WireRequest, reply: Mapping[str, Any]) -> bool:
        """Whether the reply shows that the endpoint read the messages continued by an id."""
        del request, reply
        return True

    @abstractmethod
    def split_messages(self, body: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """Return the system prompt that is not among the messages, and the messages."""

    def collect_tools(self, body: Mapping[str, Any]) -> Any:
        """Return the tools, and an object per other field that makes the provider run tools."""
        return body.get("tools")

    def rewrite(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
        without_server_tools: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Return the path and a copy of the body with changes; None or False: no change.

        `model` is another model name, `max_tokens` the highest limit on the reply.
        `without_server_tools` removes the tools that the provider would run.
        """
        new = dict(body)
        if model is not None:
            new["model"] = model
        if max_tokens is not None:
            names = [name for name in self.limits if new.get(name) is not None] or self.limits[:1]
            new |= {name: lower_limit(max_tokens, new.get(name)) for name in names}
        if without_server_tools:
            new.pop(self.server_field, None)
            _remove_server_tools(new, self.layout.read_tool, automatic=self.automatic)
        return path, new

    def upstream_path(self, path: str) -> str:
        """The path that the request is sent to, below the root of an endpoint."""
        counts = strip_query(path).endswith(self.count_path)
        return get_dialect(self.api).path + (self.count_path if counts else "")

    def request_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Select the headers of an agent that are passed on; their names become lower-case.

        Never includes keys, cookies, or headers of the connection.
        """
        lowered = ((name.lower(), value) for name, value in headers.items())
        return {name: value for name, value in lowered if name in self.headers}

    def read_reply(self, body: bytes) -> Completion:
        """Read the body of a reply. Raises `ModelError`."""
        return read_reply(self.api, body)

    def assembly(self) -> Assembly:
        """Make an object that puts a streamed reply together."""
        return get_dialect(self.api).assembly(ignore_event)

    def write_whole(self, body: Mapping[str, Any]) -> bytes:
        """Write a recorded reply as the body that answers a request without streaming."""
        return exact_json.dumps(body)

    @abstractmethod
    def write_stream(self, body: Mapping[str, Any]) -> list[bytes]:
        """Write a recorded reply as the events that answer a request with streaming.

        Put together, they are `body` again.
        """

    @abstractmethod
    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """Write the body of a reply with this text and these calls, and with invented usage."""

    def ends_reply(self, data: str) -> bool:
        """Whether a stream's event with this data ends the reply.

        That event and all later ones have to wait until the reply is on disk.
        """
        if not any(f'"{mark}"' in data for mark in self.ends):
            return False
        try:
            return self.is_end(orjson.loads(data))
        except (orjson.JSONDecodeError, AttributeError, TypeError):
            return False

    def is_closing(self, data: str) -> bool:
        """Whether an event with this data is the `closing` one."""
        del data
        return False

    def is_end(self, event: Any) -> bool:
        """Whether an event ends the reply, given that one of `ends` occurs in it.

        May raise `AttributeError` and `TypeError` for events in another form.
        """
        return event.get("type") in self.ends

    def write_error(self, status: int, kind: str, message: str) -> bytes:
        """Write the body of an error reply. `kind` is a word such as "budget" or "stopped"."""
        error = {"message": message, "type": error_type(status), "param": None, "code": kind}
        return exact_json.dumps({"error": error})

    @abstractmethod
    def write_stream_error(self, status: int, kind: str, message: str) -> bytes:
        """Write the error event that ends a stream whose headers are already sent.

        `status` is the HTTP status that would have been sent instead: from 500 on, clients repeat
        the call.
        """


def _remove_server_tools(
    body: dict[str, Any], read_tool: Callable[[Mapping[str, Any]], Schemas], *, automatic: Any
) -> None:
    """Remove the tools that the provider would run from `body`.

    `automatic` replaces the choice of a tool that is removed.
    """
    tools = body.get("tools") or []
    agent_tools = [tool for tool in tools if not isinstance(read_tool(tool), str)]
    if len(agent_tools) == len(tools):
        return
    if not agent_tools:
        for key in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(key, None)
        return
    body["tools"] = agent_tools
    chosen = _chosen_tool(body.get("tool_choice"))
    if chosen is not None and chosen not in map(_tool_name, agent_tools):
        body["tool_choice"] = automatic


def _chosen_tool(choice: Any) -> str | None:
    """The name of the tool that a choice prescribes; None if the model may choose."""
    if not isinstance(choice, dict) or choice.get("type") in ("auto", "any", "none"):
        return None
    return _tool_name(choice)


def _tool_name(tool: Mapping[str, Any]) -> str:
    """The name of a tool; in OpenAI's chat API it is one level down."""
    inner = tool.get(str(tool.get("type")))
    named = inner if isinstance(inner, dict) else tool
    return str(named.get("name") or named.get("type") or "")
