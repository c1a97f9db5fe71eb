"""Counts for the rules, updated with each event, and sums of tokens and dollars.

With the counts no rule has to read the whole conversation. A sum is unknown if any of its parts is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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

_BLAMELESS_FAILURES = frozenset({"not_run", "interrupted", "denied"})
"""Failures that are not the fault of the model or the tool."""

MALFORMED_CALLS = frozenset({"unknown_tool", "invalid_arguments", "unknown_reference"})
"""Failures of a call that never reached its tool."""

_COUNTED_FAILURES = MALFORMED_CALLS | {"exception", "timeout"}
"""Failures that count as errors; a failure that the tool itself reports does not."""


class _Attempt(NamedTuple):
    """A call and its result, as they are compared with the next ones."""

    tool: str
    arguments: str
    result: str


class Tally:
    """Errors, unusable turns and repeated calls of one conversation."""

    def __init__(self) -> None:
        self.errors = 0
        """Failing calls and unusable replies so far."""
        self.unusable_turns = 0
        """Turns in a row without anything usable."""
        self.repeated_turns = 0
        """Turns in a row in which the same call gave the same result."""
        self._last: _Attempt | None = None

    def count_text(self, *, unusable: bool) -> None:
        """Count a reply without calls."""
        self.errors += unusable
        self.unusable_turns = self.unusable_turns + 1 if unusable else 0

    def count_turn(self, calls: Sequence[ToolCall], results: Sequence[Message]) -> None:
        """Count the results of one turn, in call order."""
        malformed = True
        for n, (call, result) in enumerate(zip(calls, results, strict=True)):
            failure = call_failure(result)
            self.errors += failure in _COUNTED_FAILURES
            malformed = malformed and failure in MALFORMED_CALLS
            if failure in _BLAMELESS_FAILURES:
                self.repeated_turns, self._last = 0, None
                continue
            # Texts that the runtime appended to the tool's own are not compared.
            tool_text_end = result.get("details", {}).get(TOOL_TEXT_END)
            function = call["function"]
            attempt = _Attempt(
                tool=function["name"],
                arguments=function["arguments"],
                result=result["content"][:tool_text_end],
            )
            # Equal calls of one reply are one attempt: none of them saw another's result.
            is_first_of_reply = n == 0
            if not _is_same(attempt, self._last):
                self.repeated_turns = 1
            elif is_first_of_reply:
                self.repeated_turns += 1
            self._last = attempt
        self.unusable_turns = self.unusable_turns + 1 if malformed else 0

    def count_continued(self, result: Message) -> None:
        """Count the second result of a tool that had asked the user."""
        self.errors += call_failure(result) in _COUNTED_FAILURES


def _is_same(one: _Attempt, other: _Attempt | None) -> bool:
    if other is None or one.tool != other.tool or one.result != other.result:
        return False
    if one.arguments == other.arguments:
        return True
    return canonical(one.arguments) == canonical(other.arguments)


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
