"""Restoring the workspace of a branch: the tool calls of its parent, made once more.

What the model is shown stays what the parent's tools said; where they say something else now,
that is noted. Tools whose effects leave the workspace are not called again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from agent.loop.references import UnusableReference, resolve
from agent.messages import Event, Message, ResultEvent, ToolCall
from agent.setup import Setup
from agent.state.tally import OWN_CHARS, failure_of
from agent.state.trajectory import Trajectory
from toolsets.text import clip
from toolsets.toolbox import Toolbox

_OF_WORKSPACES = ("file", "python", "terminal")
"""The toolsets whose tools change nothing but the workspace and what runs in its sandbox."""

_OF_THE_NET = ("browser", "web")

_NEVER_RAN = frozenset(
    {"not_run", "denied", "unknown_tool", "invalid_arguments", "unknown_reference"}
)
"""Failures of calls that have done nothing, so that there is nothing to do again."""

_SHOWN = 500
"""Characters of a different result that the record holds."""


def replayable(setup: Setup, servers: Collection[str]) -> frozenset[str]:
    """The tools that are called again: those of workspaces, and of a user's own those that work in
    the workspace and say that a call may be repeated. `servers` are the MCP servers."""
    names = set()
    for toolset in setup.toolsets:
        if toolset.name in _OF_WORKSPACES:
            names |= {tool.name for tool in toolset.tools}
        elif toolset.name not in (*_OF_THE_NET, *servers):
            names |= {tool.name for tool in toolset.tools if tool.idempotent and tool.takes_context}
    return frozenset(names)


async def replay(
    events: Iterable[Event],
    toolbox: Toolbox,
    trajectory: Trajectory,
    names: Collection[str],
    *,
    go_on: Callable[[], None],
) -> dict[str, Any]:
    """Make the calls of `events` again, one after the other; see `ForkedEvent` for what it gives.

    `trajectory` holds the events; `names` are the tools to call. `go_on` is asked before each
    call and raises where the worker is stopping. Raises what `Toolbox.call` raises.
    """
    replayed = 0
    different: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for call, result in _calls(events):
        name, message = call["function"]["name"], result["message"]
        place = {"turn": result["turn"], "call": result["call"], "name": name}
        failure = failure_of(message)
        if failure in _NEVER_RAN:
            continue
        if failure == "interrupted" or name not in names:
            why = "it was interrupted" if name in names else "it may act outside the workspace"
            skipped.append({**place, "why": why})
            continue
        go_on()
        arguments = call["function"]["arguments"]
        if "stored_as" in message.get("details", {}):
            try:
                arguments = resolve(arguments, trajectory)
            except UnusableReference as error:
                skipped.append({**place, "why": str(error)})
                continue
        now = await toolbox.call(name, arguments, conversation=trajectory.messages)
        replayed += 1
        if now.content != _said(message) or now.is_error != message["is_error"]:
            told = clip(now.content, max_chars=_SHOWN)
            different.append({**place, "result": told, "is_error": now.is_error})
    return {"replayed": replayed, "different": different, "skipped": skipped}


def _calls(events: Iterable[Event]) -> Iterator[tuple[ToolCall, ResultEvent]]:
    """The calls with their results, in call order, which is the order in which they count."""
    calls: list[ToolCall] = []
    for event in events:
        if event["kind"] == "reply" and "discarded" not in event:
            calls = event["message"].get("tool_calls", [])
        elif event["kind"] == "result":
            yield calls[event["call"]], event


def _said(message: Message) -> str:
    """What the tool itself said, before the runtime shortened or added anything."""
    details = message.get("details", {})
    if "whole_content" in details:
        return str(details["whole_content"])
    return message["content"][: details.get(OWN_CHARS)]
