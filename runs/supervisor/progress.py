"""The progress of a run, kept by the parent alone: one tqdm line, or plain lines in a log.

All of it comes from sums that exist; nothing is done per model call. Once a second the state is
also put into `progress.json` in the run directory, for whoever looks from another process. It is
derived: the run never reads it, and goes on where it cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from tqdm import tqdm

from runs.process.console import say
from runs.protocol.messages import Counters, no_counters
from runs.store.files import temporary_for

PROGRESS_FILE = "progress.json"

_PLAIN_EVERY_S = 10.0
_DRAW_EVERY_S = 0.25
_WRITE_EVERY_S = 1.0
_RATE_OVER_S = 30.0
_WIDTH = 120
_MESSAGES_KEPT = 8
_EARLIER = "in earlier starts"
"""Stands for the classes of tasks that failed for good before this start."""


class _Work(NamedTuple):
    """What had been done at a moment."""

    at: float
    turns: int
    input_tokens: int
    output_tokens: int


def _size() -> dict[str, Any]:
    """How large to draw; some terminals do not say, and tqdm alone would then draw nothing."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if min(os.get_terminal_size(sys.stderr.fileno())) > 0:
            return {"dynamic_ncols": True}
    return {"ncols": _WIDTH, "nrows": 2}


class Progress:
    """Counts what happens in this start and shows it on standard error."""

    def __init__(
        self,
        *,
        total: int,
        run_dir: Path | None = None,
        tell: Callable[[str], object] | None = None,
    ) -> None:
        """The state goes to a file in `run_dir`.

        With `tell`, which takes the messages for the user, nothing is drawn here: something else
        has the terminal.
        """
        self._total = total
        self._done = 0
        self._failed: Counter[str] = Counter()
        self._checked: Counter[bool | None] = Counter()
        self._ended_now = 0
        self._work = no_counters()
        self._spent_before_usd = 0.0
        self._started_at = self._shown_at = self._written_at = time.monotonic()
        self._past: deque[_Work] = deque([_Work(self._started_at, 0, 0, 0)])
        self._file = None if run_dir is None else run_dir / PROGRESS_FILE
        self._messages: deque[str] = deque(maxlen=_MESSAGES_KEPT)
        self._tell = tell
        self._is_terminal = tell is None and sys.stderr is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=total,
            disable=not self._is_terminal,
            bar_format="{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            **_size(),
            mininterval=_DRAW_EVERY_S,
        )

    def task_ended(self, *, failure: str | None, passed: bool | None = None) -> None:
        """One more task has ended in this start; `failure` is the class of what failed it.

        `passed` is what its check said, None without one.
        """
        self._ended_now += 1
        self._checked[passed] += 1
        if failure is None:
            self._done += 1
        else:
            self._failed[failure] += 1
        self._move(1)

    def found_ended(
        self,
        *,
        done: int,
        failed: int,
        passed: int = 0,
        not_passed: int = 0,
        cost_usd: float = 0.0,
    ) -> None:
        """So many tasks have ended in earlier starts, at that cost; they count for no rate.

        Those of them that were checked `passed` or not.
        """
        self._spent_before_usd += cost_usd
        self._checked[True] += passed
        self._checked[False] += not_passed
        if self._is_terminal:
            self._bar.initial += done + failed
        self._done += done
        if failed:
            self._failed[_EARLIER] += failed
        self._move(done + failed)

    def add(self, counters: Counters) -> None:
        """Count what a worker has done since it last said so."""
        self._work["turns"] += counters["turns"]
        self._work["input_tokens"] += counters["input_tokens"]
        self._work["output_tokens"] += counters["output_tokens"]
        self._work["cost_usd"] += counters["cost_usd"]
        self._work["cost_unknown"] |= counters["cost_unknown"]

    def say(self, message: str) -> None:
        """Show a message above the progress line."""
        self._messages.append(message)
        self._say(message)

    def show(self, running: int, limit: str) -> None:
        """Draw the present state, as often as is of use; `limit` says what holds calls back."""
        now = time.monotonic()
        draws = self._tell is None and now - self._shown_at >= (
            _DRAW_EVERY_S if self._is_terminal else _PLAIN_EVERY_S
        )
        writes = self._file is not None and now - self._written_at >= _WRITE_EVERY_S
        if not draws and not writes:
            return
        state = self._state(running, limit, now)
        if writes:
            self._written_at = now
            self._write(state)
        if draws:
            self._shown_at = now
            if self._is_terminal:
                with contextlib.suppress(OSError):
                    self._bar.set_postfix_str(describe(state))
            else:
                self._say(f"{self._ended}/{self._total} tasks: {describe(state)}")

    @property
    def left(self) -> int:
        """Tasks that have not ended, as far as is known."""
        return self._total - self._ended

    @property
    def ended_share(self) -> float:
        """Which part of the tasks has ended, as far as is known."""
        return 1 - self.left / max(1, self._total)

    def close(self) -> None:
        """Draw the last state and leave it."""
        if self._is_terminal:
            last = describe(self._state(0, "", time.monotonic()))
            self._bar.set_postfix_str(last, refresh=False)
        with contextlib.suppress(OSError):
            self._bar.close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink(missing_ok=True)

    @property
    def _ended(self) -> int:
        return self._done + self._failed.total()

    def _move(self, ended: int) -> None:
        with contextlib.suppress(OSError):
            self._bar.update(ended)

    def _say(self, message: str) -> None:
        if self._tell is not None:
            self._tell(message)
        elif self._is_terminal:
            with contextlib.suppress(OSError):  # whoever watched may be gone
                self._bar.write(message, file=sys.stderr)
        else:
            say(message)

    def _state(self, running: int, limit: str, now: float) -> dict[str, Any]:
        """All that is shown, JSON-ready; see `describe`."""
        work, left = self._work, self.left
        latest = _Work(now, work["turns"], work["input_tokens"], work["output_tokens"])
        self._past.append(latest)
        while now - self._past[0].at > _RATE_OVER_S:
            self._past.popleft()
        past = self._past[0]
        seconds = max(now - past.at, 1e-3)
        # A conversation in flight is taken to be half-way: those that end first are the quick ones.
        worked = self._ended_now + running / 2
        left_s = (now - self._started_at) * (left - running / 2) / worked if worked else 0.0
        return {
            "pid": os.getpid(),
            "at": time.time(),
            "total": self._total,
            "done": self._done,
            "failed": dict(self._failed.most_common()),
            "passed": self._checked[True],
            "checked": self._checked[True] + self._checked[False],
            "running": running,
            "left_s": left_s if self._ended_now and left else None,
            "cost_usd": self._spent_before_usd + work["cost_usd"],
            "cost_unknown": work["cost_unknown"],
            "forecast_usd": self._forecast_usd(worked),
            "limit": limit,
            "turns": work["turns"],
            "turns_per_s": (latest.turns - past.turns) / seconds,
            "input_tokens_per_s": (latest.input_tokens - past.input_tokens) / seconds,
            "output_tokens_per_s": (latest.output_tokens - past.output_tokens) / seconds,
            "messages": list(self._messages),
        }

    def _forecast_usd(self, worked: float) -> float | None:
        """What the whole run will have cost, where this start has done `worked` tasks' work."""
        if not self._ended_now or self._work["cost_unknown"]:
            return None
        return self._spent_before_usd + self._work["cost_usd"] / worked * (
            self._ended_now + self.left
        )

    def _write(self, state: Mapping[str, Any]) -> None:
        # Not synced: after a power loss there is no run that it could tell of.
        assert self._file is not None
        temporary = temporary_for(self._file)
        try:
            temporary.write_bytes(orjson.dumps(state))
            temporary.replace(self._file)
        except OSError:  # a run goes on without it
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def describe(state: Mapping[str, Any]) -> str:
    """The state of a run as in the progress line, that of `progress.json` too."""
    parts = []
    if state["left_s"] is not None:
        parts.append(f"left {tqdm.format_interval(state['left_s'])}")
    failed = state["failed"]
    classes = ", ".join(f"{name} {number}" for name, number in failed.items())
    parts += [
        f"done {state['done']}",
        f"failed {sum(failed.values())}" + (f" ({classes})" if classes else ""),
        f"running {state['running']}",
    ]
    if checked := state.get("checked"):  # an older program says nothing of it
        parts.insert(-2, f"passed {state['passed']} of {checked} checked")
    if state["cost_usd"] or state["cost_unknown"]:
        parts.append(_cost(state))
    if state["limit"]:
        parts.append(state["limit"])
    if state["running"] and not state["turns"]:
        return ", ".join([*parts, "no reply yet"])
    parts += [
        f"{state['turns_per_s']:.1f} turns/s",
        f"tokens/s {_short(state['input_tokens_per_s'])} in "
        f"{_short(state['output_tokens_per_s'])} out",
    ]
    return ", ".join(parts)


def _cost(state: Mapping[str, Any]) -> str:
    words = f"${state['cost_usd']:.2f}"
    if state["cost_unknown"]:
        return f"{words} + unknown" if state["cost_usd"] else "cost unknown"
    return words if state["forecast_usd"] is None else f"{words} of ~${state['forecast_usd']:.2f}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 1000 else f"{number / 1000:.1f}k"
