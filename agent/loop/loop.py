"""The agent loop: call the model, run its tool calls, until the conversation ends.

Every reply and every tool result is journaled before it is used. Mistakes of the model and failures
of tools become error results. Only a failed endpoint, a failed machine and cancellation raise; the
next attempt then resumes from the journal. `agent.loop.rules` decides each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec

from agent.loop.acceptance import MAX_RUN_CALLS, repair_names, why_unusable
from agent.loop.rules import (
    AddNote,
    AskUser,
    CallModel,
    ConversationSpec,
    Finish,
    ResumeTool,
    RunTools,
    count_runnable,
    next_step,
    refusal_ending,
    time_limit_ending,
)
from agent.loop.tools import AgentTools
from agent.messages.message import UNREADABLE, Event, SubEvent, ToolCall
from agent.models.deadline import Deadline
from agent.models.errors import ModelError, blame_reply_limit
from agent.models.model import (
    Completion,
    ConversationChanged,
    Model,
    Request,
    StreamEvent,
    StreamHandler,
)
from agent.state.events import (
    Clock,
    continued_event,
    cut_event,
    make_ids_unique,
    note_event,
    reply_event,
    result_event,
)
from agent.state.trajectory import Journal, Status, Trajectory
from toolsets.tool import ToolResult

_NOT_RUN = "Error: this call was not run, because the conversation ended before it ({})."
_INTERRUPTED = (
    "Error: this call was broken off, because the conversation ended before its result ({}). It "
    "may have run in part."
)
_TOO_MANY_CALLS = ToolResult(
    f"Error: this call was not run: of one reply, the first {MAX_RUN_CALLS} calls are run. Make it "
    "again in a later reply if it is still needed.",
    is_error=True,
    details={"failure": "not_run"},
)


async def run_agent(
    trajectory: Trajectory,
    *,
    model: Model,
    tools: AgentTools,
    spec: ConversationSpec,
    journal: Journal,
    on_event: StreamHandler | None = None,
    ask_user: Callable[[], Awaitable[Finish | None]] | None = None,
    conversation: str = "",
) -> Finish:
    """Continue `trajectory` to its ending and return how it ended.

    `ask_user` has the simulated user write its next message; it returns an ending if that failed.
    `conversation` is the id that the requests carry. Raises `ModelError` if the endpoint failed
    after all retries, and `CancelledError` if it is cancelled; `trajectory` then has everything
    that happened before.
    """
    loop = _Loop(
        trajectory=trajectory,
        model=model,
        tools=tools,
        spec=spec,
        journal=journal,
        on_event=on_event,
        conversation=conversation,
    )
    while True:
        match next_step(trajectory, spec):
            case CallModel(tool_choice):
                try:
                    loop.record(await loop.call_model(tool_choice))
                except ConversationChanged:
                    continue
                except ModelError as error:
                    if not trajectory.replies:
                        blame_reply_limit(error)
                    if (end := refusal_ending(error.kind, str(error))) is None:
                        raise
                    return end
            case RunTools(calls):
                await loop.run_tools(calls)
            case ResumeTool() as step:
                loop.record(await loop.resume_tool(step))
            case AddNote(reason, text):
                loop.record(note_event(trajectory.turns, reason, text))
            case AskUser():
                assert ask_user is not None
                if (end := await ask_user()) is not None:
                    return end
            case Finish() as end:
                close_calls(trajectory, end.status, journal)
                return end


class _Loop(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the loop: takes the steps that the rules decide on."""

    trajectory: Trajectory
    model: Model
    tools: AgentTools
    spec: ConversationSpec
    journal: Journal
    on_event: StreamHandler | None
    conversation: str

    def record(self, event: Event) -> None:
        """Journal an event, then apply it."""
        self.journal(event)
        self.trajectory.apply(event)

    async def call_model(self, tool_choice: Literal["auto", "none"]) -> Event:
        """Ask the model for its next reply; returns the reply, or that the time limit cut it."""
        trajectory, options = self.trajectory, self.spec.options
        turn = trajectory.turns + 1
        if self.on_event is not None and turn > 1:
            self.on_event({"type": "turn_start", "turn_index": turn - 1})
        deadline = self._deadline()
        clock = Clock()

        def record_unreadable(completion: Completion) -> None:
            # A new clock: the time until now counts for the reply that follows.
            self.record(reply_event(turn, completion, Clock(), discarded=UNREADABLE))

        request = Request(
            trajectory.messages,
            self.tools.schemas,
            tool_choice,
            on_delta=self.on_event,
            deadline=deadline,
            on_unreadable=record_unreadable,
            conversation=self.conversation,
        )
        try:
            async with deadline:
                completion = await self.model.complete(request)
        except TimeoutError:
            if not deadline.has_passed:
                raise
            return cut_event(turn, clock, waited_s=deadline.waited_s)
        make_ids_unique(completion.message, trajectory.call_ids, turn=turn)
        why = why_unusable(completion, request, options)
        if options.repair_tool_names and why is None:
            repair_names(completion.message, self.tools.names)
        return reply_event(
            turn,
            completion,
            clock,
            discarded=why,
            waited_s=deadline.waited_s,
            before=trajectory.replies,
        )

    async def run_tools(self, calls: list[tuple[int, ToolCall]]) -> None:
        """Run the calls and record their results, at the same time where that is allowed."""
        options = self.spec.options
        if not options.parallel_tools or self.tools.need_order(calls):
            for n, call in calls:
                await self._run_and_record(n, call)
                if time_limit_ending(self.trajectory, options):
                    return
            return
        # If one call raises, the results of the others must still be recorded.
        running = (self._run_and_record(n, call) for n, call in calls)
        for failure in await asyncio.gather(*running, return_exceptions=True):
            if failure is not None:
                raise failure

    async def _run_and_record(self, n: int, call: ToolCall) -> None:
        turn = self.trajectory.turns
        clock = Clock()
        if n < count_runnable(self.trajectory, self.spec):
            result = await self._run(call, None)
        elif n < MAX_RUN_CALLS:
            result = _refuse_over_limit(self.spec.max_calls)
        else:
            result = _TOO_MANY_CALLS
        self.record(result_event(turn, n, call, result, clock))
        if self.on_event is not None:
            self.on_event(_stream_event(call, result, clock))

    async def resume_tool(self, step: ResumeTool) -> Event:
        """Give the user's reply to the call that asked for it; returns the call's new result."""
        clock = Clock()
        result = None
        if step.is_for_tool:
            result = await self._run(step.call, step.reply)
            if self.on_event is not None:
                self.on_event(_stream_event(step.call, result, clock))
        return continued_event(step.result, step.reply, result, clock)

    async def _run(self, call: ToolCall, user_reply: str | None) -> ToolResult:
        # The time limit cuts off a tool; a subagent checks it in its own conversation.
        is_subagent = self.tools.is_subagent(call["function"]["name"])
        if self.spec.options.max_conversation_s is None or is_subagent:
            return await self.tools.call(call, user_reply)
        deadline = self._deadline()
        try:
            async with deadline:
                return await self.tools.call(call, user_reply)
        except TimeoutError:
            if not deadline.has_passed:
                raise
            text = _INTERRUPTED.format("time_limit")
            return ToolResult(text, is_error=True, details={"failure": "interrupted"})

    def _deadline(self) -> Deadline:
        limit_s = self.spec.options.max_conversation_s
        if limit_s is None:
            return Deadline(None)
        return Deadline(limit_s - self.trajectory.outermost().seconds_at_work())


def close_calls(trajectory: Trajectory, status: Status, journal: Journal) -> None:
    """Give each call that has no result an error that says why: each call needs one result.

    `status` is how the conversation ended. Calls of inner conversations get results, too.
    """
    for key, inner in trajectory.inner.items():

        def journal_inner(event: Event, key: str = key, name: str = inner.name) -> None:
            journal(SubEvent(kind="sub", key=key, name=name, event=event))

        close_calls(inner.trajectory, status, journal_inner)
    for n, call in trajectory.open_calls():
        # Rules end a conversation before its calls run; these two can end it while they run.
        may_have_run = call["id"] in trajectory.inner or status in ("cancelled", "failed")
        text, failure = (_INTERRUPTED, "interrupted") if may_have_run else (_NOT_RUN, "not_run")
        result = ToolResult(text.format(status), is_error=True, details={"failure": failure})
        event = result_event(trajectory.turns, n, call, result, Clock())
        journal(event)
        trajectory.apply(event)


def _refuse_over_limit(max_calls: int | None) -> ToolResult:
    text = (
        f"Error: this call was not run: at most {max_calls} calls can be made before a message. "
        "Write the message now."
    )
    return ToolResult(text, is_error=True, details={"failure": "not_run"})


def _stream_event(call: ToolCall, result: ToolResult, clock: Clock) -> StreamEvent:
    return {
        "type": "tool_result",
        "tool_id": call["id"],
        "tool_name": call["function"]["name"],
        "tool_output": result.content,
        "is_error": result.is_error,
        "duration_ms": round(clock.seconds() * 1000),
    }
