"""The agent loop: ask the model, run what it asked for, until the conversation has an ending.

Every reply and every tool result is journaled before anything is done with it. The model's own
mistakes (unknown tool, bad arguments, a failing handler) come back to it as error results; only
a failing endpoint or a cancelled task leaves the loop as an exception, and what was journaled
until then is where the next attempt goes on. What happens next is decided in `agent.rules`.
"""

from __future__ import annotations

import asyncio

from agent.acceptance import RUN_CALLS, make_ids_unique, repair_names, why_unusable
from agent.events import Clock, continued_event, note_event, reply_event, result_event
from agent.messages import Event, SubEvent, ToolCall
from agent.models.errors import ModelError
from agent.models.model import Model, Overtaken, Request
from agent.moves import Answer, Ask, Continue, End, Note
from agent.rules import Terms, next_move
from agent.stream import StreamEvent, StreamHandler
from agent.tools import AgentTools
from agent.trajectory import Journal, Status, Trajectory
from toolsets.tool import ToolResult

_NOT_RUN = "Error: this call was not run, because the conversation ended before it ({})."
_BROKEN_OFF = (
    "Error: this call was broken off, because the conversation ended before its result ({}). It "
    "may have run in part."
)
_ONE_TOO_MANY = ToolResult(
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
                request = Request(trajectory.messages, tools.schemas, tool_choice, on_event)
                try:
                    record(await _ask(model, request, trajectory, tools, terms))
                except Overtaken:
                    continue
                except ModelError as error:
                    if error.kind == "context_exceeded":
                        return End("context_exceeded", str(error))
                    raise
            case Answer(calls):
                await _answer(calls, trajectory.turns, tools, terms, record, on_event)
            case Continue() as move:
                record(await _continue(move, tools, on_event))
            case Note(reason, text):
                record(note_event(trajectory.turns, reason, text))
            case End() as end:
                close_calls(trajectory, end.status, journal)
                return end


async def _ask(
    model: Model, request: Request, trajectory: Trajectory, tools: AgentTools, terms: Terms
) -> Event:
    turn = trajectory.turns + 1
    if request.on_delta is not None and turn > 1:
        request.on_delta({"type": "turn_start", "turn_index": turn - 1})
    clock = Clock()
    completion = await model.complete(request)
    make_ids_unique(completion.message, trajectory.call_ids, turn=turn)
    why = why_unusable(completion, request, terms.options)
    if terms.options.repair_tool_names and why is None:
        repair_names(completion.message, tools.names)
    return reply_event(turn, completion, clock, discarded=why)


async def _answer(
    calls: list[tuple[int, ToolCall]],
    turn: int,
    tools: AgentTools,
    terms: Terms,
    record: Journal,
    on_event: StreamHandler | None,
) -> None:
    async def answer(n: int, call: ToolCall) -> None:
        clock = Clock()
        result = await tools.call(call) if n < RUN_CALLS else _ONE_TOO_MANY
        record(result_event(turn, n, call, result, clock))
        if on_event is not None:
            on_event(_told(call, result, clock))

    if not terms.options.parallel_tools or tools.need_order(calls):
        for n, call in calls:
            await answer(n, call)
        return
    # Where one fails for good, what its neighbours are doing must still be recorded.
    done = await asyncio.gather(*(answer(n, call) for n, call in calls), return_exceptions=True)
    for failure in done:
        if failure is not None:
            raise failure


async def _continue(move: Continue, tools: AgentTools, on_event: StreamHandler | None) -> Event:
    clock = Clock()
    result = await tools.call(move.call, move.reply) if move.is_for_tool else None
    if result is not None and on_event is not None:
        on_event(_told(move.call, result, clock))
    return continued_event(move.result, move.reply, result, clock)


def close_calls(trajectory: Trajectory, status: Status, journal: Journal) -> None:
    """Give each call that was not run a result that says so: every call id has exactly one.

    `status` is how the conversation ended; the calls of inner conversations are closed too.
    """
    for key, inner in trajectory.inner.items():

        def journal_inner(event: Event, key: str = key, name: str = inner.name) -> None:
            journal(SubEvent(kind="sub", key=key, name=name, event=event))

        close_calls(inner.trajectory, status, journal_inner)
    for n, call in trajectory.open_calls():
        # Rules end a conversation before its calls run; whatever else ends it may come later.
        began = call["id"] in trajectory.inner or status in ("cancelled", "failed")
        words, failure = (_BROKEN_OFF, "interrupted") if began else (_NOT_RUN, "not_run")
        result = ToolResult(words.format(status), True, {"failure": failure})
        event = result_event(trajectory.turns, n, call, result, Clock())
        journal(event)
        trajectory.apply(event)


def _told(call: ToolCall, result: ToolResult, clock: Clock) -> StreamEvent:
    return {
        "type": "tool_result",
        "tool_id": call["id"],
        "tool_name": call["function"]["name"],
        "tool_output": result.content,
        "is_error": result.is_error,
        "duration_ms": round(clock.seconds() * 1000),
    }
