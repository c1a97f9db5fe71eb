"""The flat format: a session is a list of small messages, and `agent_loop` continues it.

    {"role": "system" | "user" | "assistant", "content": text}
    {"type": "thinking", "content": text}                        may have "signature": text
    {"type": "tool_call", "name": text, "id": text, "input": object}
    {"type": "tool_result", "id": text, "output": any JSON}      may have "is_error": true
    {"type": "opaque", "block": object}                          any other block of the API

A message may have `ts`, the time when it was made: UTC, ISO 8601, seconds, `Z`. An opaque block is
sent back unchanged. If the model did not write an object as `input`, `input` is the JSON value or
the text that it wrote. A session has only JSON values: written and read again, it is the same.

    session = init_session("You answer weather questions.", "What is the weather in Lima?")
    agent_loop(invoke_model, tools, session, tool_handlers={"get_weather": get_weather})
    print(response(session)["content"])
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

from agent.loop.loop import run_agent
from agent.loop.rules import ConversationSpec
from agent.loop.tools import AgentTools
from agent.messages.message import Event, Message, ReplyEvent, ResultEvent
from agent.models.dialects import anthropic_messages
from agent.models.model import Completion, Request
from agent.models.parsing import input_object, parse_object
from agent.options import MAX_COUNT, AgentOptions
from agent.session import run_here
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json
from toolsets.context import ToolContext
from toolsets.tool import Tool, ToolResult, as_result
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

_log = logging.getLogger(__name__)

FlatMessage = dict[str, Any]
"""One message in one of the shapes above."""

InvokeModel = Callable[[list[dict[str, Any]], dict[str, Any]], Mapping[str, Any]]
"""Called in a thread with the tools and {"messages", "system"} in the form of the Anthropic API;
returns the API's response as a dict. `system` is absent if there is no system message."""

_LINE_CHARS = 120
_JSON_OUTPUT = "json_output"
"""Key in the details of a tool message whose content is the JSON of an output, not a text."""


class FlatSession(TypedDict):
    """A conversation in the flat format."""

    messages: list[FlatMessage]


def init_session(system_prompt: str | None, user_prompt: str) -> FlatSession:
    """Make a session; without a system message if `system_prompt` is None."""
    session = FlatSession(messages=[])
    if system_prompt is not None:
        extend_session(session, {"role": "system", "content": system_prompt})
    return send(session, user_prompt)


def extend_session(session: FlatSession, message: FlatMessage) -> FlatSession:
    """Append a copy of `message`, with a time if it has none; returns the same session.

    Raises `ValueError` if the form of the message is wrong; `to_api_messages` checks the order.
    """
    _to_block(message)
    session["messages"].append({"ts": _format_time(), **copy.deepcopy(message)})
    return session


def send(session: FlatSession, user_message: str) -> FlatSession:
    """Append a user message; returns the same session."""
    return extend_session(session, {"role": "user", "content": user_message})


def fork_session(session: FlatSession) -> FlatSession:
    """Make an independent copy of the session."""
    return copy.deepcopy(session)


def response(session: FlatSession) -> FlatMessage | None:
    """The last text of the assistant, without thoughts; None if there is none."""
    texts = (m for m in reversed(session["messages"]) if m.get("role") == "assistant")
    return next(texts, None)


def agent_loop(
    invoke_model: InvokeModel,
    tools: Sequence[Mapping[str, Any]],
    session: FlatSession,
    tool_handlers: Mapping[str, Callable[..., Any]] | None = None,
    name: str | None = None,
    max_iterations: int | None = None,
    *,
    parallel: bool = True,
) -> FlatSession:
    """Continue `session` until the model answers without calling a tool; returns it.

    `tools` are schemas in the form of the Anthropic API, `tool_handlers` their functions, which
    get the input as keywords. `name` labels the log lines. `max_iterations` limits the model
    calls; None: no limit; 0: the session does not change. Calls of one response run at the same
    time unless `parallel` is False; their results are in call order.

    Exceptions of `invoke_model` are passed on; the session then has all earlier messages. Raises
    `ValueError` if a call has no result, or a tool no handler.
    """
    opening, open_calls = _to_messages(session["messages"])
    if open_calls:
        raise ValueError(f"the session ends with calls that have no result: {sorted(open_calls)}")
    if max_iterations == 0:
        return session
    trajectory = Trajectory(opening)
    options = AgentOptions(
        max_turns=max_iterations or MAX_COUNT,
        max_errors=0,
        repeat_limit=0,
        max_reasks=0,
        parallel_tools=parallel,
    )
    turn: list[ReplyEvent | ResultEvent] = []

    def add_turn() -> None:
        # Results come as their tools end; in the session they are in call order.
        turn.sort(key=lambda event: event["call"] if event["kind"] == "result" else -1)
        session["messages"] += [item for event in turn for item in _items(event)]
        turn.clear()

    def record(event: Event) -> None:
        if event["kind"] == "reply":
            add_turn()
        if event["kind"] == "reply" or event["kind"] == "result":
            _log_message(name or "agent", event["message"])
            turn.append(event)

    own_tools = [_make_tool(schema, tool_handlers or {}) for schema in tools]
    try:
        with tempfile.TemporaryDirectory(prefix="agent-") as root:
            toolbox = Toolbox(own_tools, ToolContext(Workspace(Path(root))))
            run = run_agent(
                trajectory,
                model=_FunctionModel(invoke_model, tools),
                tools=AgentTools(toolbox, trajectory, options),
                spec=ConversationSpec(options),
                journal=record,
            )
            run_here(run)
    finally:
        add_turn()
    return session


def to_api_messages(flat: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the Anthropic API: user and assistant alternate, no system message.

    The last calls may still lack results. Raises `ValueError` naming the first message with a wrong
    form or position: only the first may be the system's, call ids are unique, and all results of a
    turn follow its calls.
    """
    messages, _ = _to_messages(flat)
    return copy.deepcopy(anthropic_messages.to_api_messages(messages))


def parse_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """Read the items of a response of the Anthropic API, in the order of its blocks.

    Raises `ModelError` if the response is an error, cut or malformed.
    """
    blocks = _read_response(response).message["provider_blocks"]["blocks"]
    return [{"ts": _format_time(), **_to_item(block)} for block in blocks]


def _to_messages(flat: Sequence[FlatMessage]) -> tuple[list[Message], set[str]]:
    """Convert a session for the loop; also returns the ids of its last calls without a result."""
    messages: list[Message] = []
    tools: dict[str, str] = {}
    waiting: set[str] = set()
    for n, item in enumerate(flat):
        try:
            block = _to_block(item)
            kind = item.get("role") or item["type"]
            if kind == "system" and n:
                raise ValueError("the only system message must be the first message")
            if kind == "tool_result":
                if item["id"] not in waiting:
                    raise ValueError("a tool result without an open call")
                waiting.remove(item["id"])
            elif waiting and (kind in ("system", "user") or messages[-1]["role"] == "tool"):
                raise ValueError(f"the calls {sorted(waiting)} before it have no result")
            elif kind == "tool_call":
                if item["id"] in tools:
                    raise ValueError(f"an earlier call has the id {item['id']!r}, too")
                tools[item["id"]] = item["name"]
                waiting.add(item["id"])
        except ValueError as error:
            raise ValueError(f"message {n} of the session: {error}") from None
        # A message of its own for each item: the dialect joins successive ones of one role.
        if kind == "tool_result":
            output, is_error = item["output"], item.get("is_error", False)
            text = output if isinstance(output, str) else exact_json.dumps(output).decode()
            message = Message(role="tool", content=text, is_error=is_error)
            message["tool_call_id"], message["name"] = item["id"], tools[item["id"]]
            messages.append(message)
        elif kind in ("system", "user"):
            messages.append(Message(role=kind, content=item["content"]))
        else:
            messages.append(anthropic_messages.read_blocks([block]))
    return messages, waiting


def _to_block(item: Any) -> dict[str, Any]:
    """Make the block of the Anthropic API. Raises `ValueError` if the form of `item` is wrong."""
    block: dict[str, Any]
    optional: dict[Any, type] = {"ts": str}
    match item:
        case {"role": "system" | "user" | "assistant", "content": str(text), **rest}:
            block = {"type": "text", "text": text}
        case {"type": "thinking", "content": str(text), **rest}:
            optional["signature"] = str
            signature = {key: value for key, value in rest.items() if key == "signature"}
            block = {"type": "thinking", "thinking": text, **signature}
        case {"type": "tool_call", "name": str(name), "id": str(id), "input": given, **rest}:
            block = {"type": "tool_use", "id": id, "name": name, "input": given}
        case {"type": "tool_result", "id": str(id), "output": output, **rest}:
            optional["is_error"] = bool
            block = {"type": "tool_result", "tool_use_id": id, "content": output}
        case {"type": "opaque", "block": {"type": str()} as block, **rest}:
            if block["type"] in ("text", "thinking", "tool_use"):
                raise ValueError(f"a block of type {block['type']!r} is not opaque")
        case _:
            raise ValueError(f"it has none of the forms of a flat message: {item!r:.200}")
    for field, value in rest.items():
        if not isinstance(value, optional.get(field, ())):
            raise ValueError(f"its field {field!r} is unknown, or has the wrong type")
    for field, value in item.items():
        if not _is_json(value):
            raise ValueError(f"its {field!r} holds what JSON cannot hold, or would alter")
    return block


def _to_item(block: Mapping[str, Any]) -> FlatMessage:
    """Make the flat message of a block of a reply; `_to_block` goes back."""
    block = copy.deepcopy(dict(block))
    match block:
        case {"type": "text"}:
            return {"role": "assistant", "content": str(block.get("text") or "")}
        case {"type": "thinking"}:
            signature = {k: v for k, v in block.items() if k == "signature" and v is not None}
            return {"type": "thinking", "content": str(block.get("thinking") or ""), **signature}
        case {"type": "tool_use"}:
            given = block.get("input")
            parsed = input_object(given) if isinstance(given, str) else None
            name, id = (str(block.get(field) or "") for field in ("name", "id"))
            given = given if parsed is None else parsed
            return {"type": "tool_call", "name": name, "id": id, "input": given}
    return {"type": "opaque", "block": block}


def _items(event: ReplyEvent | ResultEvent) -> list[FlatMessage]:
    """The flat messages of a reply or a result, with the time when it was there."""
    message = event["message"]
    ts = {"ts": _format_time(event["started_at"] + event["duration_s"])}
    if event["kind"] == "reply":
        return [ts | _to_item(block) for block in message["provider_blocks"]["blocks"]]
    output: Any = message["content"]
    if _JSON_OUTPUT in message.get("details", {}):
        # An output that was cut is no JSON any more, and stays the text that the model saw.
        with suppress(exact_json.JSONDecodeError):
            output = exact_json.loads(output)
    is_error = {"is_error": True} if message["is_error"] else {}
    return [
        ts | {"type": "tool_result", "id": message["tool_call_id"], "output": output} | is_error
    ]


def _is_json(value: Any) -> bool:
    try:
        written = exact_json.dumps(value)
    except TypeError:
        return False
    return not exact_json.is_nested_too_deep(written) and bool(exact_json.loads(written) == value)


def _read_response(response: Mapping[str, Any]) -> Completion:
    """Read a response of the Anthropic API; its message holds all blocks, except empty texts."""
    # Fake APIs need not give a `stop_reason`. The standard library's JSON accepts half characters.
    given = {"stop_reason": "end_turn", **response}
    if given["stop_reason"] is None:  # clients give it to a stream that was cut
        del given["stop_reason"]
    body = json.dumps(given).encode()
    completion = anthropic_messages.read_reply(body)
    blocks = parse_object(body)["content"]
    blocks = [block for block in blocks if block.get("type") != "text" or block.get("text")]
    completion.message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
    return completion


class _FunctionModel:
    """A user's function as a model."""

    def __init__(self, invoke_model: InvokeModel, tools: Sequence[Mapping[str, Any]]) -> None:
        self._invoke_model = invoke_model
        self._tools = [dict(tool) for tool in tools]

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        messages = anthropic_messages.to_api_messages(request.messages)
        body: dict[str, Any] = {"messages": copy.deepcopy(messages)}
        if request.messages and request.messages[0]["role"] == "system":
            body["system"] = request.messages[0]["content"]
        return _read_response(await asyncio.to_thread(self._ask, body))

    def _ask(self, body: dict[str, Any]) -> Mapping[str, Any]:
        try:
            return self._invoke_model(self._tools, body)
        except StopIteration as error:
            # A future cannot pass on a StopIteration: the caller would wait forever.
            raise RuntimeError("the model function raised StopIteration") from error


def _make_tool(schema: Mapping[str, Any], handlers: Mapping[str, Callable[..., Any]]) -> Tool:
    name = schema["name"]
    if name not in handlers:
        raise ValueError(f"tool {name!r} has no handler")

    def run(context: ToolContext, **arguments: Any) -> ToolResult:
        returned = handlers[name](**arguments)
        details = {} if isinstance(returned, str) else {_JSON_OUTPUT: True}
        return replace(as_result(returned), details=details)

    return Tool(
        name=name,
        description=schema.get("description", ""),
        parameters=dict(schema.get("input_schema", {})),
        function=run,
        arguments_model=None,
    )


def _log_message(name: str, message: Message) -> None:
    line = f"{_format_time()} {name} {message['role']} {message['content']}".replace("\n", " ")
    _log.info("%s", line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 3]}...")


def _format_time(at: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))
