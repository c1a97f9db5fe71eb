"""Time limits of calls that share one timer: nearly all calls end long before it fires."""

from __future__ import annotations

import asyncio


class CallTimeouts:
    """Gives each call a timeout of the same length. Belongs to one event loop."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends: dict[asyncio.Timeout, float] = {}
        """When each call is cut off; the first that was added is the first to be cut off."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> asyncio.Timeout:
        """A timeout to enter at once; give it to `end` when it was left."""
        loop = asyncio.get_running_loop()
        timeout = asyncio.timeout(None)
        self._ends[timeout] = end = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(end, self._cut_off)
        return timeout

    def end(self, timeout: asyncio.Timeout) -> None:
        """The call is over."""
        self._ends.pop(timeout, None)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _cut_off(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for timeout, end in list(self._ends.items()):
            if end > loop.time():
                self._timer = loop.call_at(end, self._cut_off)
                return
            del self._ends[timeout]
            timeout.reschedule(end)
