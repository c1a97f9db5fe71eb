"""The limit on model calls in flight to an endpoint, found by probing.

The limit grows while the endpoint keeps up and calls wait, and is cut when the endpoint refuses
calls (429). This module knows neither processes nor clocks: callers pass events with their times.
"""

from __future__ import annotations

from collections.abc import Sequence

_CUT = 0.85
"""A refusal multiplies the limit by this."""

_NEAR = 0.95
"""From this share of the limit of the last refusal on, the limit grows slowly."""

_SLOWLY = 0.3
"""Slow growth, in calls per round of calls."""

_FLOOR = 4
_SURELY = 8
"""Below this floor the limit is cut only where so many more calls were refused than answered since
the last cut. Some endpoints refuse a share of all calls however few there are, and with one call
in flight a slow reply would hold up everything."""

_HELD_UP = 10
"""Number of replies after a failure by load (5xx, no connection) that do not let the limit grow.
So it stays while one call in ten fails, but grows in spite of an occasional failure."""

_MAX_HELD_UP_ROUNDS = 3
"""An outage delays growth by at most this many rounds of calls."""

MAX_COOL_DOWN_S = 60.0
"""The longest pause of all calls, even if the endpoint asks for more."""


class Limiter:
    """The limit of one endpoint."""

    def __init__(self, *, start: int, ceiling: int) -> None:
        """Start with `start` calls in flight and never allow more than `ceiling`."""
        self._limit = float(min(start, ceiling))
        self._ceiling = ceiling
        self._refused_at = float("inf")
        self._cut_at = float("-inf")
        self._held_up = 0
        self._answered = self._refused = 0
        """Calls since the last cut."""
        self.cool_down_until = float("-inf")
        """No call may be sent before this time."""
        self.refused = 0
        """Calls that the endpoint refused (429)."""

    @property
    def limit(self) -> int:
        """Calls that may be in flight."""
        return int(self._limit)

    @property
    def is_probed(self) -> bool:
        """Whether the endpoint has ever refused a call."""
        return self.refused > 0

    def on_replies(self, count: int, *, is_needed: bool) -> None:
        """`count` calls were answered; `is_needed`: calls wait for the limit.

        The limit doubles per round of calls until the first refusal. After that it grows by one
        call per round, and slowly near the limit of the last refusal.
        """
        self._answered += count
        held_up = min(self._held_up, count)
        self._held_up -= held_up
        count -= held_up
        if not is_needed or not count:
            return
        if not self.is_probed:
            growth = float(count)
        elif self._limit < self._refused_at * _NEAR:
            growth = count / self._limit
        else:
            growth = _SLOWLY * count / self._limit
        self._limit = min(float(self._ceiling), self._limit + growth)

    def on_refusal(self, retry_after_s: float | None, *, sent_at: float, now: float) -> None:
        """The endpoint refused a call that was sent at `sent_at`, and asked for `retry_after_s`.

        Calls that were sent before the last cut do not cut the limit again.
        """
        self.refused += 1
        if retry_after_s is not None:
            pause_s = min(retry_after_s, MAX_COOL_DOWN_S)
            self.cool_down_until = max(self.cool_down_until, now + pause_s)
        if sent_at <= self._cut_at:
            return
        self._refused += 1
        is_load = self._refused >= self._answered + _SURELY
        lowest = 1.0 if is_load else min(self._limit, float(_FLOOR))
        if self._limit > lowest:
            self._cut_at = now
            self._refused_at = self._limit
            self._limit = max(lowest, self._limit * _CUT)
            self._answered = self._refused = 0

    def on_failures(self, count: int) -> None:
        """`count` calls failed by load otherwise; the limit should not grow for a while."""
        highest = int(_MAX_HELD_UP_ROUNDS * self._limit) + _HELD_UP
        self._held_up = min(self._held_up + _HELD_UP * count, highest)


def share_out(limit: int, demands: Sequence[int], *, turn: int = 0) -> list[int]:
    """Divide `limit` calls among workers that want `demands` calls in flight.

    No worker gets more than it wants while another wants more. The rest is divided, too, so
    workers can start calls at once. The shares sum to `limit`. An uneven remainder goes to other
    workers with each `turn`, so even a limit below the number of workers starves none.
    """
    shares = [0] * len(demands)
    left = limit
    for wanted in (demands, [limit] * len(demands)):
        open_ = [n for n in range(len(shares)) if shares[n] < wanted[n]]
        while left and open_:
            each, extra = divmod(left, len(open_))
            shift = turn % len(open_)
            for place, n in enumerate(open_[shift:] + open_[:shift]):
                more = min(wanted[n] - shares[n], each + (place < extra))
                shares[n] += more
                left -= more
            open_ = [n for n in open_ if shares[n] < wanted[n]]
    return shares
