"""Resumes a conversation after a crash."""

from __future__ import annotations

from agent.loop.acceptance import RUN_CALLS
from agent.loop.rules import ConversationSpec, next_step
from agent.loop.steps import NextStep, ResumeTool, RunTools
from agent.loop.tools import AgentTools
from agent.messages.message import Event, ResumedEvent, ToolCall
from agent.state.events import Clock, continued_event, result_event
from agent.state.trajectory import Journal, Trajectory
from toolsets.tool import ToolResult

_INTERRUPTED = (
    "Error: this call was interrupted before its result was known. It may have run in part; "
    "check the state of things before you repeat it."
)


def prepare_resume(
    trajectory: Trajectory,
    *,
    tools: AgentTools,
    spec: ConversationSpec,
    journal: Journal,
    kept: bool,
) -> None:
    """Prepare a replayed trajectory to continue after a crash.

    A call without a result may have run. If its tool is idempotent, the call stays open and is run
    (again); otherwise its result says that it was interrupted. `kept`: the workspace survived.
    """

    def record(event: Event) -> None:
        journal(event)
        trajectory.apply(event)

    step = next_step(trajectory, spec)
    calls = _possibly_running(step, tools, parallel=spec.options.parallel_tools)
    has_results = bool(trajectory.results or trajectory.last_results())
    interrupted: list[tuple[int, ToolCall]] = []
    repeated: list[tuple[int, ToolCall]] = []
    for n, call in calls:
        may_repeat = tools.is_idempotent(call["function"]["name"])
        (repeated if may_repeat else interrupted).append((n, call))
    record(
        ResumedEvent(
            kind="resumed",
            turn=trajectory.turns,
            interrupted=[call["id"] for _, call in interrupted],
            repeated=[call["id"] for _, call in repeated],
            # A workspace that no call has used yet is not lost, it was not made.
            workspace_kept=kept or not (has_results or interrupted),
        )
    )
    result = ToolResult(_INTERRUPTED, is_error=True, details={"failure": "interrupted"})
    for n, call in interrupted:
        if isinstance(step, ResumeTool):
            record(continued_event(step.result, step.reply, result, Clock()))
        else:
            record(result_event(trajectory.turns, n, call, result, Clock()))


def _possibly_running(
    step: NextStep, tools: AgentTools, *, parallel: bool
) -> list[tuple[int, ToolCall]]:
    """The calls that may have been running when the process died."""
    if isinstance(step, ResumeTool):
        return [(step.result["call"], step.call)] if step.is_for_tool else []
    if not isinstance(step, RunTools):
        return []
    calls = [(n, call) for n, call in step.calls if n < RUN_CALLS]
    # Calls that run one after the other: only the first can have begun.
    return calls if parallel and not tools.need_order(step.calls) else calls[:1]
