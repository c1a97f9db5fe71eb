"""Tools that ask the user, and the user's replies.

A tool asks with the object that it returns (see `toolsets.tool.as_result`). A reply goes to the
tool that asked, unless it is clearly a new instruction.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from agent.messages.message import ResultEvent, ToolCall
from agent.state.trajectory import Trajectory
from toolsets.tool import ASKS

_ANSWERS = re.compile(
    r"(?:y|yes|yeah|yep|ok|okay|sure|confirm(?:ed)?|go ahead|proceed|accept(?:ed)?|approved?"
    r"|n|no|nope|cancel|stop|abort|never ?mind|don't|do not|reject(?:ed)?|change|instead)\b",
    re.IGNORECASE,
)
"""The beginning of an acceptance, a refusal or a correction."""

_INSTRUCTS = re.compile(
    r"(?:please\s+)?(?:list|show|get|find|search|create|add|make|write|read|open|run|delete|remove"
    r"|update|explain|tell|give|fetch|compute|calculate|summari[sz]e)\b",
    re.IGNORECASE,
)
"""The beginning of a new instruction."""


class Waiting(NamedTuple):
    """A call whose tool waits for the user, its result so far, and its question."""

    call: ToolCall
    result: ResultEvent
    question: str


def waiting_call(t: Trajectory) -> Waiting | None:
    """The first call of the last turn whose tool waits for the user."""
    for call, result in zip(t.last_calls(), t.last_results(), strict=False):
        question = result["message"].get("details", {}).get(ASKS)
        if question is not None:
            return Waiting(call, result, question)
    return None


def wants_other_work(reply: str, *, called: str, tools: Sequence[str]) -> bool:
    """Whether a user's reply is a new instruction rather than a reply to the tool that asked."""
    if any(tool != called and re.search(rf"\b{re.escape(tool)}\b", reply) for tool in tools):
        return True
    reply = reply.strip()
    return not _ANSWERS.match(reply) and bool(_INSTRUCTS.match(reply))
