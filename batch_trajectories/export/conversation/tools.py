"""Values computed once per list of tools, which many conversations share.

Records that are read together hold the same list if they were offered the same tools.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from agent.state.final_answer import RESERVED
from batch_trajectories.runs.store.record_types import Tools

T = TypeVar("T")

_MOST = 64
_made: dict[tuple[int, Callable[[Any], Any]], tuple[Tools, Any]] = {}
"""Lists of tools with their results. Holding a list keeps its `id` from being reused."""


def once(tools: Tools, make: Callable[[Tools], T]) -> T:
    """The result of `make(tools)`, computed once for each list object."""
    key = id(tools), make
    known = _made.get(key)
    if known is None:
        if len(_made) >= _MOST:
            _made.clear()
        known = _made[key] = tools, make(tools)
    made: T = known[1]
    return made


def names_of(tools: Tools) -> frozenset[str]:
    """The names of tools."""
    return once(tools, _names)


def without_reserved(tools: Tools) -> Tools:
    """The tools without those that end a conversation; the same list if it has none."""
    return once(tools, _without_reserved)


def _names(tools: Tools) -> frozenset[str]:
    return frozenset(tool["function"]["name"] for tool in tools)


def _without_reserved(tools: Tools) -> Tools:
    others = [tool for tool in tools if tool["function"]["name"] not in RESERVED]
    return others if len(others) < len(tools) else tools
