"""The flat format: a session is a list of small messages, in a form of its own.

    {"role": "system" | "user" | "assistant", "content": text}
    {"type": "thinking", "content": text}                        may have "signature": text
    {"type": "tool_call", "name": text, "id": text, "input": object}
    {"type": "tool_result", "id": text, "output": any JSON}      may have "is_error": true
    {"type": "opaque", "block": object}                          may have "api": text

A message may have `ts`, the time when it was made: UTC, ISO 8601, seconds, `Z`. Any other block of
an API is opaque and is sent back unchanged, only to its API (`api`; if absent, Anthropic's). If the
model did not write an object as `input`, `input` is the JSON value or the text that it wrote.
A session has only JSON values: written as JSON and read again, it is the same.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypedDict

from agent.loop.loop import run_agent
from agent.loop.rules import ConversationSpec
from agent.loop.tools import AgentTools
from agent.messages.message import Event, Message, ProviderBlocks, ToolCall
from agent.models.dialects import anthropic_messages, openai_chat
from agent.models.dialects.anthropic_messages import API
from agent.models.dialects.anthropic_messages import to_api_messages as to_anthropic_messages
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

FlatMessage = dict[str, Any]
"""One message in one of the shapes above."""


class FlatSession(TypedDict):
    """A conversation in the flat format."""

    messages: list[FlatMessage]


_TEXT_FIELD = {"content": str}
_FIELDS: Mapping[str, Mapping[str, Mapping[str, type]]] = {
    "role": {"system": _TEXT_FIELD, "user": _TEXT_FIELD, "assistant": _TEXT_FIELD},
    "type": {
        "thinking": _TEXT_FIELD,
        "tool_call": {"name": str, "id": str, "input": object},
        "tool_result": {"id": str, "output": object},
        "opaque": {"block": dict},
    },
}
"""The fields that a message must have besides its role or type."""

_OPTIONAL: Mapping[str, Mapping[str, type]] = {
    "thinking": {"signature": str},
    "tool_result": {"is_error": bool},
    "opaque": {"api": str},
}
"""The optional fields of a message, by its type; each may also have `ts`."""

_TYPE_NAMES = {str: "text", bool: "true or false", dict: "an object"}

_ASSISTANT_TYPES = ("thinking", "tool_call", "opaque")


def init_session(system_prompt: str | None, user_prompt: str) -> FlatSession:
    """Make a session; without a system message if `system_prompt` is None."""
    session = FlatSession(messages=[])
    if system_prompt is not None:
        extend_session(session, {"role": "system", "content": system_prompt})
    return send(session, user_prompt)


def extend_session(session: FlatSession, message: FlatMessage) -> FlatSession:
    """Append a copy of `message`, with a time if it has none; returns the same session.

    Raises `ValueError` if the form of the message is wrong; `check_messages` checks the order.
    """
    _check_shape(message)
    session["messages"].append(add_time(copy.deepcopy(message)))
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


def add_time(message: FlatMessage, at: float | None = None) -> FlatMessage:
    """Add a time to a message that has none; `at` are epoch seconds, None: now."""
    if "ts" in message:
        return message
    return {**message, "ts": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at))}


def _check_shape(message: Any) -> None:
    if not isinstance(message, dict):
        raise ValueError(f"it must be a dict, not {type(message).__name__}")
    key = next((key for key in _FIELDS if key in message), None)
    if key is None:
        raise ValueError("it has neither a role nor a type")
    kind, known = message[key], _FIELDS[key]
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(f"its {key} is {kind!r}; known: {', '.join(known)}")
    required = known[kind]
    optional = {"ts": str, **_OPTIONAL.get(kind, {})}
    for field, value_type in {**required, **optional}.items():
        if field not in message and field not in optional:
            raise ValueError(f"its {field!r} is missing")
        if field in message and not isinstance(message[field], value_type):
            raise ValueError(f"its {field!r} must be {_TYPE_NAMES[value_type]}")
    if unknown := message.keys() - {key, *required, *optional}:
        raise ValueError(f"it has unknown fields: {', '.join(sorted(map(repr, unknown)))}")
    for field, value in message.items():
        if not _is_json(value):
            raise ValueError(f"its {field!r} holds what JSON cannot hold, or would alter")
    if kind == "opaque" and not is_foreign(message):
        block_type = message["block"].get("type")
        if not isinstance(block_type, str) or block_type in ("text", "thinking", "tool_use"):
            raise ValueError(f"a block of type {block_type!r} is not opaque")


def _is_json(value: Any) -> bool:
    try:
        written = exact_json.dumps(value)
    except TypeError:
        return False
    return not exact_json.is_nested_too_deep(written) and bool(exact_json.loads(written) == value)


def check_messages(flat: Sequence[FlatMessage]) -> None:
    """Raise `ValueError` naming the first message with a wrong form or position.

    The system message must be the first, a result must be for an open call, call ids must be
    unique, and only the missing results may follow the first result of a turn.
    """
    open_calls: set[str] = set()
    ids: set[str] = set()
    previous_kind = None
    for n, item in enumerate(flat):
        where = f"message {n} of the session"
        try:
            _check_shape(item)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        kind = item.get("type")
        if item.get("role") == "system" and n:
            raise ValueError(f"{where}: the only system message must be the first message")
        if kind == "tool_result":
            if item["id"] not in open_calls:
                raise ValueError(f"{where}: a tool result without an open call")
            open_calls.remove(item["id"])
        elif open_calls:
            continues_turn = is_assistant_item(item) and not is_foreign(item)
            if previous_kind == "tool_result" or not continues_turn:
                raise ValueError(
                    f"{where}: the calls {sorted(open_calls)} before it have no result"
                )
        if kind == "tool_call":
            if item["id"] in ids:
                raise ValueError(f"{where}: an earlier call has the id {item['id']!r}, too")
            ids.add(item["id"])
            open_calls.add(item["id"])
        previous_kind = kind


def is_assistant_item(item: Mapping[str, Any]) -> bool:
    """Whether an item is part of an assistant message."""
    return item.get("role") == "assistant" or item.get("type") in _ASSISTANT_TYPES


def is_foreign(item: Mapping[str, Any]) -> bool:
    """Whether an item is a block of another API than Anthropic's."""
    return bool(item.get("api", API) != API)


# Converts between the flat format, our messages, and the APIs of two providers.
#
# A flat session that is converted to our messages and back is the same, except for its times and
# for fields with their default: `is_error` false, `api` Anthropic's.

JSON_OUTPUT = "json_output"
"""Key in the details of a tool message whose content is the JSON of an output, not a text."""


def to_messages(flat: Sequence[FlatMessage]) -> list[Message]:
    """Convert a flat conversation to messages, as models, loops and exports use them; no times.

    Successive items of the assistant become one message. `provider_blocks` hold the order,
    signatures and opaque blocks that content, reasoning and calls alone would lose.

    Raises `ValueError` as `check_messages` does.
    """
    check_messages(flat)
    names = {item["id"]: item["name"] for item in flat if item.get("type") == "tool_call"}
    messages: list[Message] = []
    for is_assistant, run in groupby(flat, is_assistant_item):
        if is_assistant:
            for part in _split_by_api(run):
                messages += _assistant_messages(part)
        else:
            messages += [_other_message(item, names) for item in run]
    return messages


def from_messages(
    messages: Sequence[Message], times: Sequence[float | None] | None = None
) -> list[FlatMessage]:
    """Convert messages to the flat format, without fields that the model neither saw nor wrote.

    `times` are epoch seconds, one per message; None if unknown. Raises `ValueError` if there are
    more or fewer times than messages.
    """
    if times is None:
        times = [None] * len(messages)
    flat = []
    for message, at in zip(messages, times, strict=True):
        for item in _items(message):
            flat.append(item if at is None else add_time(item, at))
    return flat


def to_api_messages(messages: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the Anthropic API: user and assistant alternate, no system message.

    Raises `ValueError` as `to_messages` does.
    """
    return anthropic_messages.to_api_messages(to_messages(messages))


def read_response(response: Mapping[str, Any]) -> Completion:
    """Read a response of the Anthropic API as a reply with all blocks except empty texts.

    A response without a `stop_reason` counts as complete. Raises `ModelError` if the response is an
    error, cut or malformed.
    """
    # Fake APIs need not give a `stop_reason`.
    body = _to_bytes({"stop_reason": "end_turn", **response})
    completion = anthropic_messages.read_reply(body)
    # Parsed again, since the reader stores the blocks only if there are thoughts.
    blocks = [block for block in parse_object(body)["content"] if not _is_empty_text(block)]
    completion.message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
    return completion


def parse_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """Read the items of a response of the Anthropic API, in the order of its blocks.

    Raises `ModelError` as `read_response` does.
    """
    return [add_time(item) for item in _items(read_response(response).message)]


def to_openai_messages(messages: Sequence[FlatMessage]) -> list[dict[str, Any]]:
    """Convert messages for the OpenAI chat API, with the system message.

    Raises `ValueError` as `to_messages` does.
    """
    return openai_chat.to_api_messages(to_messages(messages))


def parse_openai_response(response: Mapping[str, Any]) -> list[FlatMessage]:
    """Read the items of a response of the OpenAI chat API: thoughts, then text, then calls.

    Raises `ModelError` if the response is an error, cut or malformed.
    """
    message = openai_chat.read_reply(_to_bytes(response)).message
    return [add_time(item) for item in _items(message)]


def _to_bytes(response: Mapping[str, Any]) -> bytes:
    # The standard library's JSON accepts half characters, as do the readers.
    return json.dumps(response).encode()


def _is_empty_text(block: Mapping[str, Any]) -> bool:
    return block.get("type") == "text" and not block.get("text")


def _split_by_api(run: Iterable[FlatMessage]) -> list[list[FlatMessage]]:
    """Split items where blocks of another API begin, since these begin their message."""
    parts: list[list[FlatMessage]] = []
    for item in run:
        if not parts or (is_foreign(item) and item["api"] != parts[-1][-1].get("api")):
            parts.append([])
        parts[-1].append(item)
    return parts


def _assistant_messages(part: Sequence[FlatMessage]) -> list[Message]:
    """One message; or two, if blocks of another API precede items that their API cannot have."""
    # Blocks of another API stand first; see `_split_by_api`.
    untimed = [{k: v for k, v in item.items() if k != "ts"} for item in part]
    foreign = [item for item in untimed if is_foreign(item)]
    others = untimed[len(foreign) :]
    blocks = [_to_block(item) for item in others]
    message = anthropic_messages.read_blocks(blocks)
    if not foreign:
        if _items(message) != others:
            message["provider_blocks"] = {"api": anthropic_messages.API, "blocks": blocks}
        return [message]
    verbatim = ProviderBlocks(api=foreign[0]["api"], blocks=[_to_block(item) for item in foreign])
    was_added = _restore_calls(message, verbatim["blocks"][-1])
    rest = verbatim["blocks"][:-1] if was_added else verbatim["blocks"]
    if rest:
        message["provider_blocks"] = ProviderBlocks(api=verbatim["api"], blocks=rest)
    if _items(message) == untimed:
        return [message]
    foreign_message = Message(role="assistant", content="", provider_blocks=verbatim)
    return [foreign_message, *_assistant_messages(others)]


def _restore_calls(message: Message, block: Mapping[str, Any]) -> bool:
    """Add the fields in a block to the calls; returns False if `_call_fields` did not write it."""
    calls, fields = message.get("tool_calls", []), block.get("tool_calls")
    if not calls or block.keys() != {"tool_calls"} or not isinstance(fields, list):
        return False
    if len(fields) != len(calls) or not all(
        isinstance(unknown, dict) and isinstance(unknown.get("function", {}), dict)
        for unknown in fields
    ):
        return False
    for call, unknown in zip(calls, fields, strict=True):
        openai_chat.restore_call_fields(call, unknown)
    return True


def _call_fields(message: Message) -> list[FlatMessage]:
    """The fields of calls that the flat format does not have, as an opaque block."""
    unknown = [openai_chat.unknown_call_fields(call) for call in message.get("tool_calls", ())]
    if not any(unknown):
        return []
    block = {"tool_calls": copy.deepcopy(unknown)}
    return [{"type": "opaque", "api": openai_chat.API, "block": block}]


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
        message["details"] = {JSON_OUTPUT: True}
    return message


def _to_block(item: FlatMessage) -> dict[str, Any]:
    match item:
        case {"role": "assistant"}:
            return {"type": "text", "text": item["content"]}
        case {"type": "thinking"}:
            signature = {k: v for k, v in item.items() if k == "signature"}
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
    match message["role"]:
        case "assistant":
            return _assistant_items(message)
        case "tool":
            is_error = {"is_error": True} if message.get("is_error") else {}
            id, output = message["tool_call_id"], _read_output(message)
            return [{"type": "tool_result", "id": id, "output": output, **is_error}]
        case role:
            return [{"role": role, "content": message["content"]}]


def _assistant_items(message: Message) -> list[FlatMessage]:
    calls = [_call_item(call) for call in message.get("tool_calls", ())]
    verbatim = message.get("provider_blocks") or {"api": "", "blocks": []}
    if verbatim["api"] == anthropic_messages.API:
        # Calls are taken from the message: their names may have been repaired.
        next_calls = iter(calls)
        return [
            next(next_calls) if block.get("type") == "tool_use" else _block_item(block)
            for block in verbatim["blocks"]
        ]
    items: list[FlatMessage] = []
    reasoning = message.get("reasoning")
    # A block with only the reasoning is redundant: the chat API gets the reasoning anyway.
    redundant = {"api": openai_chat.API, "blocks": [{"reasoning_content": reasoning}]}
    if reasoning is None or verbatim != redundant:
        items += [
            {"type": "opaque", "api": verbatim["api"], "block": copy.deepcopy(block)}
            for block in verbatim["blocks"]
        ]
    items += _call_fields(message)
    if reasoning:
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
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {
        "type": "tool_call",
        "name": name,
        "id": call["id"],
        "input": _read_arguments(arguments),
    }


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
    if JSON_OUTPUT in message.get("details", {}):
        try:
            return exact_json.loads(message["content"])
        except exact_json.JSONDecodeError:
            # A note of the runtime follows the JSON, and the model saw both as one text.
            pass
    return message["content"]


# The simplest use of the loop: a function as model, functions as tools, a flat session.
#
# session = init_session("You answer weather questions.", "What is the weather in Lima?")
# agent_loop(invoke_model, tools, session, tool_handlers={"get_weather": get_weather})
# print(response(session)["content"])

_log = logging.getLogger(__name__)

InvokeModel = Callable[[list[dict[str, Any]], dict[str, Any]], Mapping[str, Any]]
"""Called in a thread with the tools and {"messages", "system"} in the form of the Anthropic API;
returns the API's response as a dict. `system` is absent if there is no system message."""

_LINE_CHARS = 120


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
    check_messages(session["messages"])
    if max_iterations == 0:
        return session
    opening = to_messages(session["messages"])
    trajectory = Trajectory(opening)
    options = AgentOptions(
        max_turns=max_iterations or MAX_COUNT,
        max_errors=0,
        repeat_limit=0,
        max_reasks=0,
        parallel_tools=parallel,
    )
    handlers = tool_handlers or {}
    own_tools = [_make_tool(schema, handlers) for schema in tools]
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
        new = trajectory.messages[len(opening) :]
        session["messages"] += from_messages(new, _times(trajectory))
        for reply in trajectory.discarded:
            # A last reply without an answer, such as thoughts alone, belongs to the session, too.
            session["messages"] += from_messages([reply["message"]])
    return session


class _FunctionModel:
    """A user's function as a model."""

    def __init__(self, invoke_model: InvokeModel, tools: Sequence[Mapping[str, Any]]) -> None:
        self._invoke_model = invoke_model
        self._tools = [dict(tool) for tool in tools]

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        body: dict[str, Any] = {"messages": to_anthropic_messages(request.messages)}
        if request.messages and request.messages[0]["role"] == "system":
            body["system"] = request.messages[0]["content"]
        return read_response(await asyncio.to_thread(self._ask, body))

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
    return result if isinstance(returned, str) else replace(result, details={JSON_OUTPUT: True})


def _times(trajectory: Trajectory) -> list[float | None]:
    """The times of all messages after the opening, in epoch seconds."""
    # By the names of their kinds, a reply comes before the results of its calls.
    events = sorted(
        (*trajectory.replies, *trajectory.results), key=lambda event: (event["turn"], event["kind"])
    )
    return [event["started_at"] + event["duration_s"] for event in events]


def _log_event(name: str, event: Event) -> None:
    if event["kind"] not in ("reply", "result"):
        return
    message = event["message"]
    ts = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = f"{ts} {name} {message['role']} {message['content']}".replace("\n", " ")
    _log.info("%s", line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 3]}...")
