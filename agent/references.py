"""Results by name: `$$TOOL-res-N` in arguments stands for the result of the Nth call."""

from __future__ import annotations

import re
from typing import Any

import orjson

from agent.messages import ToolCall
from agent.trajectory import Trajectory

_REFERENCE = re.compile(r"\$\$([A-Za-z0-9_-]+)")


class UnknownReference(Exception):
    """No result has this name."""


def name_for(call: ToolCall, t: Trajectory) -> str:
    """The name that the result of a call of the last reply gets; N counts over all calls."""
    # The results of a turn are added when all of them are known, so these are those before it.
    number = len(t.results) + [other["id"] for other in t.last_calls()].index(call["id"]) + 1
    return f"{call['function']['name']}-res-{number}"


def tag(name: str) -> str:
    """The line that tells the model under which name a result is stored."""
    return f"\n[stored as $${name}; in arguments, this name stands for the result above]"


def resolve(arguments: str, t: Trajectory) -> str:
    """Put results in the place of their names in the strings of `arguments` (JSON text).

    `$$` before anything but a name stays. Raises `UnknownReference`; arguments that are not JSON
    come back as they are, for the check of arguments to report.
    """
    try:
        loaded = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return arguments
    return orjson.dumps(_resolved(loaded, t)).decode()


def _resolved(value: Any, t: Trajectory) -> Any:
    match value:
        case str():
            return _REFERENCE.sub(lambda match: _content(match[1], t), value)
        case list():
            return [_resolved(item, t) for item in value]
        case dict():
            return {key: _resolved(item, t) for key, item in value.items()}
    return value


def _content(name: str, t: Trajectory) -> str:
    _, _, number = name.rpartition("-res-")
    if number.isdecimal() and 1 <= int(number) <= len(t.results):
        message = t.results[int(number) - 1]["message"]
        if message["content"].endswith(tag(name)):
            return message["content"].removesuffix(tag(name))
    raise UnknownReference(name)
