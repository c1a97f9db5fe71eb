"""Keeps a limited number of calls in flight, passes on their results, and shows progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

from agent.models.client.retrying import Retry
from agent.models.errors import ENDPOINT_FAILURES, ModelError
from batch_trajectories.basics.console import say
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.engine.supervisor.progress import Progress

_SHOW_EVERY_S = 0.25

T = TypeVar("T")
R = TypeVar("R")


async def ask_all(
    items: Iterable[T],
    ask: Callable[[T], Coroutine[Any, Any, R]],
    *,
    max_in_flight: int,
    keep: Callable[[list[R]], None],
    show: Callable[[int], object] = int,
) -> None:
    """Call `ask` for each item, and `keep` with the results of calls that have ended.

    `show` is called with the number of calls in flight a few times a second. If `ask` or `keep`
    raises, the results of other calls that have ended are kept, the remaining calls are cancelled,
    and the error is raised.
    """
    in_flight: set[asyncio.Task[R]] = set()
    try:
        for item in items:
            in_flight.add(asyncio.create_task(ask(item)))
            while len(in_flight) >= max_in_flight:
                await _store_results(in_flight, keep)
                show(len(in_flight))
        while in_flight:
            await _store_results(in_flight, keep)
            show(len(in_flight))
    finally:
        for task in in_flight:
            task.cancel()
        ended = await asyncio.gather(*in_flight, return_exceptions=True)
        if late := [result for result in ended if not isinstance(result, BaseException)]:
            keep(late)  # these came before they could be cancelled, and may be paid for


async def _store_results(in_flight: set[asyncio.Task[R]], keep: Callable[[list[R]], None]) -> None:
    done, _ = await asyncio.wait(
        in_flight, timeout=_SHOW_EVERY_S, return_when=asyncio.FIRST_COMPLETED
    )
    in_flight -= done
    failed = [task for task in done if task.exception() is not None]
    if results := [task.result() for task in done if task not in failed]:
        keep(results)
    for task in failed:
        task.result()


def stop_if_useless(failures: Iterable[ModelError], *, has_answered: bool) -> None:
    """Raise `EnvironmentStop` if a failed call of a judge is a reason to make no more calls.

    `has_answered`: the endpoint has answered before, so it is known to work.
    """
    for failure in failures:
        is_silent = not has_answered and failure.kind in ENDPOINT_FAILURES
        if failure.action == "stop_run" or is_silent:
            raise EnvironmentStop(
                f"--judge: {failure.kind}: {failure}. Finished scores are saved; fix the problem "
                "and run the same command again to continue."
            )


class JudgeCalls:
    """Counts the calls of a judge in one command, and shows the progress line of runs."""

    def __init__(self, judge: str, *, total: int) -> None:
        """`total` is the number of questions."""
        self._judge = judge
        self.total = total
        self._progress = Progress(total=total, tasks="questions", turns="calls")
        self.say = self._progress.say
        self.asked = self.failed = 0
        self.cost_usd = 0.0

    def count_reply(self, reply: Mapping[str, Any]) -> None:
        """Count a reply by its `usage` and `cost_usd`."""
        usage, cost_usd = reply["usage"] or {}, reply["cost_usd"]
        self.cost_usd += cost_usd or 0.0
        self._progress.add(
            {
                "turns": 1,
                "input_tokens": usage.get("input_tokens") or 0,
                "output_tokens": usage.get("output_tokens") or 0,
                "cost_usd": cost_usd or 0.0,
                "cost_unknown": cost_usd is None,
            }
        )

    def count_question(self, *, failure: str | None) -> None:
        """Count a question that has ended; `failure` is the kind of its failure, None without."""
        self.asked += 1
        self.failed += failure is not None
        self._progress.count_ended_task(failure=failure)

    def show(self, in_flight: int) -> None:
        """Draw the progress line from time to time."""
        self._progress.show(in_flight, "")

    def close(self) -> None:
        """End the progress line with the sums."""
        self._progress.close()
        cost = f", ${self.cost_usd:.4f}" if self.cost_usd else ""
        say(f"judge {self._judge}: {self.asked:,} asked, {self.failed:,} failed{cost}")


class RetryMessages:
    """Prints failures of calls that are retried: one message for all calls that wait."""

    def __init__(
        self, base_url: str | None, say: Callable[[str], object], option: str = "--judge"
    ) -> None:
        self._beginning = f"{option} at {base_url}" if base_url else option
        self._say = say
        self._silent_until = 0.0

    def __call__(self, retry: Retry) -> None:
        """Print `retry`, unless the pause of an earlier printed one has not ended."""
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + retry.wait_s
            self._say(f"{self._beginning}: {retry}")
