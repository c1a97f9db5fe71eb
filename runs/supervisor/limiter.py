"""How many model calls the whole run may have in flight: found by probing, shared by all workers.

The limit grows while the endpoint keeps up and something waits for it, and is cut when the
endpoint refuses calls (429). Nothing here knows of processes or clocks: it is told what happened
and when, and gives numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

_CUT = 0.85
"""What is left of the limit after a refusal."""

_NEAR = 0.95
"""From this share of the limit at which calls were last refused, the limit grows slowly."""

_SLOWLY = 0.3
"""Calls per round that the limit grows by when it grows slowly."""

_HELD_UP = 10
"""Replies that it takes to make up for a failure of the endpoint (5xx, a cut connection): until
then the limit does not grow. So it stands still while one call in ten fails, and does grow beside
a failure now and then."""

_MOST_HELD_UP = 3
"""An outage holds growth up for so many rounds of calls at most."""

MAX_COOL_DOWN_S = 60.0
"""Longest pause of all calls, also where the endpoint asks for more."""


class Limiter:
    """The limit of one endpoint."""

    def __init__(self, *, start: int, ceiling: int) -> None:
        """Begin at `start` calls in flight and never allow more than `ceiling`."""
        self._limit = float(min(start, ceiling))
        self._ceiling = ceiling
        self._refused_at = float("inf")
        self._cut_at = float("-inf")
        self._held_up = 0
        self.cool_down_until = float("-inf")
        """Before this moment no call is to be sent."""
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
        """`count` calls were answered; `is_needed` tells whether calls wait for the limit.

        The limit doubles per round of calls until the first refusal. After that it grows by one
        call per round, and slowly where calls were refused last: there it is about right.
        """
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
        """A call was refused that was sent at `sent_at`.

        `retry_after_s` is what the endpoint asked for. Calls that were sent before the last cut
        say nothing about the limit since.
        """
        self.refused += 1
        if retry_after_s is not None:
            pause_s = min(retry_after_s, MAX_COOL_DOWN_S)
            self.cool_down_until = max(self.cool_down_until, now + pause_s)
        if sent_at > self._cut_at:
            self._cut_at = now
            self._refused_at = self._limit
            self._limit = max(1.0, self._limit * _CUT)

    def on_failures(self, count: int) -> None:
        """Some calls failed in a way that more calls would not help."""
        most = int(_MOST_HELD_UP * self._limit) + _HELD_UP
        self._held_up = min(self._held_up + _HELD_UP * count, most)


def share_out(limit: int, demands: Sequence[int], *, turn: int = 0) -> list[int]:
    """Divide `limit` calls among workers that want `demands` calls in flight.

    Nobody gets more than it wants while another wants more; what nobody wants is divided too, so
    that a worker can begin at once. The shares sum to `limit`. What does not divide evenly goes to
    others with every `turn`, so that a limit below the number of workers starves none.
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
