"""References: `$$TOOL-res-N` in arguments is replaced by the result of the Nth call."""

from __future__ import annotations

import re
from typing import Any

from agent.messages.message import OWN_CHARS, OWN_FROM, ToolCall
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json

STORED_AS = "stored_as"
"""Key in the details of a result: its name."""

_REFERENCE = re.compile(r"\$\$([A-Za-z0-9_-]+-res-[0-9]+)")

MAX_RESOLVED_CHARS = 1_000_000
"""Limit of inserted results: a result that is named many times must not use up all memory."""


class UnusableReference(Exception):
    """No result has the name, or the inserted results are too long."""


def name_for(call: ToolCall, t: Trajectory) -> str:
    """The name for the result of a call of the last reply; N counts all calls."""
    # Only results of earlier turns: those of a turn are added when all of them are known.
    before = sum(message["role"] == "tool" for message in t.messages)
    number = before + [other["id"] for other in t.last_calls()].index(call["id"]) + 1
    return f"{call['function']['name']}-res-{number}"


def tag(name: str) -> str:
    """The line for the model with the name of a result."""
    return f"\n[stored as $${name}; in arguments, this name stands for the result above]"


def resolve(arguments: str, t: Trajectory) -> str:
    """Replace names by results in the strings of `arguments` (JSON text).

    `$$` before anything else does not change. Raises `UnusableReference`. Arguments that are not
    JSON are returned unchanged; the check of arguments will report them.
    """
    room = MAX_RESOLVED_CHARS

    def content(match: re.Match[str]) -> str:
        nonlocal room
        result = _content(match[1], t)
        room -= len(result)
        if room < 0:
            raise UnusableReference(f"the results are longer than {MAX_RESOLVED_CHARS} characters")
        return result

    def resolved(value: Any) -> Any:
        match value:
            case str():
                return _REFERENCE.sub(content, value)
            case list():
                return [resolved(item) for item in value]
            case dict():
                return {key: resolved(item) for key, item in value.items()}
        return value

    try:
        return exact_json.dumps(resolved(exact_json.loads(arguments))).decode()
    except (exact_json.JSONDecodeError, TypeError, RecursionError):
        return arguments


def _content(name: str, t: Trajectory) -> str:
    for message in t.messages:
        details = message.get("details", {})
        if details.get(STORED_AS) == name:
            return message["content"][details.get(OWN_FROM, 0) : details[OWN_CHARS]]
    raise UnusableReference(f"there is no result with the name $${name}")
