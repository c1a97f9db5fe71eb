"""The time limit of a conversation: counts its time, and cuts off the call that exceeds it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import asyncio

_MARGIN_S = 0.01
"""Seconds by which a call is cut off late, so that its rounded time exceeds the limit."""


@dataclass(slots=True)
class TimeAtWork:
    """The time of all model and tool calls; calls that overlap count once.

    Pauses between two starts, and calls that a crash interrupted, have no event and do not count.
    """

    seconds: float = 0.0
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, began: float, ended: float) -> None:
        """Count from `began` to `ended`, epoch seconds."""
        if self._spans and ended <= self._spans[-1][0]:
            self.seconds += ended - began  # the clock was set back
            return
        while self._spans and self._spans[-1][1] >= began:
            earlier = self._spans.pop()
            self.seconds -= earlier[1] - earlier[0]
            began, ended = min(began, earlier[0]), max(ended, earlier[1])
        self.seconds += ended - began
        self._spans.append((began, ended))


class Deadline:
    """Raises `TimeoutError` inside its `async with` once `left_s` seconds have passed.

    Time inside `waiting` does not count. `left_s` None: no limit, only waits are measured.
    """

    def __init__(self, left_s: float | None) -> None:
        self._timeout: asyncio.Timeout | None = None
        if left_s is not None:
            import asyncio  # imported here, to keep --help fast

            self._timeout = asyncio.timeout(max(left_s, 0.0) + _MARGIN_S)
        self.waited_s = 0.0
        """Seconds spent inside `waiting`."""

    async def __aenter__(self) -> None:
        if self._timeout is not None:
            await self._timeout.__aenter__()

    async def __aexit__(self, *exception: Any) -> None:
        if self._timeout is not None:
            await self._timeout.__aexit__(*exception)

    @property
    def has_passed(self) -> bool:
        """Whether the deadline has cut off the code inside."""
        return self._timeout is not None and self._timeout.expired()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Pause the deadline: the conversation waits for rate limits or for a batch."""
        timeout, began = self._timeout, time.monotonic()
        when = None if timeout is None else timeout.when()
        if timeout is not None and when is not None:
            timeout.reschedule(None)
        try:
            yield
        finally:
            waited_s = time.monotonic() - began
            self.waited_s += waited_s
            if timeout is not None and when is not None:
                timeout.reschedule(when + waited_s)
