"""Counts for the rules, updated with each event, and sums of tokens and dollars.

With the counts no rule has to read the whole conversation. A sum is unknown if any of its parts is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agent.messages.message import (
    MAX_TOKEN_COUNT,
    TOOL_TEXT_END,
    Message,
    ReplyEvent,
    ToolCall,
    Usage,
    call_failure,
)
from batch_trajectories.basics import exact_json

_NO_FAULT = frozenset({"not_run", "interrupted", "denied"})
"""Failures that are not the fault of the model or the tool."""

MALFORMED = frozenset({"unknown_tool", "invalid_arguments", "unknown_reference"})
"""Failures of a call that never reached its tool."""

_COUNTED = MALFORMED | {"exception", "timeout"}
"""Failures that count as errors; a failure that the tool itself reports does not."""


class Tally:
    """Errors, unusable turns and repeated calls of one conversation."""

    def __init__(self) -> None:
        self.errors = 0
        """Failing calls and unusable replies so far."""
        self.unusable_turns = 0
        """Turns in a row without anything usable."""
        self.streak = 0
        """Turns in a row in which the same call gave the same result."""
        self._last: tuple[str, str, str] | None = None

    def count_text(self, *, unusable: bool) -> None:
        """Count a reply without calls."""
        self.errors += unusable
        self.unusable_turns = self.unusable_turns + 1 if unusable else 0

    def count_turn(self, calls: Sequence[ToolCall], results: Sequence[Message]) -> None:
        """Count the results of one turn, in call order."""
        failures = [call_failure(result) for result in results]
        self.errors += sum(failure in _COUNTED for failure in failures)
        malformed = all(failure in MALFORMED for failure in failures)
        self.unusable_turns = self.unusable_turns + 1 if malformed else 0
        for n, (call, result, failure) in enumerate(zip(calls, results, failures, strict=True)):
            if failure in _NO_FAULT:
                self.streak, self._last = 0, None
                continue
            own = result.get("details", {}).get(TOOL_TEXT_END)
            function = call["function"]
            now = (function["name"], function["arguments"], result["content"][:own])
            # Equal calls of one reply are one attempt: none of them saw another's result.
            if not (n and _is_same(now, self._last)):
                self.streak = self.streak + 1 if _is_same(now, self._last) else 1
            self._last = now

    def count_continued(self, result: Message) -> None:
        """Count the second result of a tool that had asked the user."""
        self.errors += call_failure(result) in _COUNTED


def _is_same(now: tuple[str, str, str], last: tuple[str, str, str] | None) -> bool:
    if last is None or now[0] != last[0] or now[2] != last[2]:
        return False
    return now[1] == last[1] or canonical(now[1]) == canonical(last[1])


def canonical(arguments: str) -> str | bytes:
    """A text that is the same for arguments that differ only in white space or order of keys."""
    try:
        return exact_json.dumps(exact_json.loads(arguments), option=orjson.OPT_SORT_KEYS)
    except (exact_json.JSONDecodeError, TypeError):
        return arguments.strip()


def sum_usage(replies: Sequence[ReplyEvent]) -> Usage | None:
    """The tokens of all replies together; a count is None if it is unknown for any reply."""
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


def sum_cost(replies: Sequence[ReplyEvent]) -> float | None:
    """The dollars of all replies together; None if the price of any is unknown."""
    costs = [reply["cost_usd"] for reply in replies]
    known = [cost for cost in costs if cost is not None]
    return sum(known) if known and len(known) == len(costs) else None


def _sum_known(usages: Sequence[Usage | None], key: str) -> int | None:
    counts: list[int | None] = [None if usage is None else _count(usage, key) for usage in usages]
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _count(usage: Mapping[str, Any], key: str) -> int | None:
    count = usage.get(key)
    return count if isinstance(count, int) and count < MAX_TOKEN_COUNT else None
