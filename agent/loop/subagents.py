"""Agents that an agent can call as tools.

The calling agent sees one result. The subagent's conversation is an inner conversation of its
caller: part of the same record, paid from the same budget, and resumed after a crash.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from agent.loop.rules import Finish
from agent.messages.message import ToolCall
from agent.options import Subagent
from agent.state.trajectory import Trajectory
from batch_trajectories.basics.text import clip
from toolsets.context import ToolContext
from toolsets.tool import MAX_RESULT_CHARS, ArgumentsError, Tool, ToolResult, tool

RunSubagent = Callable[[Subagent, str, str], Awaitable[tuple[Finish, Trajectory]]]
"""Runs a subagent, given the call id and the task; returns its ending and conversation."""


@tool(name="subagent")
def _form(
    context: ToolContext,
    task: Annotated[str, Field(description="What to do, with all that must be known for it.")],
) -> None:
    """The schema of the calls of all subagents; it is never run."""


class SubagentTool:
    """One subagent as a tool of its caller."""

    def __init__(self, subagent: Subagent, start: RunSubagent) -> None:
        self._subagent = subagent
        self._tool = _as_tool(subagent)
        self.schema = self._tool.schema
        """The subagent as a tool, in OpenAI form."""
        self._start = start

    async def call(self, call: ToolCall) -> ToolResult:
        """Have the subagent work on the task of the call.

        The result is its answer, or an error that says how it ended. If the endpoint fails, the
        `ModelError` fails the caller's conversation, too.
        """
        try:
            arguments = self._tool.parse_arguments(call["function"]["arguments"])
        except ArgumentsError as error:
            text = f"Error: invalid arguments for {self._tool.name}: {error}"
            return ToolResult(f"{text}\nArguments it takes: task", is_error=True, details=_INVALID)
        end, conversation = await self._start(self._subagent, call["id"], arguments["task"])
        details = {"subagent": self._subagent.name, "status": end.status}
        if end.status == "completed":
            answer = clip(conversation.final_text(), max_chars=MAX_RESULT_CHARS)
            return ToolResult(answer, details=details)
        text = f"Error: the subagent gave no answer; it ended as {end.describe()}"
        return ToolResult(text, is_error=True, details=details)


def subagent_schema(subagent: Subagent) -> Mapping[str, Any]:
    """The schema of a subagent for a calling model, in OpenAI form."""
    return _as_tool(subagent).schema


def _as_tool(subagent: Subagent) -> Tool:
    return replace(_form, name=subagent.name, description=subagent.description)


_INVALID = {"failure": "invalid_arguments"}
