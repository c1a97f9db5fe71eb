"""Undo tool calls that a crash cut off, so that they run again as if nothing had happened.

The workspace is rebuilt as of the last result, with its sessions: in a fresh one, set up as the row
says, the conversation's earlier calls run again in order, and each result is compared with the
recorded one. The old workspace lies beside it meanwhile, and is put back where a result differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

from agent.loop.tools import UnusableReference, resolve_references
from agent.messages.message import (
    SIMULATED_USER,
    STAGES,
    Event,
    Rebuild,
    ResultEvent,
    ToolCall,
    call_failure,
)
from agent.setup import Setup
from agent.state.final_answer import RESERVED_TOOLS
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip
from batch_trajectories.dataset.row import RowTask
from batch_trajectories.engine.messages import Assignment, WorkerSetup
from batch_trajectories.engine.worker.replay import COMMAND_TOOLS, NEVER_RAN, SHOWN, differs
from batch_trajectories.engine.worker.workspace_setup import (
    SetupFailed,
    forget_aside,
    put_back,
    set_aside,
)
from batch_trajectories.engine.worker.workspaces import PreparedWorkspace, Workspaces
from batch_trajectories.records.tasks import SUSPECT_DEATHS
from toolsets.context import ToolContext
from toolsets.sandbox.factory import find_sandbox_class
from toolsets.tool import ASKS, Tool, ToolResult
from toolsets.toolbox import Toolbox

_LOOK_EVERY_S = 0.1


class _Repeatable(NamedTuple):
    """An earlier call, its recorded result, and its conversation at that point."""

    conversation: Trajectory
    call: ToolCall
    result: ResultEvent
    is_users: bool
    """Whether a simulated user made the call, which has tools of its own."""


class _Toolboxes(NamedTuple):
    """The tools of the agent and its subagents, and those of the simulated user."""

    agents: Toolbox
    users: Toolbox


class _Impossible(Exception):
    """The workspace cannot be rebuilt."""

    def __init__(self, why: str, at: ResultEvent | None = None, result: str | None = None) -> None:
        super().__init__(why)
        self.facts = Rebuild(why=why)
        if at is not None:
            self.facts |= {"turn": at["turn"], "call": at["call"], "name": at["message"]["name"]}
        if result is not None:
            self.facts["result"] = clip(result, max_chars=SHOWN)


class _InUse(SetupFailed):
    """A call that exceeded its time limit may still write where the workspace must be."""


@dataclass(frozen=True, slots=True)
class Rebuilder:
    """Rebuilds the workspace of one conversation."""

    spaces: Workspaces
    worker: WorkerSetup
    key: bytes
    row: RowTask
    assignment: Assignment
    setup: Setup
    check_stop: Callable[[], None]
    """Called before each call; raises if the worker is stopping."""

    async def restore_workspace(
        self, prepared: PreparedWorkspace, trajectory: Trajectory
    ) -> tuple[PreparedWorkspace, Rebuild | None]:
        """Return the workspace, rebuilt if a call was cut off or files were lost; and the rebuild,
        if any.

        A session of the model's commands has ended with the process; the files may be lost, or
        damaged by a loss of power.

        If a rebuild is impossible, the workspace is returned unchanged, and the second result says
        why. Raises `SetupFailed` if a function of a repeated call does not return.
        """
        # What kills workers must not be run again for ever.
        if not self._max_s or self.assignment.deaths >= SUSPECT_DEATHS:
            return prepared, None
        knows_begun = self.assignment.knows_begun
        cut_off = list(self._find_interrupted_tools(trajectory, knows_begun=knows_begun))
        is_doubtful = not (prepared.survived and knows_begun) or self._had_sessions()
        has_results = any(repeatable is not None for _, repeatable in self._steps())
        if not (cut_off or (has_results and is_doubtful)):
            return prepared, None
        context, rebuild = await self._rebuild(prepared.context, cut_off)
        has_survived = prepared.survived or "why" not in rebuild
        return prepared._replace(context=context, survived=has_survived), rebuild

    async def _rebuild(
        self, context: ToolContext, cut_off: Sequence[Tool]
    ) -> tuple[ToolContext, Rebuild]:
        try:
            self._check(context, cut_off)
        except _Impossible as error:
            return context, error.facts
        root = context.workspace.root
        await context.close(remove=False)
        await asyncio.to_thread(set_aside, root)
        begun = time.monotonic()
        try:
            fresh, calls = await self._repeat(await self._open_workspace(resumed=False), begun)
        except _InUse:
            raise
        except (_Impossible, SetupFailed) as error:
            facts = error.facts if isinstance(error, _Impossible) else Rebuild(why=str(error))
            await asyncio.to_thread(put_back, root)
            return await self._open_workspace(resumed=True), facts
        await asyncio.to_thread(forget_aside, root)
        return fresh, Rebuild(calls=calls, duration_s=round(time.monotonic() - begun, 3))

    async def _open_workspace(self, *, resumed: bool) -> ToolContext:
        """A fresh workspace, or with `resumed` the one that is there, with a new sandbox."""
        context = self.spaces.open(self.key, self.row, resumed=resumed)
        try:
            return (
                await self.spaces.prepare(context, self.row, workspace_id=self.worker.workspace_id)
            ).context
        except BaseException:
            await context.close(remove=False)
            raise

    def _check(self, context: ToolContext, cut_off: Sequence[Tool]) -> None:
        """Raise `_Impossible` if calls that would have to run again must not."""
        if context.sandbox is not None and not context.sandbox.lies_in_workspace:
            raise _Impossible("what its commands change does not lie in the workspace's directory")
        forked = next((event for event in self._events if event["kind"] == "forked"), None)
        if forked is not None and (forked["replay"]["different"] or forked["replay"]["skipped"]):
            raise _Impossible("the workspace of the branch differs from that of its parent")
        for event, _ in self._steps():
            if event["kind"] == "resumed" and event.get("workspace_kept") is False:
                raise _Impossible("the workspace was lost before")
        for tool in cut_off:
            if self._effects(tool) != "workspace":
                raise _Impossible(f"the call of {tool.name} may have acted outside the workspace")
        seconds = sum(
            result["duration_s"]
            for _, repeatable in self._steps()
            if repeatable is not None and self._find_tool(repeatable) is not None
            for result in [repeatable.result]
        )
        if seconds > self._max_s:
            raise _Impossible("its earlier calls took longer than --max_rebuild_s")

    async def _repeat(self, context: ToolContext, begun: float) -> tuple[ToolContext, int]:
        """Repeat the calls in a fresh workspace; return its context and the number of calls.

        Raises `_Impossible` if a result differs. Closes the context if it raises.
        """
        calls = 0
        try:
            toolboxes = self._toolboxes(context)
            for event, repeatable in self._steps():
                if repeatable is None:
                    if event["kind"] == "resumed" and "rebuilt" not in event:
                        await context.close(remove=False)
                        context = await self._open_workspace(resumed=True)
                        toolboxes = self._toolboxes(context)
                    continue
                if self._find_tool(repeatable) is None:
                    continue
                self.check_stop()
                result = repeatable.result
                if time.monotonic() - begun + result["duration_s"] > self._max_s:
                    raise _Impossible("it takes longer than --max_rebuild_s", result)
                toolbox = toolboxes.users if repeatable.is_users else toolboxes.agents
                now = await self._call(toolbox, repeatable)
                calls += 1
                await self._wait_for_late_calls(toolbox.late_calls, begun)
                if differs(now, result["message"]):
                    raise _Impossible("its result differs", result, now.content)
                if now.details.get("running"):
                    raise _Impossible("processes or threads ran on after it", result)
        except BaseException:
            await context.close(remove=False)
            raise
        return context, calls

    async def _wait_for_late_calls(self, late: Sequence[Future[ToolResult]], begun: float) -> None:
        """Wait for calls that exceeded their time limit; the next start undoes what they do."""
        while not all(call.done() for call in late):
            self.check_stop()
            if time.monotonic() - begun > self._max_s:
                raise _InUse(
                    "a function ran for longer than --tool_timeout_s and --max_rebuild_s when the "
                    "workspace was rebuilt, and has not returned; the next start tries again"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _call(self, toolbox: Toolbox, repeatable: _Repeatable) -> ToolResult:
        conversation, call, result, _ = repeatable
        arguments = call["function"]["arguments"]
        if self.row.spec.options.result_references and "$$" in arguments:
            try:
                arguments = resolve_references(arguments, conversation)
            except UnusableReference as error:
                raise _Impossible(str(error), result) from error
        name = call["function"]["name"]
        return await toolbox.call(name, arguments, conversation=conversation.messages)

    def _steps(self) -> Iterator[tuple[Event, _Repeatable | None]]:
        """The events since the conversation last began, with the calls that have a result."""
        trajectory = Trajectory(self.row.opening)
        restarts = [n for n, event in enumerate(self._events) if event["kind"] == "restarted"]
        first = max(restarts, default=-1)
        for n, event in enumerate(self._events):
            if n > first:
                yield event, _repeatable(trajectory, event)
            trajectory.apply(event)

    def _had_sessions(self) -> bool:
        results = (repeatable.result for _, repeatable in self._steps() if repeatable is not None)
        return any(result["message"]["name"] in self._commands() for result in results)

    def _find_tool(self, repeatable: _Repeatable) -> Tool | None:
        """The tool of a call that has to run again; None if it had no effect.

        Raises `_Impossible` for a call that must not run again, or whose effects are not known.
        """
        conversation, call, result, is_users = repeatable
        message = result["message"]
        details = message.get("details", {})
        failure = call_failure(message)
        name = call["function"]["name"]
        if failure in NEVER_RAN or name in RESERVED_TOOLS or call["id"] in conversation.inner:
            return None
        if failure == "interrupted":
            raise _Impossible("it was cut off, too", result)
        if failure == "timeout" or details.get("timed_out"):
            raise _Impossible("it was stopped at its time limit", result)
        if details.get("exception") == "SandboxError":
            raise _Impossible("its sandbox was ended", result)
        if ASKS in details or "reply" in result:
            raise _Impossible("it asked the user", result)
        tool = self._tools(users=is_users).get(name)
        effects = "elsewhere" if tool is None else self._effects(tool)
        if effects == "elsewhere":
            raise _Impossible("it may have acted outside the workspace", result)
        if "exit_code" in details and name in self._commands() and details.get("running") != 0:
            is_known = "running" in details
            ran_on = "processes or threads ran on after it"
            raise _Impossible(ran_on if is_known else f"it is not known whether {ran_on}", result)
        return tool if effects == "workspace" else None

    def _effects(self, tool: Tool) -> str:
        """The places in which calls of a tool have effects; commands of the model reach as far
        as its sandbox."""
        if tool.name in self._commands() and not self._is_confined():
            return "elsewhere"
        return tool.effects

    @property
    def _max_s(self) -> float:
        return self.worker.config.max_rebuild_s

    @property
    def _events(self) -> Sequence[Event]:
        """The events since the prompt, also those of a fork's parent."""
        before = () if self.row.fork is None else self.row.fork.events
        return (*before, *self.assignment.events)

    def _is_confined(self) -> bool:
        is_isolated = find_sandbox_class(self.worker.config.sandbox).is_isolated
        return is_isolated and not self.spaces.has_network(self.row)

    def _tools(self, *, users: bool) -> Mapping[str, Tool]:
        """The tools whose names stand for one tool: of the conversation and its subagents, or those
        of simulated users."""
        setup = self.setup
        toolsets = setup.user_toolsets if users else setup.agent_toolsets()
        named: dict[str, Tool] = {}
        for toolset in toolsets:
            for tool in toolset.tools:
                if named.setdefault(tool.name, tool) != tool:
                    named[tool.name] = replace(tool, effects="elsewhere")
        return named

    def _find_interrupted_tools(
        self, trajectory: Trajectory, *, knows_begun: bool, users: bool = False
    ) -> Iterator[Tool]:
        """The tools of the calls that may have run when the process died."""
        tools = self._tools(users=users)
        begun = [inner for inner in trajectory.inner.values() if inner.name in STAGES]
        for _, call in trajectory.open_calls():
            if (inner := trajectory.inner.get(call["id"])) is not None:
                begun.append(inner)
            elif (tool := tools.get(call["function"]["name"])) is None or tool.idempotent:
                continue
            elif not knows_begun or call["id"] in trajectory.started_calls:
                yield tool
        for inner in begun:
            yield from self._find_interrupted_tools(
                inner.trajectory,
                knows_begun=knows_begun,
                users=users or inner.name == SIMULATED_USER,
            )

    def _commands(self) -> frozenset[str]:
        """The tools that run what the model writes."""
        own = [toolset for toolset in self.setup.all_toolsets() if toolset.name in COMMAND_TOOLS]
        return frozenset(tool.name for toolset in own for tool in toolset.tools)

    def _toolboxes(self, context: ToolContext) -> _Toolboxes:
        timeout_s = self.worker.config.tool_timeout_s
        agents, users = (
            Toolbox([*self._tools(users=is_users).values()], context, call_timeout_s=timeout_s)
            for is_users in (False, True)
        )
        return _Toolboxes(agents, users)


def _repeatable(
    conversation: Trajectory, event: Event, *, is_users: bool = False
) -> _Repeatable | None:
    """The call whose result an event is, also in an inner conversation."""
    if event["kind"] == "sub":
        return _repeatable(
            conversation.begin_inner(event["key"], event["name"]),
            event["event"],
            is_users=is_users or event["name"] == SIMULATED_USER,
        )
    if event["kind"] != "result":
        return None
    return _Repeatable(conversation, conversation.last_calls()[event["call"]], event, is_users)
