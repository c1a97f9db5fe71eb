"""Watches what the conversations of a start come to, and warns while money can still be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.stop_rules import LEAST, NEVER, parse_stop_rules
from batch_trajectories.engine.hopeless import (
    NO_REASON,
    EndingCounts,
    broken_rule,
    find_signs,
    offers_tools,
)
from batch_trajectories.records.index import IndexFields

log = logging.getLogger(__name__)

WhyRejected = Callable[[bytes], str | None]
"""From a stored record to the reason why it gives no training row; None if it gives one."""

_LOOK_AT_ALL = 2 * LEAST
_LOOK_AT_ONE_IN = 10
"""Later records are only sampled: making a row takes as long as some calls."""


class RunWatch:
    """Counts the endings of one start, tells its user of signs, and applies `--stop_if`.

    Earlier starts do not count: the user may have mended what made them fail.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        config: RunConfig,
        *,
        why_rejected: WhyRejected | None = None,
    ) -> None:
        """`why_rejected` is None where no training rows are made of the conversations."""
        self._say = say
        self._rules = parse_stop_rules(config.stop_if)
        self._is_off = config.stop_if == (NEVER,)
        self._why_rejected = why_rejected
        self._outcomes = EndingCounts(offers_tools=offers_tools(config))
        self._told: dict[str, int] = {}
        """For each sign that was told, how many conversations had it then."""

    def on_finished(self, fields: IndexFields, record: bytes) -> None:
        """Count a conversation that has its record; `fields` are those of the index."""
        if self._is_off:
            return
        outcomes = self._outcomes
        outcomes.ended += 1
        outcomes.tool_calls += fields.tool_calls
        if fields.status == "failed":
            outcomes.failed += 1
            outcomes.reasons[fields.error_class or "failed"] += 1
        elif fields.status not in NO_REASON:
            outcomes.reasons[fields.status] += 1
        if fields.passed is not None:
            outcomes.judged += 1
            outcomes.passed += fields.passed
        if fields.status != "failed":
            self._look_at_row(record)
        self._warn()

    def on_failed_attempt(self, error_class: str) -> None:
        """Count an attempt that failed, of a conversation that has attempts left."""
        if self._is_off:
            return
        self._outcomes.ended += 1
        self._outcomes.failed += 1
        self._outcomes.reasons[error_class] += 1
        self._warn()

    def broken_rule(self) -> str | None:
        """Why the run stops by `--stop_if`; None if it goes on."""
        seen = broken_rule(self._outcomes, self._rules)
        return None if seen is None else f"{seen.text} (--stop_if={seen.sign})"

    def _look_at_row(self, record: bytes) -> None:
        ended, outcomes = self._outcomes.ended, self._outcomes
        if self._why_rejected is None or (ended > _LOOK_AT_ALL and ended % _LOOK_AT_ONE_IN):
            return
        outcomes.looked_at += 1
        if (reason := self._why_rejected(record)) is not None:
            outcomes.rejected[reason] += 1

    def _warn(self) -> None:
        """Tell each sign when it first holds, and again each time its number is ten times that."""
        for seen in find_signs(self._outcomes):
            if seen.found >= 10 * self._told.get(seen.sign, 0):
                self._told[seen.sign] = seen.found
                log.warning("%s", seen.text)
                self._say(f"warning: {seen.text}")
