"""A token bucket, for rate limits that are known in advance."""

from __future__ import annotations

_BURST_S = 1.0
"""The bucket holds the tokens of this time; unused tokens beyond that are lost."""


class TokenBucket:
    """Tokens that refill at a steady rate. Taking more than there are leaves a debt, and the next
    call waits until it is paid off."""

    def __init__(self, per_minute: float | None, *, now: float, initial: float = 1.0) -> None:
        """`per_minute` None means no limit. Times are seconds of one monotonic clock.

        It starts with `initial` tokens; calls may go while it has at least one.
        """
        self._per_s = None if per_minute is None else per_minute / 60
        self._tokens = initial
        self._filled_at = now

    def change(self, per_minute: float | None, *, now: float) -> None:
        """Change the rate."""
        self._fill(now)
        self._per_s = None if per_minute is None else per_minute / 60

    def wait_s(self, *, now: float) -> float:
        """Seconds until the next call may go."""
        if self._per_s is None:
            return 0.0
        self._fill(now)
        if self._tokens >= 1.0:
            return 0.0
        return 60.0 if self._per_s == 0 else (1.0 - self._tokens) / self._per_s + 1e-3

    def take(self, amount: float) -> None:
        """Take tokens; a negative amount returns them."""
        self._tokens -= amount

    def _fill(self, now: float) -> None:
        per_s = self._per_s or 0.0
        full = max(1.0, per_s * _BURST_S)
        if self._tokens < full:
            self._tokens = min(full, self._tokens + (now - self._filled_at) * per_s)
        self._filled_at = now
