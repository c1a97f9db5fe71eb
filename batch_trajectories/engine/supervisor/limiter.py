"""The number of calls in flight that an endpoint can take, found by growing until it refuses."""

from __future__ import annotations

import math

_CUT_FACTOR = 0.85
"""A refusal multiplies the limit by this."""

_NEAR_REFUSAL_SHARE = 0.95
"""Share of the limit at the last refusal from which on the limit grows slowly."""

_SLOW_GROWTH = 0.3
"""Slow growth: calls per round of calls."""

_RECENT_CALLS = 100
"""Number of latest calls whose refused share decides whether the endpoint is full. Some
endpoints refuse single calls whatever the load: only these are repeated, and the others go on."""

_FULL = 0.08
"""Refused share from which on the endpoint counts as full. An endpoint that refuses one call in
thirty by chance hardly ever gets there; one that is full soon passes it."""

_WITHOUT_EFFECT = 0.75
"""Part of the refused share: a cut had no effect if so much is left after it. A full endpoint
that refuses fewer than `_MAX_CHANCE_SHARE` never leaves so much."""

_MAX_CHANCE_SHARE = 0.25

_SOON_ROUNDS = 3
"""Rounds of calls after a cut that show its effect; later the limit has grown again."""

_FLOOR = 4
_SURE_REFUSALS = 8
"""Below this floor the limit is cut only where so many more calls were refused than answered since
the last cut. Some endpoints refuse a share of all calls however few there are, and with one call
in flight a slow reply would hold up everything."""

_HELD_UP = 10
"""Number of replies after a failure by load (5xx, no connection) that do not let the limit grow.
The limit therefore stays while one call in ten fails, but grows in spite of an occasional
failure."""

_MAX_HELD_UP_ROUNDS = 3
"""An outage delays growth by at most this many rounds of calls."""

MAX_COOL_DOWN_S = 60.0
"""The longest pause of all calls, even if the endpoint asks for more."""


class Limiter:
    """The limit of one endpoint.

    It grows while the endpoint keeps up and calls wait, and is cut when the endpoint refuses calls
    (429). It knows neither processes nor clocks: callers pass events with their times.
    """

    def __init__(self, *, start: int, ceiling: int) -> None:
        """Start with `start` calls in flight and never allow more than `ceiling`."""
        self._limit = float(min(start, ceiling))
        self._ceiling = ceiling
        self._refused_at = float("inf")
        self._cut_at = float("-inf")
        self._held_up = 0
        self._answered = self._refused = 0
        """Calls since the last cut."""
        self._recent = _MovingShare()
        """The calls that were refused."""
        self._share_at_cut = 1.0
        self._by_chance = 0.0
        """The share that was refused just as often after a cut."""
        self._is_cut = self._is_sure = False
        """Whether the limit was ever cut, and whether that was for more than the first calls."""
        self.cool_down_until = float("-inf")
        """No call may be sent before this time."""
        self.refused = 0
        """Calls that the endpoint refused (429)."""

    @property
    def limit(self) -> int:
        """Calls that may be in flight."""
        return int(self._limit)

    def cap(self, ceiling: int) -> None:
        """Never allow more than `ceiling` from now on."""
        self._ceiling = ceiling
        self._limit = min(self._limit, float(ceiling))

    @property
    def is_probed(self) -> bool:
        """Whether the endpoint has ever refused calls because it was full."""
        return self._is_cut

    def on_replies(self, count: int, *, is_needed: bool) -> None:
        """Count `count` answered calls; `is_needed`: calls wait for the limit.

        The limit doubles per round of calls until the first refusal. After that it grows by one
        call per round, and slowly near the limit of the last refusal.
        """
        self._answered += count
        self._recent.add(0.0, count)
        if self._recent.share < self._by_chance / 2:
            self._by_chance = self._recent.share
        held_up = min(self._held_up, count)
        self._held_up -= held_up
        count -= held_up
        if not is_needed or not count:
            return
        if not self.is_probed:
            growth = float(count)
        elif self._limit < self._refused_at * _NEAR_REFUSAL_SHARE:
            growth = count / self._limit
        else:
            growth = _SLOW_GROWTH * count / self._limit
        self._limit = min(float(self._ceiling), self._limit + growth)

    def on_refusal(self, retry_after_s: float | None, *, sent_at: float, now: float) -> None:
        """Count a refused call that was sent at `sent_at`; the endpoint asked for `retry_after_s`.

        If the endpoint refuses only few calls, that call alone waits. Calls that were sent before
        the last cut do not cut the limit again.
        """
        self.refused += 1
        self._recent.add(1.0)
        is_new = sent_at > self._cut_at
        self._refused += is_new
        calls = self._answered + self._refused
        has_round = calls >= self._limit
        if self._recent.share < self._by_chance + _FULL:
            if has_round and self._is_cut and not self._is_sure:
                # The first calls were refused by chance: others are, and far fewer.
                self._is_cut = False
                self._limit = max(self._limit, min(self._refused_at, float(self._ceiling)))
            return
        is_sure = self._recent.smoothed_share(self._limit) >= self._by_chance + _FULL
        self._is_sure = self._is_sure or is_sure
        if retry_after_s is not None and is_sure:
            pause_s = min(retry_after_s, MAX_COOL_DOWN_S)
            self.cool_down_until = max(self.cool_down_until, now + pause_s)
        if not is_new:
            self._share_at_cut = max(self._share_at_cut, self._recent.share)
            return
        if self._answered and not has_round:
            return
        share, before = self._refused / calls, self._share_at_cut
        is_soon = self._answered and calls < _SOON_ROUNDS * self._limit
        if is_soon and max(share, before) < _MAX_CHANCE_SHARE and share >= before * _WITHOUT_EFFECT:
            self._by_chance = share
            return
        is_load = self._refused >= self._answered + _SURE_REFUSALS
        lowest = 1.0 if is_load else min(self._limit, float(_FLOOR))
        self._is_cut = True
        if self._limit > lowest:
            self._share_at_cut = self._recent.share
            self._cut_at = now
            self._refused_at = self._limit
            self._limit = max(lowest, self._limit * _CUT_FACTOR)
            self._answered = self._refused = 0

    def on_failures(self, count: int) -> None:
        """Count `count` calls that failed under load otherwise, and hold up the limit's growth."""
        highest = int(_MAX_HELD_UP_ROUNDS * self._limit) + _HELD_UP
        self._held_up = min(self._held_up + _HELD_UP * count, highest)


class _MovingShare:
    """A moving share of the latest calls."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """Count `count` calls, each as `value`: 1 or 0."""
        kept = math.pow(1 - 1 / _RECENT_CALLS, count)
        self._sum = self._sum * kept + value * (1 - kept)
        self._weight = self._weight * kept + 1 - kept

    @property
    def share(self) -> float:
        """Share of the calls so far, the last ones counting most; 0 before the first."""
        return self._sum / self._weight if self._weight else 0.0

    def smoothed_share(self, calls: float) -> float:
        """Share as if there were at least `calls` calls: those in flight may still be answered."""
        return self._sum / max(self._weight, 1 - math.pow(1 - 1 / _RECENT_CALLS, calls))
