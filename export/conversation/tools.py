"""What is made once of tools that many conversations are offered.

Records that are read together share one list of tools where they were offered the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from agent.state.final_answer import RESERVED

Tools = Sequence[Mapping[str, Any]]
T = TypeVar("T")

NO_TOOLS: Tools = ()

_MOST = 64
_made: dict[tuple[int, Callable[[Any], Any]], tuple[Tools, Any]] = {}
"""Each list of tools with what was made of it. A list that is held here keeps its `id`."""


def once(tools: Tools, make: Callable[[Tools], T]) -> T:
    """What `make` makes of tools, the last time that it was called with this very list."""
    key = id(tools), make
    known = _made.get(key)
    if known is None:
        if len(_made) >= _MOST:
            _made.clear()
        known = _made[key] = tools, make(tools)
    made: T = known[1]
    return made


def tools_of(record: Mapping[str, Any]) -> Tools:
    """The tools that the model was offered."""
    return record["tools"] or NO_TOOLS


def names_of(tools: Tools) -> frozenset[str]:
    """The names of tools."""
    return once(tools, _names)


def without_reserved(tools: Tools) -> Tools:
    """The tools but those by which a model ends its conversation; the same list without such."""
    return once(tools, _without_reserved)


def _names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


def _without_reserved(tools: Tools) -> Tools:
    others = [tool for tool in tools if tool["function"]["name"] not in RESERVED]
    return others if len(others) < len(tools) else tools
