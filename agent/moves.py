"""What can happen next in a conversation: the rules choose a move, the loop makes it."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from agent.messages import ToolCall
from agent.trajectory import Status


class Ask(NamedTuple):
    """Ask the model for its next reply."""

    tool_choice: Literal["auto", "none"] = "auto"


class Answer(NamedTuple):
    """Run the calls of the last reply that have no result yet."""

    calls: list[tuple[int, ToolCall]]


class Continue(NamedTuple):
    """Run a call again whose tool asked for input, with what the user said."""

    n: int
    call: ToolCall
    reply: str


class Note(NamedTuple):
    """Tell the model something; `reason` names the rule."""

    reason: str
    text: str
    details: dict[str, Any] | None = None


class End(NamedTuple):
    """The conversation is over. `reason` says in words what the status alone does not."""

    status: Status
    reason: str | None = None


Move = Ask | Answer | Continue | Note | End
