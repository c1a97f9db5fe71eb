"""Playing whole conversations offline: a script for the model, real tools, real policies."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import orjson
from pydantic import Field

from agent.loop.rules import ConversationSpec, Finish
from agent.loop.tools import Approve
from agent.messages.message import Event, Message, Usage
from agent.models.client.pool import ModelPool
from agent.models.model import Completion, Model, ModelSettings, Request, StreamEvent
from agent.models.resolve import read_key
from agent.models.scripted import ScriptedModel, parse_script
from agent.options import AgentOptions
from agent.runner import ConversationRunner
from agent.setup import AgentServices, Setup, replies_played, set_up
from agent.state.trajectory import Trajectory
from run_agent import AIAgent
from toolsets.catalog.registry import Toolset
from toolsets.context import ToolContext
from toolsets.sandbox.base import Limits
from toolsets.sandbox.factory import make_sandbox
from toolsets.tool import Tool, ToolResult, tool
from toolsets.workspace.workspace import Workspace

OPENING = [Message(role="user", content="go")]
SETTINGS = ModelSettings(name="scripted", api="scripted", base_url=None, key_env=None)


class Played(NamedTuple):
    """What came of a conversation."""

    trajectory: Trajectory
    end: Finish
    events: list[Event]
    requests: list[Request]
    """What the model was asked with, as it was at that moment."""
    told: list[StreamEvent]

    @property
    def status(self) -> str:
        return self.end.status

    @property
    def messages(self) -> list[Message]:
        return self.trajectory.messages

    @property
    def roles(self) -> list[str]:
        return [message["role"] for message in self.messages]

    @property
    def results(self) -> list[Message]:
        return [message for message in self.messages if message["role"] == "tool"]

    def seen(self, n: int = -1) -> str:
        """All text that the model was shown in its nth request."""
        return orjson.dumps(self.requests[n].messages).decode()


class Price(NamedTuple):
    """What each reply costs."""

    usd: float | None
    tokens: int | None


class Watched:
    """A model that keeps what it was asked with."""

    def __init__(self, model: Model, requests: list[Request], price: Price) -> None:
        self._model, self._requests, self._price = model, requests, price

    async def complete(self, request: Request) -> Completion:
        self._requests.append(
            msgspec.structs.replace(request, messages=copy.deepcopy(list(request.messages)))
        )
        completion = await self._model.complete(request)
        assert completion.usage is not None
        usage: Usage = {**completion.usage, "input_tokens": self._price.tokens}
        return replace(completion, cost_usd=self._price.usd, usage=usage)


@tool(idempotent=True)
def echo(context: ToolContext, text: Annotated[str, Field(description="What to say.")] = "") -> str:
    """Say the text again."""
    return text


@tool()
def fail(context: ToolContext) -> str:
    """Raise an exception."""
    raise RuntimeError("out of order")


_counters: dict[Path, int] = {}


@tool()
def count(context: ToolContext) -> int:
    """Give a higher number each time."""
    root = context.workspace.root
    _counters[root] = _counters.get(root, 0) + 1
    return _counters[root]


@tool()
def delete(context: ToolContext, name: str) -> Any:
    """Delete something, once the user has confirmed."""
    if context.user_reply is None:
        return {"requiresConfirmation": True, "message": f"Delete {name}?"}
    if context.user_reply == "which?":
        return {"requiresInput": True, "message": "Say yes or no."}
    if context.user_reply == "break":
        raise RuntimeError("it broke")
    return f"deleted {name}: {context.user_reply}"


@tool()
def report_failure(context: ToolContext) -> ToolResult:
    """Report a failure without raising."""
    return ToolResult("no such thing", is_error=True)


TOOLS = (echo, fail, count, delete, report_failure)


def call(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def calls(*listed: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tool_calls": list(listed), **more}


def call_echo(text: str = "x", **more: Any) -> dict[str, Any]:
    """A turn with one call of the tool `echo`."""
    return calls(call("echo", text=text), **more)


def say(text: str, **more: Any) -> dict[str, Any]:
    return {"content": text, **more}


def make_file_agent(script: Sequence[Any], **more: Any) -> AIAgent:
    """A scripted agent with the toolset `file`."""
    return AIAgent("scripted", script=list(script), enabled_toolsets=["file"], **more)


def play(
    root: Path,
    script: Sequence[Any],
    *,
    past: list[Event] | None = None,
    knows_begun: bool = False,
    workspace_survived: bool = True,
    toolset: str | None = None,
    tools: Sequence[Tool] = TOOLS,
    user_tools: Sequence[Tool] = (),
    opening: Sequence[Message] = OPENING,
    expected: str | None = None,
    user_replies: Sequence[str] = (),
    user_turns: Sequence[str] = (),
    approve: Approve | None = None,
    cost_usd: float | None = 0.0,
    reply_tokens: int | None = 0,
    **options: Any,
) -> Played:
    """Play a script from `past` on; `toolset` names a real one in the place of `tools`.

    `user_tools` are the tools of a simulated user, which has them as `enabled_toolsets: [all]`.

    If `knows_begun`, calls without a `began` event in `past` had not begun. Each reply costs
    `cost_usd` and takes `reply_tokens`.
    """
    checked = AgentOptions(**options)
    setup = set_up(checked, SETTINGS, enabled_toolsets=[toolset or "none"], disabled_toolsets=())
    if toolset is None:
        setup = msgspec.structs.replace(setup, tools=tuple(tools))
    if user_tools:
        setup = msgspec.structs.replace(
            setup, user_toolsets=(Toolset("phone", "Its phone.", user_tools),)
        )
    if approve is not None:
        setup = msgspec.structs.replace(setup, approve=approve)
    spec = ConversationSpec(
        checked,
        expected=expected,
        user_replies=tuple(user_replies),
        user_turns=tuple(user_turns),
    )
    return asyncio.run(
        _play(
            root,
            setup,
            spec,
            script,
            past,
            knows_begun,
            opening,
            Price(cost_usd, reply_tokens),
            workspace_survived=workspace_survived,
        )
    )


async def _play(
    root: Path,
    setup: Setup,
    spec: ConversationSpec,
    script: Sequence[Any],
    past: list[Event] | None,
    knows_begun: bool,
    opening: Sequence[Message],
    price: Price,
    *,
    workspace_survived: bool,
) -> Played:
    events = copy.deepcopy(past or [])
    requests: list[Request] = []
    reports: list[StreamEvent] = []
    trajectory = Trajectory(opening, events)
    workspace = Workspace(root)
    context = ToolContext(workspace, make_sandbox("local", workspace, Limits()))
    home = AgentServices(
        setup,
        context,
        ModelPool(key_of=read_key, on_retry=print),
        30.0,
        wrap_model=lambda m: Watched(m, requests, price),
    )
    model = ScriptedModel(parse_script(script), start=replies_played(trajectory, setup))
    conversation = ConversationRunner(
        trajectory=trajectory,
        spec=spec,
        model=Watched(model, requests, price),
        toolbox=home.toolbox(),
        journal=lambda event: events.append(copy.deepcopy(event)),
        services=home,
        subagents=spec.options.subagents,
        on_event=reports.append,
        records_starts=True,
        has_start_events=knows_begun,
        workspace_survived=workspace_survived,
        conversation="the conversation",
    )
    end = await conversation.run(taken_up=past is not None)
    await context.close(remove=False)
    return Played(trajectory=trajectory, end=end, events=events, requests=requests, told=reports)
