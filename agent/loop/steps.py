"""The steps of a conversation: the rules choose a step, the loop takes it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from agent.messages.message import ResultEvent, ToolCall
from agent.state.trajectory import Status


class CallModel(NamedTuple):
    """Call the model for its next reply."""

    tool_choice: Literal["auto", "none"] = "auto"


class RunTools(NamedTuple):
    """Run the calls of the last reply that have no result yet."""

    calls: list[tuple[int, ToolCall]]


class ResumeTool(NamedTuple):
    """Give the user's reply to a call whose tool asked for it."""

    call: ToolCall
    result: ResultEvent
    """The result with the question."""
    reply: str
    is_for_tool: bool
    """The tool is called again with the reply; else only the model sees it."""


class AddNote(NamedTuple):
    """Add a text for the model; `reason` names the rule."""

    reason: str
    text: str


class AskUser(NamedTuple):
    """Have the simulated user write its next message."""


class Finish(NamedTuple):
    """End the conversation; `reason` adds details to the status."""

    status: Status
    reason: str | None = None

    def describe(self) -> str:
        """The status, with the reason if there is one."""
        return f"{self.status}: {self.reason}" if self.reason else self.status


NextStep = CallModel | RunTools | ResumeTool | AddNote | AskUser | Finish
