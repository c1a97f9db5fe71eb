"""Restore the workspace of a branch by repeating the tool calls of its parent.

The model still sees the parent's results; different results are recorded. Tools with effects
outside the workspace are not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from agent.loop.tools import UnusableReference, resolve_references
from agent.messages.message import (
    TOOL_TEXT_END,
    Event,
    Message,
    ResultEvent,
    ToolCall,
    call_failure,
)
from agent.setup import Setup
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox

COMMAND_TOOLS = ("python", "terminal")
"""Tools that run commands which the model writes."""

NEVER_RAN = frozenset(
    {"not_run", "denied", "unknown_tool", "invalid_arguments", "unknown_reference"}
)
"""Failures of calls that had no effect and need not be repeated."""

SHOWN = 500
"""Maximum characters of a different result in the record."""


def replayable(setup: Setup, servers: Collection[str]) -> frozenset[str]:
    """The names of tools that are called again: those with effects only in the workspace, and
    the user's own idempotent tools that take a context. `servers` are the MCP servers."""
    return frozenset(
        tool.name
        for toolset in setup.toolsets
        for tool in toolset.tools
        if tool.effects == "workspace"
        or (
            tool.effects == "elsewhere"
            and tool.idempotent
            and tool.takes_context
            and toolset.name not in servers
        )
    )


async def replay(
    events: Iterable[Event],
    toolbox: Toolbox,
    trajectory: Trajectory,
    names: Collection[str],
    *,
    check_stop: Callable[[], None],
) -> dict[str, Any]:
    """Repeat the calls of `events` in order; see `ForkedEvent` for the result.

    `trajectory` has the events; `names` are the tools to call. `check_stop` is called before each
    call and raises if the worker is stopping. Raises what `Toolbox.call` raises.
    """
    replayed = 0
    different: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for call, result in _calls(events):
        name, message = call["function"]["name"], result["message"]
        place = {"turn": result["turn"], "call": result["call"], "name": name}
        failure = call_failure(message)
        if failure in NEVER_RAN:
            continue
        if failure == "interrupted" or name not in names:
            why = "it was interrupted" if name in names else "it may act outside the workspace"
            skipped.append({**place, "why": why})
            continue
        check_stop()
        arguments = call["function"]["arguments"]
        if "stored_as" in message.get("details", {}):
            try:
                arguments = resolve_references(arguments, trajectory)
            except UnusableReference as error:
                skipped.append({**place, "why": str(error)})
                continue
        now = await toolbox.call(name, arguments, conversation=trajectory.messages)
        replayed += 1
        if differs(now, message):
            content = clip(now.content, max_chars=SHOWN)
            different.append({**place, "result": content, "is_error": now.is_error})
    return {"replayed": replayed, "different": different, "skipped": skipped}


def _calls(events: Iterable[Event]) -> Iterator[tuple[ToolCall, ResultEvent]]:
    """The calls with their results, in call order."""
    calls: list[ToolCall] = []
    for event in events:
        if event["kind"] == "reply" and "discarded" not in event:
            calls = event["message"].get("tool_calls", [])
        elif event["kind"] == "result":
            yield calls[event["call"]], event


def differs(now: ToolResult, message: Message) -> bool:
    """Whether a call that was repeated has another result than the recorded one."""
    return now.content != _tool_output(message) or now.is_error != message["is_error"]


def _tool_output(message: Message) -> str:
    """The tool's own result, before the runtime shortened or extended it."""
    details = message.get("details", {})
    if "whole_content" in details:
        return str(details["whole_content"])
    return message["content"][: details.get(TOOL_TEXT_END)]
