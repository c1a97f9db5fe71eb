"""Time limits of calls that share one timer: nearly all calls end long before it fires."""

from __future__ import annotations

import asyncio


class CallTimeouts:
    """Gives each call a timeout of the same length, with one timer for all of them.

    The calls are those of one event loop at a time.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ends: dict[asyncio.Timeout, float] = {}
        """The time when each call is cut off; the first one added is the first to be cut off."""
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def begin(self) -> asyncio.Timeout:
        """Begin a call: returns a timeout to enter at once, and to give to `end` afterwards."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # the timer of a loop that has ended never fires
            self._loop, self._timer = loop, None
            self._ends.clear()
        timeout = asyncio.Timeout(None)
        self._ends[timeout] = end = loop.time() + self.timeout_s
        if self._timer is None:
            self._timer = loop.call_at(end, self._end_late_calls)
        return timeout

    def end(self, timeout: asyncio.Timeout) -> None:
        """End the call that has this timeout."""
        self._ends.pop(timeout, None)

    def close(self) -> None:
        """Stop the timer, unless calls are in flight; the next call starts it again."""
        if self._timer is not None and not self._ends:
            self._timer.cancel()
            self._timer = None

    def _end_late_calls(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for timeout, end in list(self._ends.items()):
            if end > loop.time():
                self._timer = loop.call_at(end, self._end_late_calls)
                return
            del self._ends[timeout]
            timeout.reschedule(end)
