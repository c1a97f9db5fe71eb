"""The agent loop: ask the model, run what it asked for, until the conversation has an ending.

Every reply and every tool result is journaled before anything is done with it. The model's own
mistakes (unknown tool, bad arguments, a failing handler) come back to it as error results; only
a failing endpoint or a cancelled task leaves the loop as an exception, and what was journaled
until then is where the next attempt goes on.
"""

from __future__ import annotations

import asyncio
import time

from agent.messages import Event, Message, ReplyEvent, ResultEvent, ResumedEvent, ToolCall
from agent.models.errors import ModelError
from agent.models.model import Model, Request
from agent.trajectory import Journal, Status, Trajectory
from toolsets.tool import ToolResult
from toolsets.toolbox import Toolbox

INTERRUPTED = (
    "Error: this call was interrupted before its result was known. It may have run in part; "
    "check the state of things before you repeat it."
)


async def run_agent(
    trajectory: Trajectory,
    *,
    model: Model,
    toolbox: Toolbox,
    max_turns: int | None,
    journal: Journal,
) -> Status:
    """Carry `trajectory` on to its ending and return how it ended.

    Raises `ModelError` where the endpoint failed for good, and lets cancellation through;
    `trajectory` then holds all that happened before.
    """

    def record(event: Event) -> None:
        journal(event)
        trajectory.apply(event)

    while True:
        if calls := trajectory.open_calls():
            await _answer(calls, turn=trajectory.turns, toolbox=toolbox, record=record)
        elif status := trajectory.ending(max_turns):
            return status
        else:
            try:
                record(await _ask(model, trajectory, toolbox))
            except ModelError as error:
                if error.kind == "context_exceeded":
                    return "context_exceeded"
                raise


def take_up(trajectory: Trajectory, *, toolbox: Toolbox, journal: Journal, kept: bool) -> None:
    """Prepare a replayed trajectory to go on after a crash.

    A call without a result may have run: it is left to be run (again) only if its tool says
    that repeating is safe, else its result says that it was interrupted. `kept` tells whether
    the task's workspace survived.
    """
    calls = trajectory.open_calls()
    names = [call["function"]["name"] for _, call in calls]
    # Of calls that run one after the other, those behind the first had not begun.
    begun = calls[:1] if any(map(toolbox.is_sequential, names)) else calls
    interrupted = [
        (n, call) for n, call in begun if not toolbox.is_idempotent(call["function"]["name"])
    ]
    mark = ResumedEvent(
        kind="resumed",
        turn=trajectory.turns,
        interrupted=[call["id"] for _, call in interrupted],
        repeated=[call["id"] for n, call in begun if (n, call) not in interrupted],
        workspace_kept=kept,
    )
    journal(mark)
    trajectory.apply(mark)
    for n, call in interrupted:
        result = ToolResult(INTERRUPTED, is_error=True)
        event = _result_event(trajectory.turns, n, call, result, time.time(), 0.0)
        journal(event)
        trajectory.apply(event)


async def _ask(model: Model, trajectory: Trajectory, toolbox: Toolbox) -> ReplyEvent:
    started_at, clock = time.time(), time.monotonic()
    completion = await model.complete(Request(trajectory.messages, toolbox.schemas))
    return ReplyEvent(
        kind="reply",
        turn=trajectory.turns + 1,
        message=_with_unique_call_ids(completion.message, trajectory),
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        cost_usd=completion.cost_usd,
        model=completion.model,
        response_id=completion.response_id,
        started_at=started_at,
        duration_s=time.monotonic() - clock,
    )


async def _answer(
    calls: list[tuple[int, ToolCall]],
    *,
    turn: int,
    toolbox: Toolbox,
    record: Journal,
) -> None:
    async def answer(n: int, call: ToolCall) -> None:
        started_at, clock = time.time(), time.monotonic()
        function = call["function"]
        result = await toolbox.call(function["name"], function["arguments"])
        record(_result_event(turn, n, call, result, started_at, time.monotonic() - clock))

    if any(toolbox.is_sequential(call["function"]["name"]) for _, call in calls):
        for n, call in calls:
            await answer(n, call)
    else:
        await asyncio.gather(*(answer(n, call) for n, call in calls))


def _result_event(
    turn: int, n: int, call: ToolCall, result: ToolResult, started_at: float, duration_s: float
) -> ResultEvent:
    message = Message(
        role="tool",
        tool_call_id=call["id"],
        name=call["function"]["name"],
        content=result.content,
        is_error=result.is_error,
    )
    if result.details:
        message["details"] = dict(result.details)
    return ResultEvent(
        kind="result",
        turn=turn,
        call=n,
        message=message,
        started_at=started_at,
        duration_s=duration_s,
    )


def _with_unique_call_ids(message: Message, trajectory: Trajectory) -> Message:
    """Some servers send empty or repeated call ids; a pairing by id needs unique ones."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    used = set(trajectory.call_ids)
    for n, call in enumerate(calls):
        if not call["id"] or call["id"] in used:
            call["id"] = f"call_{trajectory.turns + 1}_{n}"
        used.add(call["id"])
    # The same calls stand in the verbatim blocks of some dialects and must keep their pairing.
    ids = iter(call["id"] for call in calls)
    for block in message.get("provider_blocks", {"blocks": []})["blocks"]:
        if block.get("type") == "tool_use":
            block["id"] = next(ids)
    return message
