"""Where a worker's model calls wait for their turn.

The parent says how many of the run's calls this worker may have in flight; each attempt of a call
passes here. What the endpoint does is told back: refusals at once, the rest in sums.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from agent.models.errors import ModelError


@dataclass(slots=True)
class Load:
    """What a gate has seen since it was asked last, and what goes on now."""

    in_flight: int = 0
    waiting: int = 0
    replies: int = 0
    failures: int = 0


class Stopped(Exception):
    """The run is being stopped: the conversation rests where its journal ends."""


class CallGate:
    """Lets `permits` attempts through at a time."""

    def __init__(self, *, permits: int, on_refusal: Callable[[float | None, float], None]) -> None:
        """`on_refusal` is told of each refusal (429) at once: what the endpoint asked for, and when
        the call was sent."""
        self._permits = permits
        self._on_refusal = on_refusal
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._in_flight = 0
        self._not_before = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._replies = 0
        self._failures = 0
        self._is_stopping = False

    async def enter(self) -> None:
        """Wait for a permit; raises `Stopped` where no new call is to be made."""
        if self._is_stopping:
            raise Stopped
        if self._waiting or not self._may_go():
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._in_flight -= 1
                    self._let_in()
                raise
            return
        self._in_flight += 1

    def leave(self, error: ModelError | None, sent_at: float) -> None:
        """Give the permit back; `error` is why the attempt failed, None for a reply."""
        self._in_flight -= 1
        if error is None:
            self._replies += 1
        elif error.kind == "rate_limited":
            self._on_refusal(error.retry_after_s, sent_at)
        elif error.action == "retry":
            self._failures += 1
        self._let_in()

    def abandon(self) -> None:
        """Give the permit back of an attempt that came to nothing (it was cancelled)."""
        self._in_flight -= 1
        self._let_in()

    def allow(self, permits: int, *, cool_down_s: float) -> None:
        """Take a new share of the run's limit; nothing is sent for `cool_down_s`."""
        self._permits = permits
        self._not_before = time.monotonic() + cool_down_s
        self._let_in()

    def stop(self) -> None:
        """Turn all away that wait and come."""
        self._is_stopping = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(Stopped())

    def take_load(self) -> Load:
        """What has happened since this was asked last."""
        waiting = sum(not turn.done() for turn in self._waiting)
        load = Load(self._in_flight, waiting, self._replies, self._failures)
        self._replies = self._failures = 0
        return load

    def _may_go(self) -> bool:
        return self._in_flight < self._permits and time.monotonic() >= self._not_before

    def _let_in(self) -> None:
        while self._waiting and self._may_go():
            turn = self._waiting.popleft()
            if not turn.done():
                self._in_flight += 1
                turn.set_result(None)
        pause_s = self._not_before - time.monotonic()
        if self._waiting and pause_s > 0 and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._let_in()
