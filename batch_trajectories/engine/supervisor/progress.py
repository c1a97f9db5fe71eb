"""The progress of a run: a tqdm line, or plain lines in a log.

It uses existing sums and does nothing per model call. Once a second it also writes its state to
`progress.json` in the run directory, for other processes. The run never reads that file, and
continues if it cannot be written.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from batch_trajectories.basics.console import (
    PLAIN_EVERY_S,
    bar_class,
    is_interactive,
    is_notebook,
    say,
    terminal_size,
)
from batch_trajectories.basics.text import single_line
from batch_trajectories.records.failures import Failure
from batch_trajectories.records.files import read_json, temporary_path
from batch_trajectories.records.names import FAILURES_FILE

if TYPE_CHECKING:
    from batch_trajectories.engine.messages import Counters

PROGRESS_FILE = "progress.json"

_DRAW_EVERY_S = 0.25
_WRITE_EVERY_S = 1.0
_RATE_OVER_S = 30.0
_MAX_MESSAGES = 8
_EARLIER = "in earlier starts"
"""Counted as a class: tasks that failed in earlier starts and are not retried."""
_MAX_SHOWN_FAILURES = 20


class _Work(NamedTuple):
    """The work done up to a moment."""

    at: float
    turns: int
    input_tokens: int
    output_tokens: int


class Progress:
    """Counts the tasks and calls of this start and shows them on standard error."""

    def __init__(
        self,
        *,
        total: int,
        run_dir: Path | None = None,
        tell: Callable[[str], object] | None = None,
        tasks: str = "tasks",
        turns: str | None = "turns",
    ) -> None:
        """`run_dir` is for progress.json. With `tell`, a function that takes messages for the user,
        nothing is drawn: the terminal belongs to the caller. `tasks` and `turns` are the nouns for
        what is counted; None: no model is called."""
        # Not above: `status` reads what this writes, and needs neither.
        from tqdm import tqdm

        from batch_trajectories.engine.messages import no_counters

        self._total = total
        self._tasks, self._turns = tasks, turns
        self._done = 0
        self._failed: Counter[str] = Counter()
        self._checked: Counter[bool | None] = Counter()
        self._ended_now = 0
        self._work = no_counters()
        self._spent_before_usd = 0.0
        self._started_at = self._shown_at = self._written_at = time.monotonic()
        self._past: deque[_Work] = deque([_Work(self._started_at, 0, 0, 0)])
        self._file = None if run_dir is None else run_dir / PROGRESS_FILE
        self._messages: deque[str] = deque(maxlen=_MAX_MESSAGES)
        self._failures_told = 0
        self._tell = tell
        self.steered: dict[str, Any] | None = None
        """Requests of people who steer the run: `is_paused`, and `answers` by the size of
        control.jsonl after the question; None before the first."""
        self._is_terminal = tell is None and is_interactive()
        tqdm.monitor_interval = 0  # a thread that could be refused, for lines drawn often enough
        self._bar = (bar_class() if self._is_terminal else tqdm)(
            total=total,
            disable=not self._is_terminal,
            bar_format="{percentage:3.0f}%|"
            + ("{bar}" if is_notebook() else "{bar:10}")
            + "| {n_fmt}/{total_fmt} [{elapsed}{postfix}]",
            **terminal_size(),
            mininterval=_DRAW_EVERY_S,
        )

    def count_ended_task(
        self, *, failure: str | None, passed: bool | None = None, opened: int = 0
    ) -> None:
        """A task has ended in this start; `failure` is its failure class, if it failed.

        `passed` is None if it was neither checked nor scored. `opened` more tasks are needed now.
        """
        if opened:
            self.add_tasks(opened)
        self._ended_now += 1
        self._checked[passed] += 1
        if failure is None:
            self._done += 1
        else:
            self._failed[failure] += 1
        self._move(1)

    def count_earlier_tasks(
        self,
        *,
        done: int,
        failed: int,
        passed: int = 0,
        not_passed: int = 0,
        cost_usd: float = 0.0,
    ) -> None:
        """Add the tasks that ended in earlier starts, their checks and cost; rates ignore them."""
        self._spent_before_usd += cost_usd
        self._checked[True] += passed
        self._checked[False] += not_passed
        if self._is_terminal:
            self._bar.initial += done + failed
        self._done += done
        if failed:
            self._failed[_EARLIER] += failed
        self._move(done + failed)

    def count_retried_task(self, failure: str) -> None:
        """A task that failed in this start, with this failure class, is queued again."""
        self._ended_now -= 1
        self._checked[None] -= 1
        self._failed[failure] -= 1
        self._failed += Counter()  # without classes of which none is left
        self._move(-1)

    def add_tasks(self, count: int) -> None:
        """Add `count` tasks to the total."""
        self._total += count
        self._bar.total = self._total

    def add(self, counters: Counters) -> None:
        """Add what a worker has done since its last heartbeat."""
        self._work["turns"] += counters["turns"]
        self._work["input_tokens"] += counters["input_tokens"]
        self._work["output_tokens"] += counters["output_tokens"]
        self._work["cost_usd"] += counters["cost_usd"]
        self._work["cost_unknown"] |= counters["cost_unknown"]

    def say(self, message: str, *, keep: bool = True) -> None:
        """Show a message above the progress line; with `keep`, `status` shows it as well."""
        if keep:
            self._messages.append(message)
        self._say(message)

    def show_failure(self, failure: Failure) -> None:
        """Show only the first failures: a run may have thousands, and failures.jsonl has all."""
        self._failures_told += 1
        if self._failures_told <= _MAX_SHOWN_FAILURES:
            self.say(
                f"{failure.id}: attempt {failure.attempt} failed ({failure.error_class}): "
                f"{single_line(failure.message)}"
            )
        if self._failures_told == _MAX_SHOWN_FAILURES and self._file is not None:
            self.say(f"further failures: {self._file.with_name(FAILURES_FILE)}")

    def show(self, running: int, limit: str, *, pause_s: float = 0.0) -> None:
        """Draw the current state from time to time.

        `limit` describes what limits calls; for `pause_s` seconds more none can be sent.
        """
        now = time.monotonic()
        draws = self._tell is None and now - self._shown_at >= (
            _DRAW_EVERY_S if self._is_terminal else PLAIN_EVERY_S
        )
        writes = self._file is not None and now - self._written_at >= _WRITE_EVERY_S
        if not draws and not writes:
            return
        state = self._state(running, limit, now, pause_s)
        if writes:
            self._written_at = now
            self._write(state)
        if draws:
            self._shown_at = now
            if self._is_terminal:
                with contextlib.suppress(OSError):
                    self._bar.set_postfix_str(describe(state, self._turns))
            else:
                line = describe(state, self._turns)
                self._say(f"{self._ended}/{self._total} {self._tasks}: {line}")

    def set_steering(self, steering: dict[str, Any]) -> None:
        """Write what people have asked of the run with the next state, at once."""
        self.steered = steering
        self._written_at = float("-inf")

    @property
    def left(self) -> int:
        """Number of tasks that have not ended."""
        return self._total - self._ended

    @property
    def ended_share(self) -> float:
        """The share of tasks that have ended."""
        return 1 - self.left / max(1, self._total)

    def close(self) -> None:
        """Draw the last state. Whoever steered the run may still have to read the answer."""
        if self._is_terminal:
            last = describe(self._state(0, "", time.monotonic(), 0.0), self._turns)
            self._bar.set_postfix_str(last, refresh=False)
        with contextlib.suppress(OSError):
            self._bar.close()
        if self._file is not None and self.steered is None:
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
            with contextlib.suppress(OSError):  # the terminal may be gone
                self._bar.write(message, file=sys.stderr)
        else:
            say(message)

    def _state(self, running: int, limit: str, now: float, pause_s: float) -> dict[str, Any]:
        """The state to show, JSON-ready; see `describe`."""
        work, left = self._work, self.left
        latest = _Work(now, work["turns"], work["input_tokens"], work["output_tokens"])
        self._past.append(latest)
        while now - self._past[0].at > _RATE_OVER_S:
            self._past.popleft()
        past = self._past[0]
        seconds = max(now - past.at, 1e-3)
        # Count conversations in flight as half done: the quick ones end first.
        worked = self._ended_now + running / 2
        left_s = (now - self._started_at) * (left - running / 2) / worked if worked else 0.0
        left_s = max(left_s, pause_s)
        # Nobody knows when a pause ends.
        is_paused = bool(self.steered and self.steered["is_paused"])
        return {
            "pid": os.getpid(),
            "at": time.time(),
            "total": self._total,
            "done": self._done,
            "failed": dict(self._failed.most_common()),
            "passed": self._checked[True],
            "checked": self._checked[True] + self._checked[False],
            "running": running,
            "left_s": left_s if self._ended_now and left and not is_paused else None,
            "cost_usd": self._spent_before_usd + work["cost_usd"],
            "cost_unknown": work["cost_unknown"],
            "forecast_usd": None if is_paused else self._forecast_usd(worked),
            "limit": limit,
            "turns": None if self._turns is None else work["turns"],
            "tasks_per_min": self._ended_now / max(now - self._started_at, 1e-3) * 60,
            "turns_per_s": (latest.turns - past.turns) / seconds,
            "input_tokens_per_s": (latest.input_tokens - past.input_tokens) / seconds,
            "output_tokens_per_s": (latest.output_tokens - past.output_tokens) / seconds,
            "messages": list(self._messages),
            **({} if self.steered is None else {"steered": self.steered}),
        }

    def _forecast_usd(self, worked: float) -> float | None:
        """The cost of the whole run, if this start has done the work of `worked` tasks."""
        if not self._ended_now or self._work["cost_unknown"]:
            return None
        return self._spent_before_usd + self._work["cost_usd"] / worked * (
            self._ended_now + self.left
        )

    def _write(self, state: Mapping[str, Any]) -> None:
        # Not synced: after a power loss the run it describes is over.
        assert self._file is not None
        temporary = temporary_path(self._file)
        try:
            temporary.write_bytes(orjson.dumps(state))
            temporary.replace(self._file)
        except OSError:  # the run continues without it
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def read_state(run_dir: Path, holder: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last state that the process `holder` wrote; None if it wrote none yet.

    An earlier start that was killed or steered may have left the file.
    """
    state = read_json(run_dir / PROGRESS_FILE)
    return state if state is not None and state.get("pid") == holder.get("pid") else None


def describe(state: Mapping[str, Any], turns: str | None = "turns") -> str:
    """The state, also from `progress.json`, as text for the progress line."""
    calls_models = state["turns"] is not None
    parts = []
    if state["left_s"] is not None:
        from tqdm import tqdm

        parts.append(f"left {tqdm.format_interval(state['left_s'])}")
    failed = state["failed"]
    classes = ", ".join(f"{name} {number}" for name, number in failed.items())
    parts += [
        f"done {state['done']}",
        f"failed {sum(failed.values())}" + (f" ({classes})" if classes else ""),
        f"running {state['running']}",
    ]
    if not calls_models:
        return ", ".join([*parts, f"{state['tasks_per_min']:.0f} per minute"])
    if checked := state.get("checked"):  # older versions do not write it
        parts.insert(-2, f"passed {state['passed']} of {checked}")
    if state["cost_usd"] or state["cost_unknown"]:
        parts.append(_cost(state))
    if state["limit"]:
        parts.append(state["limit"])
    if state["running"] and not state["turns"]:
        return ", ".join([*parts, "no reply yet"])
    parts += [
        f"{state['turns_per_s']:.1f} {turns}/s",
        f"tokens/s {_short(state['input_tokens_per_s'])} in "
        f"{_short(state['output_tokens_per_s'])} out",
    ]
    return ", ".join(parts)


def _cost(state: Mapping[str, Any]) -> str:
    amount = f"${state['cost_usd']:.2f}"
    if state["cost_unknown"]:
        return f"{amount} + unknown" if state["cost_usd"] else "cost unknown"
    return amount if state["forecast_usd"] is None else f"{amount} of ~${state['forecast_usd']:.2f}"


def _short(number: float) -> str:
    return f"{number:.0f}" if number < 1000 else f"{number / 1000:.1f}k"
