"""Tokens and dollars of replies: a sum is unknown if any part of it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import MOST_TOKENS, ReplyEvent, Usage


def usage_of(replies: Sequence[ReplyEvent]) -> Usage | None:
    """The tokens of all replies; a count that is unknown for any of them is None."""
    if not replies:
        return None
    usages = [reply["usage"] for reply in replies]
    return Usage(
        input_tokens=_sum_known(usages, "input_tokens"),
        output_tokens=_sum_known(usages, "output_tokens"),
        cache_read_tokens=_sum_known(usages, "cache_read_tokens"),
        cache_write_tokens=_sum_known(usages, "cache_write_tokens"),
        reasoning_tokens=_sum_known(usages, "reasoning_tokens"),
    )


def cost_of(replies: Sequence[ReplyEvent]) -> float | None:
    """The dollars of all replies, or None if the price of any is unknown."""
    costs = [reply["cost_usd"] for reply in replies]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known and len(known) == len(costs) else None


def _sum_known(usages: Sequence[Usage | None], key: str) -> int | None:
    counts: list[int | None] = [None if usage is None else _count(usage, key) for usage in usages]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    count = usage.get(key)
    return count if isinstance(count, int) and count < MOST_TOKENS else None
