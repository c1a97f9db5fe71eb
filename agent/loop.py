"""The agent loop: ask the model, run what it asked for, until the conversation has an ending.

Every reply and every tool result is journaled before anything is done with it. The model's own
mistakes (unknown tool, bad arguments, a failing handler) come back to it as error results; only
a failing endpoint or a cancelled task leaves the loop as an exception, and what was journaled
until then is where the next attempt goes on. What happens next is decided in `agent.rules`.
"""

from __future__ import annotations

import asyncio
import time

from agent.acceptance import make_ids_unique, repair_names, why_unusable
from agent.events import note_event, result_event
from agent.messages import Event, ReplyEvent, ToolCall
from agent.models.errors import ModelError
from agent.models.model import Model, Request
from agent.moves import Answer, Ask, Continue, End, Note
from agent.rules import Terms, next_move
from agent.stream import StreamEvent, StreamHandler
from agent.tools import AgentTools, question_in
from agent.trajectory import Journal, Trajectory
from toolsets.tool import ToolResult

_NOT_RUN = "Error: this call was not run, because the conversation ended before it ({})."


async def run_agent(
    trajectory: Trajectory,
    *,
    model: Model,
    tools: AgentTools,
    terms: Terms,
    journal: Journal,
    on_event: StreamHandler | None = None,
) -> End:
    """Carry `trajectory` on to its ending and return how it ended.

    Raises `ModelError` where the endpoint failed for good, and lets cancellation through;
    `trajectory` then holds all that happened before.
    """

    def record(event: Event) -> None:
        journal(event)
        trajectory.apply(event)

    while True:
        match next_move(trajectory, terms):
            case Ask(tool_choice):
                try:
                    request = Request(trajectory.messages, tools.schemas, tool_choice, on_event)
                    record(await _ask(model, request, trajectory, tools, terms))
                except ModelError as error:
                    if error.kind == "context_exceeded":
                        return End("context_exceeded", str(error))
                    raise
            case Answer(calls):
                await _answer(calls, trajectory.turns, tools, terms, record, on_event)
            case Continue(n, call, reply):
                record(await _continue(n, call, reply, trajectory.turns, tools))
            case Note(reason, text, details):
                record(note_event(trajectory.turns, reason, text, details))
            case End() as end:
                close_calls(trajectory, end, journal)
                return end


async def _ask(
    model: Model, request: Request, trajectory: Trajectory, tools: AgentTools, terms: Terms
) -> ReplyEvent:
    turn = trajectory.turns + 1
    if request.on_delta is not None and turn > 1:
        request.on_delta({"type": "turn_start", "turn_index": turn - 1})
    started_at, clock = time.time(), time.monotonic()
    completion = await model.complete(request)
    message = completion.message
    make_ids_unique(message, trajectory.call_ids, turn=turn)
    if terms.options.repair_tool_names:
        repair_names(message, tools.names)
    event = ReplyEvent(
        kind="reply",
        turn=turn,
        message=message,
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        cost_usd=completion.cost_usd,
        model=completion.model,
        response_id=completion.response_id,
        started_at=started_at,
        duration_s=time.monotonic() - clock,
    )
    if why := why_unusable(message, completion.finish_reason, terms.options):
        event["discarded"] = why
    return event


async def _answer(
    calls: list[tuple[int, ToolCall]],
    turn: int,
    tools: AgentTools,
    terms: Terms,
    record: Journal,
    on_event: StreamHandler | None,
) -> None:
    async def answer(n: int, call: ToolCall) -> None:
        started_at, clock = time.time(), time.monotonic()
        result = await tools.call(call)
        duration_s = time.monotonic() - clock
        record(result_event(turn, n, call, result, started_at, duration_s))
        if on_event is not None:
            on_event(_told(call, result, duration_s))

    if not terms.options.parallel_tools or tools.need_order(calls):
        for n, call in calls:
            await answer(n, call)
        return
    # Where one fails for good, what its neighbours are doing must still be recorded.
    done = await asyncio.gather(*(answer(n, call) for n, call in calls), return_exceptions=True)
    for failure in done:
        if failure is not None:
            raise failure


async def _continue(n: int, call: ToolCall, reply: str, turn: int, tools: AgentTools) -> Event:
    """Run a call again with the user's reply; what comes of it is told beside the first result."""
    result = await tools.call(call, user_reply=reply)
    text = f"User: {reply}\n\n{result.content}"
    pending = question_in(result)
    return note_event(turn, "user_reply", text, {"call": n, "pending": pending or False})


def close_calls(trajectory: Trajectory, end: End, journal: Journal) -> None:
    """Give each call that was not run a result that says so: every call id has exactly one."""
    result = ToolResult(_NOT_RUN.format(end.status), True, {"failure": "not_run"})
    for n, call in trajectory.open_calls():
        event = result_event(trajectory.turns, n, call, result, time.time(), 0.0)
        journal(event)
        trajectory.apply(event)


def _told(call: ToolCall, result: ToolResult, duration_s: float) -> StreamEvent:
    return {
        "type": "tool_result",
        "tool_id": call["id"],
        "tool_name": call["function"]["name"],
        "tool_output": result.content,
        "is_error": result.is_error,
        "duration_ms": round(duration_s * 1000),
    }
