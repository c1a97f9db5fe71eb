"""What can happen next in a conversation: the rules choose a move, the loop makes it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from agent.messages import ResultEvent, ToolCall
from agent.state.trajectory import Status


class CallModel(NamedTuple):
    """Ask the model for its next reply."""

    tool_choice: Literal["auto", "none"] = "auto"


class RunTools(NamedTuple):
    """Run the calls of the last reply that have no result yet."""

    calls: list[tuple[int, ToolCall]]


class ResumeTool(NamedTuple):
    """Give the user's reply to a call whose tool asked for it."""

    call: ToolCall
    result: ResultEvent
    """The result in which it asked."""
    reply: str
    is_for_tool: bool
    """The tool is called again with the reply; else the model alone reads it."""


class AddNote(NamedTuple):
    """Tell the model something; `reason` names the rule."""

    reason: str
    text: str


class Finish(NamedTuple):
    """The conversation is over. `reason` says in words what the status alone does not."""

    status: Status
    reason: str | None = None


Move = CallModel | RunTools | ResumeTool | AddNote | Finish
