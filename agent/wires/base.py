"""A dialect as agents speak it, and what the dialects have in common.

`agent.models.dialects` writes requests and reads replies; a `Wire` is the opposite side: it reads
requests and writes replies. Bodies pass through unchanged; a wire says what they mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from agent.models.dialects.dialect import Assembly, dialect_of, read_reply
from agent.models.model import Completion, ignored
from agent.wires.reading import Asked, Layout, Schemas, path_of, read_request
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
    """One server-sent event: JSON data, and its name if the API names its events."""
    name = f"event: {event}\n".encode() if event else b""
    return name + b"data: " + exact_json.dumps(data) + b"\n\n"


def type_of(status: int) -> str:
    """The type of an error with this status, as OpenAI and Anthropic name it."""
    return _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")


def lower_of(limit: int, given: Any) -> int:
    """The lower of the limit and `given`, if that is a number."""
    return min(limit, given) if type(given) is int else limit


class MadeCall(NamedTuple):
    """A call that a reply makes."""

    id: str
    name: str
    arguments: dict[str, Any]


class Wire(ABC):
    """One API, as agents speak it. Paths may have a query; they begin with a slash.

    The defaults are OpenAI's; an API that differs overrides them.
    """

    api: str
    """The API of the endpoints that answer, as in `ModelSettings.api`."""
    layout: Layout
    keepalive = b": keepalive\n\n"
    """What can be sent in a stream at any time to show that it is alive: a comment."""
    call_path: str
    """The end of the paths of model calls."""
    count_path = ""
    """What follows `call_path` in a request to count tokens, if the API has such requests."""
    headers = frozenset[str]()
    """The headers of agents that are passed on, lower-case."""
    limits: tuple[str, ...]
    """The fields of a body that limit the reply; the first is set where a body has none."""
    server_field = ""
    """A field beside `tools` that has the provider run tools."""
    automatic: Any = "auto"
    """The choice of tools that leaves it to the model."""
    closing = b""
    """The event with which every stream ends; b"" for none."""
    ends: tuple[str, ...]
    """Strings of which every event that ends a reply has one; see `is_end`."""

    def operation(self, method: str, path: str) -> Operation | None:
        """What a request to `path` asks for; None if it is not a request of this API."""
        plain = path_of(path)
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

        `before` are earlier requests of the same agent (see `Threads.read`): what the body
        repeats of them is not read again. `earlier` knows what it continues without repeating it.
        Raises `WireError`.
        """
        return read_request(self.layout, body, self.asked(path, body), volatile, before, earlier)

    def with_items(
        self, body: Mapping[str, Any], items: Mapping[str, Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """The body of a call with the `items` of earlier replies where it only names their ids."""
        del items
        return body

    def asked(self, path: str, body: Mapping[str, Any]) -> Asked:
        """What a call asks for beside the fields that have the same meaning for all."""
        del path
        system, messages = self.messages_of(body)
        return Asked(
            model=body.get("model"),
            system=system,
            messages=messages,
            tools=self.tools_of(body),
            is_stream=body.get("stream") is True,
            max_tokens=next(
                (body[name] for name in self.limits if body.get(name) is not None), None
            ),
            follows=self.follows(body),
        )

    def follows(self, body: Mapping[str, Any]) -> str:
        """The id of what a call continues without repeating it, "" if it repeats all."""
        del body
        return ""

    def has_followed(self, request: WireRequest, reply: Mapping[str, Any]) -> bool:
        """Whether the endpoint has read what the request continues by an id."""
        del request, reply
        return True

    @abstractmethod
    def messages_of(self, body: Mapping[str, Any]) -> tuple[Any, list[Any]]:
        """The system prompt that is not among the messages, and the messages."""

    def tools_of(self, body: Mapping[str, Any]) -> Any:
        """The tools, with an object for each other field that has the provider run tools."""
        return body.get("tools")

    def rewritten(
        self,
        path: str,
        body: Mapping[str, Any],
        *,
        model: str | None = None,
        max_tokens: int | None = None,
        without_server_tools: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Path and body with another model name, a limit on the reply of at most `max_tokens`, or
        without the tools that the provider would run. `body` is not altered.
        """
        new = dict(body)
        if model is not None:
            new["model"] = model
        if max_tokens is not None:
            names = [name for name in self.limits if new.get(name) is not None] or self.limits[:1]
            new |= {name: lower_of(max_tokens, new.get(name)) for name in names}
        if without_server_tools:
            new.pop(self.server_field, None)
            _remove_server_tools(new, self.layout.read_tool, automatic=self.automatic)
        return path, new

    def upstream_path(self, path: str) -> str:
        """Where the request goes, below the root of an endpoint."""
        counts = path_of(path).endswith(self.count_path)
        return dialect_of(self.api).path + (self.count_path if counts else "")

    def request_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Those of an agent's headers (names in any case) that are passed on, names lower-case.

        Never keys, cookies, or headers of the connection.
        """
        lowered = ((name.lower(), value) for name, value in headers.items())
        return {name: value for name, value in lowered if name in self.headers}

    def read_reply(self, body: bytes) -> Completion:
        """What a reply says. Raises `ModelError`."""
        return read_reply(self.api, body)

    def assembly(self) -> Assembly:
        """Puts a streamed reply together."""
        return dialect_of(self.api).assembly(ignored)

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """A recorded reply as the body that answers a request without streaming."""
        return exact_json.dumps(body)

    @abstractmethod
    def stream_of(self, body: Mapping[str, Any]) -> list[bytes]:
        """A recorded reply as the events that answer a request with streaming.

        Their assembly is `body` again.
        """

    @abstractmethod
    def write_reply(
        self, id: str, model: str, text: str, calls: Sequence[MadeCall]
    ) -> dict[str, Any]:
        """The whole body of a reply with this text and these calls; its usage is made up."""

    def last_event(self, data: str) -> bool:
        """Whether a stream's event with this data ends the reply: it and all later events have to
        wait until the reply is durable.
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
        """Whether an event in which one of `ends` occurs ends the reply.

        May raise `AttributeError` and `TypeError` where an event has another form.
        """
        return event.get("type") in self.ends

    def error(self, status: int, kind: str, message: str) -> bytes:
        """The body of an error reply. `kind` is a word such as "budget" or "stopped"."""
        error = {"message": message, "type": type_of(status), "param": None, "code": kind}
        return exact_json.dumps({"error": error})

    @abstractmethod
    def stream_error(self, status: int, kind: str, message: str) -> bytes:
        """An event that ends a stream whose headers are sent.

        `status` is what would have been sent instead: clients repeat the call from 500 on.
        """


def _remove_server_tools(
    body: dict[str, Any], read_tool: Callable[[Mapping[str, Any]], Schemas], *, automatic: Any
) -> None:
    """Remove the tools that the provider would run.

    `automatic` replaces the choice of a tool that is gone.
    """
    tools = body.get("tools") or []
    own_tools = [tool for tool in tools if not isinstance(read_tool(tool), str)]
    if len(own_tools) == len(tools):
        return
    if not own_tools:
        for key in ("tools", "tool_choice", "parallel_tool_calls"):
            body.pop(key, None)
        return
    body["tools"] = own_tools
    chosen = _chosen(body.get("tool_choice"))
    if chosen is not None and chosen not in map(_name, own_tools):
        body["tool_choice"] = automatic


def _chosen(choice: Any) -> str | None:
    """The tool that a choice prescribes; None if it leaves the choice to the model."""
    if not isinstance(choice, dict) or choice.get("type") in ("auto", "any", "none"):
        return None
    return _name(choice)


def _name(tool: Mapping[str, Any]) -> str:
    """A tool's name: in OpenAI's chat API it is one level down."""
    inner = tool.get(str(tool.get("type")))
    named = inner if isinstance(inner, dict) else tool
    return str(named.get("name") or named.get("type") or "")
