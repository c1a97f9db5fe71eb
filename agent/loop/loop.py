"""The agent loop: call the model, run its tool calls, until the conversation ends.

Every reply and every tool result is journaled before anything else is done with it. Mistakes of the
model and failures of tools become error results. Only a failed endpoint, a failed machine and
cancellation are exceptions; the next attempt then resumes from the journal. `agent.loop.rules`
decides each step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

from agent.loop.acceptance import RUN_CALLS, repair_names, why_unusable
from agent.loop.rules import (
    AddNote,
    AskUser,
    CallModel,
    ConversationSpec,
    Finish,
    ResumeTool,
    RunTools,
    ending_of_refusal,
    next_step,
    over_time,
)
from agent.loop.tools import AgentTools
from agent.messages.message import UNREADABLE, Event, SubEvent, ToolCall
from agent.models.deadline import Deadline
from agent.models.errors import ModelError
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
    f"Error: this call was not run: of one reply, the first {RUN_CALLS} calls are run. Make it "
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

    `ask_user` has the simulated user write its next message, or returns an ending.
    `conversation` is the id that its requests have.
    Raises `ModelError` if the endpoint failed after all retries, and `CancelledError` if it is
    cancelled; `trajectory` then has everything that happened before.
    """

    def record(event: Event) -> None:
        journal(event)
        trajectory.apply(event)

    while True:
        match next_step(trajectory, spec):
            case CallModel(tool_choice):
                try:
                    record(
                        await _ask(
                            model,
                            tool_choice,
                            trajectory,
                            tools,
                            spec,
                            record,
                            on_event,
                            conversation,
                        )
                    )
                except ConversationChanged:
                    continue
                except ModelError as error:
                    if (end := ending_of_refusal(error.kind, str(error))) is None:
                        raise
                    return end
            case RunTools(calls):
                await _answer(calls, trajectory, tools, spec, record, on_event)
            case ResumeTool() as step:
                record(await _continue(step, trajectory, tools, spec, on_event))
            case AddNote(reason, text):
                record(note_event(trajectory.turns, reason, text))
            case AskUser():
                assert ask_user is not None
                if (end := await ask_user()) is not None:
                    return end
            case Finish() as end:
                close_calls(trajectory, end.status, journal)
                return end


async def _ask(
    model: Model,
    tool_choice: Literal["auto", "none"],
    trajectory: Trajectory,
    tools: AgentTools,
    spec: ConversationSpec,
    record: Journal,
    on_event: StreamHandler | None,
    conversation: str,
) -> Event:
    turn = trajectory.turns + 1
    if on_event is not None and turn > 1:
        on_event({"type": "turn_start", "turn_index": turn - 1})
    deadline = _deadline(trajectory, spec)
    clock = Clock()

    def pay(unreadable: Completion) -> None:
        # A new clock: the time until now counts for the reply that follows.
        record(reply_event(turn, unreadable, Clock(), discarded=UNREADABLE))

    request = Request(
        trajectory.messages,
        tools.schemas,
        tool_choice,
        on_delta=on_event,
        deadline=deadline,
        on_unreadable=pay,
        conversation=conversation,
    )
    try:
        async with deadline:
            completion = await model.complete(request)
    except TimeoutError:
        if not deadline.has_passed:
            raise
        return cut_event(turn, clock, waited_s=deadline.waited_s)
    make_ids_unique(completion.message, trajectory.call_ids, turn=turn)
    why = why_unusable(completion, request, spec.options)
    if spec.options.repair_tool_names and why is None:
        repair_names(completion.message, tools.names)
    before = trajectory.replies
    return reply_event(
        turn, completion, clock, discarded=why, waited_s=deadline.waited_s, before=before
    )


def _deadline(trajectory: Trajectory, spec: ConversationSpec) -> Deadline:
    """The deadline of the next call."""
    limit = spec.options.max_conversation_s
    if limit is None:
        return Deadline(None)
    return Deadline(limit - trajectory.outermost().seconds_at_work())


async def _answer(
    calls: list[tuple[int, ToolCall]],
    trajectory: Trajectory,
    tools: AgentTools,
    spec: ConversationSpec,
    record: Journal,
    on_event: StreamHandler | None,
) -> None:
    turn = trajectory.turns

    async def answer(n: int, call: ToolCall) -> None:
        clock = Clock()
        result = _TOO_MANY_CALLS
        if n < RUN_CALLS:
            result = await _call(call, None, tools, trajectory, spec)
        record(result_event(turn, n, call, result, clock))
        if on_event is not None:
            on_event(_stream_event(call, result, clock))

    if not spec.options.parallel_tools or tools.need_order(calls):
        for n, call in calls:
            await answer(n, call)
            if over_time(trajectory, spec.options):
                return
        return
    # If one call raises, the results of the others must still be recorded.
    done = await asyncio.gather(*(answer(n, call) for n, call in calls), return_exceptions=True)
    for failure in done:
        if failure is not None:
            raise failure


async def _call(
    call: ToolCall,
    user_reply: str | None,
    tools: AgentTools,
    trajectory: Trajectory,
    spec: ConversationSpec,
) -> ToolResult:
    """Run a call. The time limit cuts off a tool; a subagent checks it in its own conversation."""
    if spec.options.max_conversation_s is None or tools.is_subagent(call["function"]["name"]):
        return await tools.call(call, user_reply)
    deadline = _deadline(trajectory, spec)
    try:
        async with deadline:
            return await tools.call(call, user_reply)
    except TimeoutError:
        if not deadline.has_passed:
            raise
        result_text = _INTERRUPTED.format("time_limit")
        return ToolResult(result_text, True, {"failure": "interrupted"})


async def _continue(
    step: ResumeTool,
    trajectory: Trajectory,
    tools: AgentTools,
    spec: ConversationSpec,
    on_event: StreamHandler | None,
) -> Event:
    clock = Clock()
    result = None
    if step.is_for_tool:
        result = await _call(step.call, step.reply, tools, trajectory, spec)
    if result is not None and on_event is not None:
        on_event(_stream_event(step.call, result, clock))
    return continued_event(step.result, step.reply, result, clock)


def close_calls(trajectory: Trajectory, status: Status, journal: Journal) -> None:
    """Give each call without a result one that says why: every call id has exactly one result.

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
        result = ToolResult(text.format(status), True, {"failure": failure})
        event = result_event(trajectory.turns, n, call, result, Clock())
        journal(event)
        trajectory.apply(event)


def _stream_event(call: ToolCall, result: ToolResult, clock: Clock) -> StreamEvent:
    return {
        "type": "tool_result",
        "tool_id": call["id"],
        "tool_name": call["function"]["name"],
        "tool_output": result.content,
        "is_error": result.is_error,
        "duration_ms": round(clock.seconds() * 1000),
    }
