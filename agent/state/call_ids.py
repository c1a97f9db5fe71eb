"""The ids of tool calls, by which results are found."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

from agent.messages.message import Message


def make_ids_unique(message: Message, used: Collection[str], *, turn: int) -> None:
    """Replace empty and repeated call ids, which some servers send: results are found by id."""
    calls = message.get("tool_calls")
    if not calls:
        return
    taken = {call["id"] for call in calls} | {""}
    seen: set[str] = set()
    for n, call in enumerate(calls):
        if call["id"] in seen or call["id"] in used or not call["id"]:
            call["id"] = _new_id(f"call_{turn}_{n}", taken, used)
        taken.add(call["id"])
        seen.add(call["id"])
    # Verbatim blocks of some dialects contain the same calls and need the same ids.
    ids = iter(call["id"] for call in calls)
    for block in message.get("provider_blocks", {"blocks": []})["blocks"]:
        if field := _id_field(block):
            block[field] = next(ids)


def _id_field(block: Mapping[str, Any]) -> str | None:
    """The field with the call id in a verbatim block that is a call of a tool of ours."""
    kind = str(block.get("type"))
    if kind == "tool_use":
        return "id"
    is_call = kind == "function_call" or (kind.endswith("_call") and "call_id" in block)
    return "call_id" if is_call else None


def _new_id(wanted: str, taken: Collection[str], used: Collection[str]) -> str:
    candidates = itertools.chain([wanted], (f"{wanted}_{n}" for n in itertools.count(2)))
    return next(id for id in candidates if id not in taken and id not in used)
