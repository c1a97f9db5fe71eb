"""Watches what the conversations of a start come to, and warns while money can still be saved."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.stop_rules import MIN_TASKS, NEVER, parse_stop_rules
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
"""Returns the reason why a stored record gives no training row; None if it gives one."""

_LOOK_AT_ALL = 2 * MIN_TASKS
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
        self._counts = EndingCounts(offers_tools=offers_tools(config))
        self._told: dict[str, int] = {}
        """The number of conversations that showed a sign when it was told last, by sign."""
        self.stop_reason: str | None = None
        """The reason why the run stops by `--stop_if`; None if it goes on."""

    def on_finished(self, fields: IndexFields, record: bytes) -> None:
        """Count a conversation that has its record; `fields` are those of the index."""
        if self._is_off:
            return
        counts = self._counts
        counts.ended += 1
        counts.tool_calls += fields.tool_calls
        if fields.status == "failed":
            counts.failed += 1
            counts.reasons[fields.error_class or "failed"] += 1
        elif fields.status not in NO_REASON:
            counts.reasons[fields.status] += 1
        if fields.passed is not None:
            counts.judged += 1
            counts.passed += fields.passed
        if fields.status != "failed":
            self._look_at_row(record)
        self._judge()

    def on_failed_attempt(self, error_class: str) -> None:
        """Count an attempt that failed, of a conversation that has attempts left."""
        if self._is_off:
            return
        self._counts.ended += 1
        self._counts.failed += 1
        self._counts.reasons[error_class] += 1
        self._judge()

    def _look_at_row(self, record: bytes) -> None:
        counts = self._counts
        is_skipped = counts.ended > _LOOK_AT_ALL and counts.ended % _LOOK_AT_ONE_IN
        if self._why_rejected is None or is_skipped:
            return
        counts.looked_at += 1
        if (reason := self._why_rejected(record)) is not None:
            counts.rejected[reason] += 1

    def _judge(self) -> None:
        """Apply the rules, and tell a sign when it first holds and at ten times its number."""
        broken = broken_rule(self._counts, self._rules)
        self.stop_reason = None if broken is None else f"{broken.text} (--stop_if={broken.sign})"
        for seen in find_signs(self._counts):
            if seen.found >= 10 * self._told.get(seen.sign, 0):
                self._told[seen.sign] = seen.found
                text = seen.text
                log.warning("%s", text)
                self._say(f"warning: {text}")
