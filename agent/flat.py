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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

from agent.loop.loop import run_agent
from agent.loop.rules import ConversationSpec
from agent.loop.tools import AgentTools
from agent.messages.message import Event, Message, ToolCall
from agent.models.dialects import anthropic_messages
from agent.models.model import Completion, Request
from agent.models.parsing import parse_object
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

_FIELDS: Mapping[str, Mapping[str, type]] = {
    **{role: {"content": str} for role in ("system", "user", "assistant")},
    "thinking": {"content": str},
    "tool_call": {"name": str, "id": str, "input": object},
    "tool_result": {"id": str, "output": object},
    "opaque": {"block": dict},
}
"""The fields that a message must have besides its role or type."""

_OPTIONAL = {"ts": str, "signature": str, "is_error": bool}


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

    Raises `ValueError` if the form of the message is wrong; `to_messages` checks the order.
    """
    _check_shape(message)
    session["messages"].append(_add_time(copy.deepcopy(message)))
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
    opening = to_messages(session["messages"])
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
    own_tools = [_make_tool(schema, tool_handlers or {}) for schema in tools]
    try:
        with tempfile.TemporaryDirectory(prefix="agent-") as root:
            toolbox = Toolbox(own_tools, ToolContext(Workspace(Path(root))))
            run = run_agent(
                trajectory,
                model=_FunctionModel(invoke_model, tools),
                tools=AgentTools(toolbox, trajectory, options),
                spec=ConversationSpec(options),
                journal=lambda event: _log_event(name or "agent", event),
            )
            run_here(run)
    finally:
        events = sorted((*trajectory.replies, *trajectory.results), key=_event_order)
        for message, event in zip(trajectory.messages[len(opening) :], events, strict=True):
            ended_at = event["started_at"] + event["duration_s"]
            session["messages"] += [_add_time(item, ended_at) for item in _items(message)]
        for reply in trajectory.discarded:
            # A last reply without an answer, such as thoughts alone, belongs to the session, too.
            session["messages"] += map(_add_time, _items(reply["message"]))
    return session


def to_messages(flat: Sequence[FlatMessage]) -> list[Message]:
    """Convert a flat conversation to messages as the loop has them; `from_messages` goes back.

    Successive items of the assistant become one message, whose `provider_blocks` hold what its
    content, reasoning and calls would lose. Raises `ValueError` naming the first message with a
    wrong form or position: only the first may be the system's, call ids are unique, and all results
    of a turn follow its calls.
    """
    names: dict[str, str] = {}
    waiting: set[str] = set()
    before = None
    for n, item in enumerate(flat):
        try:
            _check_shape(item)
            _check_position(item, n, waiting, names, before)
        except ValueError as error:
            raise ValueError(f"message {n} of the session: {error}") from None
        before = item.get("type")
    messages: list[Message] = []
    for is_assistant, run in groupby(flat, _is_assistant):
        if is_assistant:
            messages.append(_assistant_message(run))
        else:
            messages += [_other_message(item, names) for item in run]
    return messages


def from_messages(messages: Iterable[Message]) -> list[FlatMessage]:
    """Convert messages to the flat format, without times and without blocks of other APIs."""
    return [item for message in messages for item in _items(message)]


def to_api_messages(flat: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the Anthropic API: user and assistant alternate, no system message.

    Raises `ValueError` as `to_messages` does.
    """
    return anthropic_messages.to_api_messages(to_messages(flat))


def parse_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """Read the items of a response of the Anthropic API, in the order of its blocks.

    Raises `ModelError` if the response is an error, cut or malformed.
    """
    return [_add_time(item) for item in _items(_read_response(response).message)]


def _add_time(message: FlatMessage, at: float | None = None) -> FlatMessage:
    """Add a time to a message that has none; `at` are epoch seconds, None: now."""
    return {"ts": _format_time(at), **message}


def _format_time(at: float | None = None) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))


def _check_shape(message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"it must be a dict, not {type(message).__name__}")
    key = next((key for key in ("role", "type") if key in message), None)
    if key is None:
        raise ValueError("it has neither a role nor a type")
    kinds = list(_FIELDS)[:3] if key == "role" else list(_FIELDS)[3:]
    kind = message[key]
    if kind not in kinds:
        raise ValueError(f"its {key} is {kind!r}; known: {', '.join(kinds)}")
    fields = {**_FIELDS[kind], **{name: _OPTIONAL[name] for name in _optional_fields(kind)}}
    for field, type_ in fields.items():
        if field not in message and field in _FIELDS[kind]:
            raise ValueError(f"its {field!r} is missing")
        if field in message and not isinstance(message[field], type_):
            names = {str: "text", bool: "true or false", dict: "an object"}
            raise ValueError(f"its {field!r} must be {names[type_]}")
    if unknown := message.keys() - {key, *fields}:
        raise ValueError(f"it has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
    for field, value in message.items():
        if not _is_json(value):
            raise ValueError(f"its {field!r} holds what JSON cannot hold, or would alter")
    if kind == "opaque":
        block_type = message["block"].get("type")
        if not isinstance(block_type, str) or block_type in ("text", "thinking", "tool_use"):
            raise ValueError(f"a block of type {block_type!r} is not opaque")


def _optional_fields(kind: str) -> list[str]:
    own = {"thinking": "signature", "tool_result": "is_error"}
    return ["ts", *([own[kind]] if kind in own else [])]


def _is_json(value: Any) -> bool:
    try:
        written = exact_json.dumps(value)
    except TypeError:
        return False
    return not exact_json.is_nested_too_deep(written) and bool(exact_json.loads(written) == value)


def _check_position(
    item: FlatMessage, n: int, waiting: set[str], names: dict[str, str], before: str | None
) -> None:
    """Check one message; `waiting` are the calls without a result, `names` the tools by call."""
    kind = item.get("type")
    if item.get("role") == "system" and n:
        raise ValueError("the only system message must be the first message")
    if kind == "tool_result":
        if item["id"] not in waiting:
            raise ValueError("a tool result without an open call")
        waiting.remove(item["id"])
    elif waiting and (before == "tool_result" or not _is_assistant(item)):
        raise ValueError(f"the calls {sorted(waiting)} before it have no result")
    if kind == "tool_call":
        if item["id"] in names:
            raise ValueError(f"an earlier call has the id {item['id']!r}, too")
        names[item["id"]] = item["name"]
        waiting.add(item["id"])


def _is_assistant(item: FlatMessage) -> bool:
    kind = item.get("role") or item.get("type")
    return kind in ("assistant", "thinking", "tool_call", "opaque")


def _assistant_message(run: Iterable[FlatMessage]) -> Message:
    items = [{key: value for key, value in item.items() if key != "ts"} for item in run]
    blocks = [_to_block(item) for item in items]
    message = anthropic_messages.read_blocks(blocks)
    if _items(message) != items:
        message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
    return message


def _other_message(item: FlatMessage, names: Mapping[str, str]) -> Message:
    """The message of system, user or tool; `names` are the names of tools by call id."""
    if "role" in item:
        return Message(role=item["role"], content=item["content"])
    output = item["output"]
    message = Message(
        role="tool",
        tool_call_id=item["id"],
        name=names[item["id"]],
        content=output if isinstance(output, str) else exact_json.dumps(output).decode(),
        is_error=item.get("is_error", False),
    )
    if not isinstance(output, str):
        message["details"] = {_JSON_OUTPUT: True}
    return message


def _to_block(item: FlatMessage) -> dict[str, Any]:
    match item:
        case {"role": "assistant"}:
            return {"type": "text", "text": item["content"]}
        case {"type": "thinking"}:
            signature = {key: value for key, value in item.items() if key == "signature"}
            return {"type": "thinking", "thinking": item["content"], **signature}
        case {"type": "tool_call"}:
            # An input that is not an object becomes text, as in a reply that was cut.
            given = item["input"]
            given = copy.deepcopy(given) if isinstance(given, dict) else _write_arguments(given)
            return {"type": "tool_use", "id": item["id"], "name": item["name"], "input": given}
        case _:
            return copy.deepcopy(item["block"])


def _items(message: Message) -> list[FlatMessage]:
    """One message in the flat format, without times."""
    if message["role"] == "tool":
        is_error = {"is_error": True} if message.get("is_error") else {}
        result = {"id": message["tool_call_id"], "output": _read_output(message)}
        return [{"type": "tool_result", **result, **is_error}]
    if message["role"] != "assistant":
        return [{"role": message["role"], "content": message["content"]}]
    calls = [_call_item(call) for call in message.get("tool_calls", ())]
    verbatim = message.get("provider_blocks")
    if verbatim is not None and verbatim["api"] == anthropic_messages.API:
        # Calls are taken from the message: their names may have been repaired.
        own = iter(calls)
        return [
            next(own) if block.get("type") == "tool_use" else _block_item(block)
            for block in verbatim["blocks"]
        ]
    items: list[FlatMessage] = []
    if reasoning := message.get("reasoning"):
        items.append({"type": "thinking", "content": reasoning})
    if message["content"]:
        items.append({"role": "assistant", "content": message["content"]})
    return items + calls


def _block_item(block: Mapping[str, Any]) -> FlatMessage:
    match block.get("type"):
        case "text":
            return {"role": "assistant", "content": str(block.get("text") or "")}
        case "thinking":
            item = {"type": "thinking", "content": str(block.get("thinking") or "")}
            return item | {k: v for k, v in block.items() if k == "signature" and v is not None}
        case _:
            return {"type": "opaque", "block": copy.deepcopy(dict(block))}


def _call_item(call: ToolCall) -> FlatMessage:
    function = call["function"]
    given = _read_arguments(function["arguments"])
    return {"type": "tool_call", "name": function["name"], "id": call["id"], "input": given}


def _read_arguments(arguments: str) -> Any:
    """Read the JSON that a model wrote; its text if it is not JSON or nested too deep."""
    if exact_json.is_nested_too_deep(arguments.encode(errors="replace")):
        return arguments
    try:
        return exact_json.loads(arguments or "{}")
    except exact_json.JSONDecodeError:
        return arguments


def _write_arguments(given: Any) -> str:
    """Write the text from which `_read_arguments` reads `given`."""
    if isinstance(given, str) and _read_arguments(given) == given:
        return given
    return exact_json.dumps(given).decode()


def _read_output(message: Message) -> Any:
    if _JSON_OUTPUT in message.get("details", {}):
        # If a note of the runtime follows the JSON, the model saw both as one text.
        with suppress(exact_json.JSONDecodeError):
            return exact_json.loads(message["content"])
    return message["content"]


def _read_response(response: Mapping[str, Any]) -> Completion:
    """Read a response of the Anthropic API with all its blocks, except empty texts."""
    # Fake APIs need not give a `stop_reason`. The standard library's JSON accepts half characters.
    body = json.dumps({"stop_reason": "end_turn", **response}).encode()
    completion = anthropic_messages.read_reply(body)
    # Parsed again, since the reader stores the blocks only if there are thoughts.
    blocks = [
        block
        for block in parse_object(body)["content"]
        if block.get("type") != "text" or block.get("text")
    ]
    completion.message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
    return completion


class _FunctionModel:
    """A user's function as a model."""

    def __init__(self, invoke_model: InvokeModel, tools: Sequence[Mapping[str, Any]]) -> None:
        self._invoke_model = invoke_model
        self._tools = [dict(tool) for tool in tools]

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        body: dict[str, Any] = {"messages": anthropic_messages.to_api_messages(request.messages)}
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
    handler = handlers[name]
    return Tool(
        name=name,
        description=schema.get("description", ""),
        parameters=dict(schema.get("input_schema", {})),
        function=lambda context, **arguments: _mark_json(handler(**arguments)),
        arguments_model=None,
    )


def _mark_json(returned: Any) -> ToolResult:
    """The result of a handler; an output that is not a text is marked, and stays a JSON value."""
    result = as_result(returned)
    return result if isinstance(returned, str) else replace(result, details={_JSON_OUTPUT: True})


def _event_order(event: Any) -> tuple[int, str]:
    return event["turn"], event["kind"]


def _log_event(name: str, event: Event) -> None:
    if event["kind"] not in ("reply", "result"):
        return
    message = event["message"]
    line = f"{_format_time()} {name} {message['role']} {message['content']}".replace("\n", " ")
    _log.info("%s", line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 3]}...")
