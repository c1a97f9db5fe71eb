"""The simplest way to use the loop: a function as model, functions as tools, a flat session.

session = init_session("You answer weather questions.", "What is the weather in Lima?")
agent_loop(invoke_model, tools, session, tool_handlers={"get_weather": get_weather})
print(response(session)["content"])
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent.flat.convert import JSON_OUTPUT, from_messages, read_response, to_messages
from agent.flat.format import FlatSession, check_messages
from agent.loop.loop import run_agent
from agent.loop.rules import ConversationSpec
from agent.loop.tools import AgentTools
from agent.messages.message import Event
from agent.models.dialects.anthropic_messages import to_api_messages as to_anthropic_messages
from agent.models.model import Completion, Request
from agent.options import MAX_COUNT, AgentOptions
from agent.session import run_here
from agent.state.trajectory import Trajectory
from toolsets.context import ToolContext
from toolsets.tool import Tool, ToolResult, as_result
from toolsets.toolbox import Toolbox
from toolsets.workspace.workspace import Workspace

_log = logging.getLogger(__name__)

InvokeModel = Callable[[list[dict[str, Any]], dict[str, Any]], Mapping[str, Any]]
"""Called in a thread with the tools and {"messages", "system"} in the form of the Anthropic API
(`system` only if there is one); returns the API's response as a dict."""

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
    calls; None: no limit; 0 leaves the session as it is. Calls of one response run at the same
    time unless `parallel` is false; their results are in call order.

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
    made = [_as_tool(schema, handlers) for schema in tools]
    try:
        with tempfile.TemporaryDirectory(prefix="agent-") as root:
            toolbox = Toolbox(made, ToolContext(Workspace(Path(root))))
            run = run_agent(
                trajectory,
                model=_Invoked(invoke_model, tools),
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


class _Invoked:
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


def _as_tool(schema: Mapping[str, Any], handlers: Mapping[str, Callable[..., Any]]) -> Tool:
    name = schema["name"]
    if name not in handlers:
        raise ValueError(f"tool {name!r} has no handler")
    handler = handlers[name]
    return Tool(
        name=name,
        description=schema.get("description", ""),
        parameters=dict(schema.get("input_schema", {})),
        function=lambda context, **arguments: _result(handler(**arguments)),
        arguments_model=None,
    )


def _result(returned: Any) -> ToolResult:
    """The result, marked if the output is not a text: the session keeps its JSON value."""
    result = as_result(returned)
    return result if isinstance(returned, str) else replace(result, details={JSON_OUTPUT: True})


def _times(trajectory: Trajectory) -> list[float | None]:
    """The times of all messages after the opening."""
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
