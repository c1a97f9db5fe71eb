"""Tools that ask the user for something, and the user's replies that answer them.

A tool asks by a result that is a JSON object with a true `requiresConfirmation` or
`requiresInput`. A reply goes to the tool that asked, unless it plainly wants something else.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from agent.messages import Message, ToolCall
from agent.trajectory import Trajectory

_ANSWERS = re.compile(
    r"(?:y|yes|yeah|yep|ok|okay|sure|confirm(?:ed)?|go ahead|proceed|accept(?:ed)?|approved?"
    r"|n|no|nope|cancel|stop|abort|never ?mind|don't|do not|reject(?:ed)?|change|instead)\b",
    re.IGNORECASE,
)
"""How an acceptance, a refusal or a correction begins."""

_INSTRUCTS = re.compile(
    r"(?:please\s+)?(?:list|show|get|find|search|create|add|make|write|read|open|run|delete|remove"
    r"|update|explain|tell|give|fetch|compute|calculate|summari[sz]e)\b",
    re.IGNORECASE,
)
"""How a fresh instruction begins."""


class Waiting(NamedTuple):
    """A call whose tool waits for the user: its number in its turn, and what the tool asks."""

    n: int
    call: ToolCall
    question: str


def question_of(content: str) -> str | None:
    """What a result asks the user, None where it asks nothing."""
    if not content.lstrip().startswith("{"):
        return None
    try:
        result = orjson.loads(content)
    except orjson.JSONDecodeError:
        return None
    if not (result.get("requiresConfirmation") or result.get("requiresInput")):
        return None
    message = result.get("message")
    return message if isinstance(message, str) and message else content


def waiting_call(t: Trajectory) -> Waiting | None:
    """The first call of the last turn whose tool still waits for the user."""
    answered = {
        note["details"]["call"]: note["details"]["pending"]
        for note in t.noted
        if note["reason"] == "user_reply" and "details" in note
    }
    for n, (call, result) in enumerate(zip(t.last_calls(), t.last_results(), strict=False)):
        question = _still_asked(result, answered.get(n))
        if question is not None:
            return Waiting(n, call, question)
    return None


def _still_asked(result: Message, pending: str | bool | None) -> str | None:
    """The question of a result; after a reply, what the tool asked then (False: nothing)."""
    if pending is None:
        return None if result["is_error"] else question_of(result["content"])
    return pending if isinstance(pending, str) else None


def wants_other_work(reply: str, *, called: str, tools: Sequence[str]) -> bool:
    """Whether a user's reply is a fresh instruction rather than one for the tool that asked."""
    if any(tool != called and re.search(rf"\b{re.escape(tool)}\b", reply) for tool in tools):
        return True
    reply = reply.strip()
    return not _ANSWERS.match(reply) and bool(_INSTRUCTS.match(reply))
