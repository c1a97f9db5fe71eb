"""What the rules count while a conversation grows, so that no rule has to look back over it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from agent.messages import ToolCall

NOT_THE_MODELS = frozenset({"not_run", "interrupted", "denied"})
"""Why a result may be an error through no doing of the model or the tool."""

_MALFORMED = frozenset({"unknown_tool", "invalid_arguments", "unknown_reference"})
"""Failures of a call that never reached its tool."""

_COUNTED = _MALFORMED | {"exception", "timeout"}
"""Failures that use up the error budget. A tool that reports a failure of its own does not."""


class Tally:
    """Errors, unusable turns, repeated calls and notes of one conversation."""

    def __init__(self) -> None:
        self.errors = 0
        """Failing calls and unusable replies so far."""
        self.unusable_turns = 0
        """How many turns in a row held nothing that could be used."""
        self.streak = 0
        """How often in a row the same call has given the same result."""
        self.notes: Counter[str] = Counter()
        """Notes written so far, by the rule that wrote them."""
        self._last: tuple[str, str, str] | None = None

    def count_text(self, *, unusable: bool) -> None:
        """Count a reply without calls."""
        self.errors += unusable
        self.unusable_turns = self.unusable_turns + 1 if unusable else 0

    def count_turn(self, calls: Sequence[ToolCall], results: Sequence[Mapping[str, Any]]) -> None:
        """Count the results of one turn, as messages in call order."""
        failures = [result.get("details", {}).get("failure") for result in results]
        self.errors += sum(failure in _COUNTED for failure in failures)
        malformed = all(failure in _MALFORMED for failure in failures)
        self.unusable_turns = self.unusable_turns + 1 if malformed else 0
        for call, result, failure in zip(calls, results, failures, strict=True):
            if failure in NOT_THE_MODELS:
                continue
            function = call["function"]
            now = (function["name"], function["arguments"], result["content"])
            self.streak = self.streak + 1 if _is_same(now, self._last) else 1
            self._last = now


def _is_same(now: tuple[str, str, str], last: tuple[str, str, str] | None) -> bool:
    if last is None or now[0] != last[0] or now[2] != last[2]:
        return False
    return now[1] == last[1] or _canonical(now[1]) == _canonical(last[1])


def _canonical(arguments: str) -> str | bytes:
    """One spelling for arguments that differ in white space or in the order of their keys."""
    try:
        return orjson.dumps(orjson.loads(arguments), option=orjson.OPT_SORT_KEYS)
    except (orjson.JSONDecodeError, TypeError):
        return arguments.strip()
