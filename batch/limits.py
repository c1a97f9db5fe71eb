"""The run's limit on model calls, dealt out to its workers as shares that never sum to more."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from batch.limiter import Limiter, share_out
from batch.wire import pack
from batch.worker_process import WorkerProcess


class RunLimits:
    """Hears what the workers' calls meet, and tells each how many it may have in flight."""

    def __init__(self, *, start: int, ceiling: int) -> None:
        """See `Limiter`."""
        self._limiter = Limiter(start=start, ceiling=ceiling)
        self._ceiling = ceiling
        self._loads: dict[WorkerProcess, tuple[int, int]] = {}
        self._told: dict[WorkerProcess, tuple[int, float]] = {}
        self._in_flight_max = 0

    def on_load(self, worker: WorkerProcess, load: dict[str, int]) -> None:
        """A worker says what its calls did since it said so last, and how many wait."""
        now = time.monotonic()
        self._loads[worker] = (load["in_flight"], load["waiting"])
        self._in_flight_max = max(self._in_flight_max, sum(n for n, _ in self._loads.values()))
        if load["failures"]:
            self._limiter.on_failure(now=now)
        if load["replies"]:
            is_needed = any(waiting for _, waiting in self._loads.values())
            self._limiter.on_replies(load["replies"], is_needed=is_needed, now=now)

    def on_refusal(self, retry_after_s: float | None, sent_at: float) -> None:
        """The endpoint refused a call (429) that was sent at `sent_at`, by the machine's clock."""
        self._limiter.on_refusal(retry_after_s, sent_at=sent_at, now=time.monotonic())

    def share(self, workers: Sequence[WorkerProcess]) -> None:
        """Tell the workers their shares, where these have changed."""
        ready = [worker for worker in workers if worker.ready]
        for gone in self._loads.keys() - set(ready):
            del self._loads[gone]
        demands = [sum(self._loads.get(worker, (0, 0))) for worker in ready]
        shares = share_out(self._limiter.limit, demands)
        cool_down_until = self._limiter.cool_down_until
        for worker, permits in zip(ready, shares, strict=True):
            if self._told.get(worker) != (permits, cool_down_until):
                self._told[worker] = (permits, cool_down_until)
                cool_down_s = max(0.0, cool_down_until - time.monotonic())
                worker.send(pack("limits", permits=permits, cool_down_s=cool_down_s))

    def in_words(self) -> str:
        """For the progress line; "" while nothing but the user's own bounds limits the calls."""
        return f"limit {self._limiter.limit} (endpoint)" if self._limiter.is_probed else ""

    def report(self) -> dict[str, Any]:
        """What limited the calls of this start, for the summary.

        Keys: `limit` and `ceiling` (calls in flight), `in_flight_max`, `refused` (429s) and
        `limited_by`: "endpoint", "concurrency" (the user's bounds), or "tools" where calls never
        came near either.
        """
        near = self._in_flight_max >= 0.9 * self._ceiling
        by = "endpoint" if self._limiter.is_probed else "concurrency" if near else "tools"
        return {
            "limit": self._limiter.limit,
            "ceiling": self._ceiling,
            "in_flight_max": self._in_flight_max,
            "refused": self._limiter.refused,
            "limited_by": by,
        }
