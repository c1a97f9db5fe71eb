"""The progress of a run, drawn by the parent alone: one tqdm line, or plain lines in a log."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from typing import Any

from tqdm import tqdm

from batch.console import say
from batch.wire import Counters, no_counters

_PLAIN_EVERY_S = 10.0
_DRAW_EVERY_S = 0.25
_RATE_OVER_S = 30.0
_WIDTH = 120


def _size() -> dict[str, Any]:
    """How large to draw; some terminals do not say, and tqdm alone would then draw nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if min(os.get_terminal_size(sys.stderr.fileno())) > 0:
            return {"dynamic_ncols": True}
    return {"ncols": _WIDTH, "nrows": 2}


class Progress:
    """Counts what happens in this start and shows it on standard error."""

    def __init__(self, *, total: int) -> None:
        self._total = total
        self._done = self._failed = 0
        self._ended_now = 0
        self._work = no_counters()
        self._limit = ""
        self._started_at = self._shown_at = time.monotonic()
        self._turns_at: deque[tuple[float, int]] = deque()
        self._is_terminal = sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            unit="task",
            disable=not self._is_terminal,
            **_size(),
            mininterval=_DRAW_EVERY_S,
        )

    def task_ended(self, *, failed: bool) -> None:
        """One more task has ended in this start."""
        self._count(failed=failed)
        self._ended_now += 1

    def found_ended(self, *, failed: bool) -> None:
        """One more task turned out to have ended in an earlier start; it counts for no rate."""
        if self._is_terminal:
            self._bar.initial += 1
        self._count(failed=failed)

    def add(self, counters: Counters) -> None:
        """Count what a worker has done since it last said so."""
        self._work["turns"] += counters["turns"]
        self._work["input_tokens"] += counters["input_tokens"]
        self._work["output_tokens"] += counters["output_tokens"]
        self._work["cost_usd"] += counters["cost_usd"]
        self._work["cost_unknown"] |= counters["cost_unknown"]

    def say(self, message: str) -> None:
        """Show a message above the progress line."""
        if not self._is_terminal:
            say(message)
            return
        with contextlib.suppress(OSError):  # whoever watched may be gone
            self._bar.write(message, file=sys.stderr)

    def show(self, running: int, limit: str) -> None:
        """Draw the present state, as often as is of use; `limit` says what holds calls back."""
        self._limit = limit
        now = time.monotonic()
        if now - self._shown_at < (_DRAW_EVERY_S if self._is_terminal else _PLAIN_EVERY_S):
            return
        self._shown_at = now
        if self._is_terminal:
            with contextlib.suppress(OSError):
                self._bar.set_postfix_str(self._details(running, now))
        else:
            ended = self._done + self._failed
            self.say(
                f"{ended}/{self._total} tasks: {self._details(running, now)}{self._time_left(now)}"
            )

    @property
    def left(self) -> int:
        """Tasks that have not ended, as far as is known."""
        return self._total - self._done - self._failed

    @property
    def ended_share(self) -> float:
        """Which part of the tasks has ended, as far as is known."""
        return 1 - self.left / max(1, self._total)

    def close(self) -> None:
        """Draw the last state and leave it."""
        if self._is_terminal:
            self._bar.set_postfix_str(self._details(0, time.monotonic()), refresh=False)
        with contextlib.suppress(OSError):
            self._bar.close()

    def _count(self, *, failed: bool) -> None:
        self._done += not failed
        self._failed += failed
        with contextlib.suppress(OSError):
            self._bar.update(1)

    def _details(self, running: int, now: float) -> str:
        work = self._work
        parts = [
            f"done {self._done}",
            f"failed {self._failed}",
            f"running {running}",
            f"{self._turns_per_second(now):.1f} turns/s",
            f"{tqdm.format_sizeof(work['input_tokens'])} tokens in "
            f"{tqdm.format_sizeof(work['output_tokens'])} out",
        ]
        if work["cost_usd"]:
            more = " and unknown" if work["cost_unknown"] else ""
            parts.append(f"${work['cost_usd']:.2f}{more}")
        if self._limit:
            parts.append(self._limit)
        return ", ".join(parts)

    def _turns_per_second(self, now: float) -> float:
        self._turns_at.append((now, self._work["turns"]))
        while now - self._turns_at[0][0] > _RATE_OVER_S:
            self._turns_at.popleft()
        then, before = self._turns_at[0]
        return (self._work["turns"] - before) / (now - then) if now > then else 0.0

    def _time_left(self, now: float) -> str:
        if not self._ended_now:
            return ""
        seconds = self.left * (now - self._started_at) / self._ended_now
        return f", time left {tqdm.format_interval(seconds)}"
