"""Results by name: `$$TOOL-res-N` in arguments stands for the result of the Nth call."""

from __future__ import annotations

import re
from typing import Any

from agent.messages import OWN_CHARS, OWN_FROM, ToolCall
from agent.state.trajectory import Trajectory
from toolsets import exact_json

STORED_AS = "stored_as"
"""In the details of a result: its name."""

_REFERENCE = re.compile(r"\$\$([A-Za-z0-9_-]+-res-[0-9]+)")

MAX_RESOLVED_CHARS = 1_000_000
"""Results that are named many times must not grow beyond what a machine can hold."""


class UnusableReference(Exception):
    """A name that no result has, or results too long to be put in."""


def name_for(call: ToolCall, t: Trajectory) -> str:
    """The name that the result of a call of the last reply gets; N counts over all calls."""
    # The results of a turn are added when all of them are known, so these are those before it.
    before = sum(message["role"] == "tool" for message in t.messages)
    number = before + [other["id"] for other in t.last_calls()].index(call["id"]) + 1
    return f"{call['function']['name']}-res-{number}"


def tag(name: str) -> str:
    """The line that tells the model under which name a result is stored."""
    return f"\n[stored as $${name}; in arguments, this name stands for the result above]"


def resolve(arguments: str, t: Trajectory) -> str:
    """Put results in the place of their names in the strings of `arguments` (JSON text).

    `$$` before anything but a name stays. Raises `UnusableReference`; arguments that are not JSON
    come back as they are, for the check of arguments to report.
    """
    room = MAX_RESOLVED_CHARS

    def content(match: re.Match[str]) -> str:
        nonlocal room
        found = _content(match[1], t)
        room -= len(found)
        if room < 0:
            raise UnusableReference(f"the results are longer than {MAX_RESOLVED_CHARS} characters")
        return found

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
