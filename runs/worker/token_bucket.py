"""So much per minute, spread evenly: for the limits that a provider states in advance."""

from __future__ import annotations

_BURST_S = 1.0
"""What was not used for longer than this is not made up for."""


class TokenBucket:
    """A stock that fills up at a steady rate. What is taken may leave a debt, which is waited
    off before the next may go."""

    def __init__(
        self, per_minute: float | None, *, now: float, initial: float = 1.0, least: float = 1.0
    ) -> None:
        """`per_minute` None means no bound. Times are seconds of one monotonic clock.

        It begins with `initial`, and lets something go while there are at least `least`.
        """
        self._per_s = None if per_minute is None else per_minute / 60
        self._stock = initial
        self._least = least
        self._filled_at = now

    def change(self, per_minute: float | None, *, now: float) -> None:
        """Go on at another rate."""
        self._fill(now)
        self._per_s = None if per_minute is None else per_minute / 60

    def wait_s(self, *, now: float) -> float:
        """How long nothing may go yet; 0 where something may."""
        if self._per_s is None:
            return 0.0
        self._fill(now)
        if self._stock >= self._least:
            return 0.0
        return 60.0 if self._per_s == 0 else (self._least - self._stock) / self._per_s + 1e-3

    def take(self, amount: float) -> None:
        """Use up `amount`; a negative one gives back."""
        self._stock -= amount

    def _fill(self, now: float) -> None:
        per_s = self._per_s or 0.0
        full = max(1.0, per_s * _BURST_S)
        if self._stock < full:
            self._stock = min(full, self._stock + (now - self._filled_at) * per_s)
        self._filled_at = now
