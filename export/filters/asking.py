"""Keeps a limited number of calls in flight, passes on what they return, and reports retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from agent.models.client.retrying import Retry
from agent.models.errors import SAYS_MORE_OF_THE_ENDPOINT, ModelError
from runs.errors import EnvironmentStop
from runs.process.console import say

T = TypeVar("T")
R = TypeVar("R")


async def ask_all(
    items: Iterable[T],
    ask: Callable[[T], Coroutine[Any, Any, R]],
    *,
    max_in_flight: int,
    keep: Callable[[list[R]], None],
) -> None:
    """Call `ask` for each item; `keep` gets the results of calls that have ended together.

    If either raises, the results of other calls that have ended are kept, the rest is cancelled,
    and the error is raised.
    """
    in_flight: set[asyncio.Task[R]] = set()
    try:
        for item in items:
            in_flight.add(asyncio.create_task(ask(item)))
            if len(in_flight) >= max_in_flight:
                await _keep_ended(in_flight, keep)
        while in_flight:
            await _keep_ended(in_flight, keep)
    finally:
        for task in in_flight:
            task.cancel()
        ended = await asyncio.gather(*in_flight, return_exceptions=True)
        if late := [result for result in ended if not isinstance(result, BaseException)]:
            keep(late)  # these came before they could be cancelled, and may be paid for


async def _keep_ended(in_flight: set[asyncio.Task[R]], keep: Callable[[list[R]], None]) -> None:
    done, _ = await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
    in_flight -= done
    failed = [task for task in done if task.exception() is not None]
    if results := [task.result() for task in done if task not in failed]:
        keep(results)
    for task in failed:
        task.result()


def stop_where_useless(
    failures: Iterable[ModelError], *, has_answered: bool, asked_by: str, advice: str
) -> None:
    """Raise `EnvironmentStop` if a failed call is a reason to make no more calls.

    Before its first answer an endpoint is not known to work at all. The message begins with what
    asked and ends with what to do.
    """
    for failure in failures:
        is_silent = not has_answered and failure.kind in SAYS_MORE_OF_THE_ENDPOINT
        if failure.action == "stop_run" or is_silent:
            raise EnvironmentStop(f"{asked_by}: {failure.kind}: {failure}. {advice}")


class RetryMessages:
    """Prints failures that are waited out: one for all calls that wait at the same time."""

    def __init__(self, asked_by: str, base_url: str | None) -> None:
        self._beginning = f"{asked_by} at {base_url}" if base_url else asked_by
        self._quiet_until = 0.0

    def __call__(self, retry: Retry) -> None:
        """Print `retry`, unless the pause of one that was printed has not ended."""
        now = time.monotonic()
        if now >= self._quiet_until:
            self._quiet_until = now + retry.wait_s
            say(f"{self._beginning}: {retry}")
