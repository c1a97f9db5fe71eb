"""The replicas of one endpoint: their limits and their health checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from agent.models.client.replicas import LOST_S, Replicas, is_replica_failure
from agent.models.client.transport import Transport
from agent.models.connection import NO_HEALTH_PATH, Replication, Share
from agent.models.errors import ModelError
from agent.models.model import Request
from batch_trajectories.basics.errors import HostError

log = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 5.0
"""Maximum seconds of a health check."""

_FIRST_CHECK_TIMEOUT_S = 2.0
"""Maximum seconds of the health checks before the first call."""


class Fleet:
    """The replicas of one endpoint, for all of its models in the running event loop."""

    def __init__(
        self, replication: Replication, transports: Sequence[Transport], share: Share
    ) -> None:
        """Check no replica yet; `transports`, one per replica, are used for the health checks."""
        urls, in_flight = replication.urls, replication.max_in_flight
        self._urls = urls
        self._health_path = replication.health_path
        self._transports = transports
        self._replicas = Replicas(urls, share=share)
        # Each process keeps to its share of the limits, so the processes need not talk.
        slots = None if in_flight is None else max(1, in_flight // share.processes)
        self._slots = [None if slots is None else asyncio.Semaphore(slots) for _ in urls]
        rpm = replication.rpm
        self._paces = [_Pace(rpm and rpm / share.processes) for _ in urls]
        self._in_flight: list[set[asyncio.Timeout]] = [set() for _ in urls]
        self._checks: set[asyncio.Task[None]] = set()
        self._checking: set[int] = set()
        self._wakes = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._is_known = asyncio.Event()

    @contextlib.asynccontextmanager
    async def choose_replica(self, request: Request, avoid: set[int]) -> AsyncIterator[int]:
        """Choose the replica for a request, and wait for a slot there; yields its number.

        A replica that cannot be reached is added to `avoid`. The message of an error that the
        replica caused names it.
        """
        await self._wait_for_first_checks()
        number = self._replicas.choose(request.conversation, avoid)
        error: ModelError | None = None
        is_answered = False
        try:
            async with self._slot(request, number), self._abort_if_lost(number):
                yield number
            is_answered = True
        except ModelError as failure:
            error = failure
            if is_replica_failure(error):
                error.args = (f"{error} (replica {self._urls[number]})",)
            if error.kind == "connection" and error.is_by_load:
                avoid.add(number)
            raise
        finally:
            before = self._replicas.state(number)
            conversation = request.conversation
            if self._replicas.leave(number, conversation, error, is_answered=is_answered):
                self._wakes.set()
            self._log_change(number, before, error)

    @property
    def size(self) -> int:
        """The number of replicas."""
        return len(self._urls)

    async def close(self) -> None:
        """End the health checks."""
        tasks = [*self._checks, *([self._watcher] if self._watcher is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @contextlib.asynccontextmanager
    async def _slot(self, request: Request, number: int) -> AsyncIterator[None]:
        """Wait for a slot among the calls of a replica, and hold it; the wait does not count."""
        slots, pace = self._slots[number], self._paces[number]
        if slots is None and not pace.wait_s():
            pace.reserve()
            yield
            return
        waiting = request.deadline.waiting() if request.deadline else contextlib.nullcontext()
        with contextlib.ExitStack() as stack:
            with waiting:
                if slots is not None:
                    await slots.acquire()
                    stack.callback(slots.release)
                wait_s = pace.reserve()
                if wait_s:
                    await asyncio.sleep(wait_s)
            yield

    @contextlib.asynccontextmanager
    async def _abort_if_lost(self, number: int) -> AsyncIterator[None]:
        """Abort a call whose replica is lost. Raises `ModelError("timeout")`."""
        scope = asyncio.timeout(None)
        scopes = self._in_flight[number]
        try:
            async with scope:
                scopes.add(scope)
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise ModelError(
                "timeout", f"the replica has answered nothing for {LOST_S:g} s"
            ) from error
        finally:
            scopes.discard(scope)

    async def _wait_for_first_checks(self) -> None:
        """Wait, before the first call, until it is known which replicas are up."""
        if self._is_known.is_set():
            return
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._watch())
        await self._is_known.wait()

    async def _watch(self) -> None:
        first = [
            self._start_check(self._check(n, _FIRST_CHECK_TIMEOUT_S)) for n in self._replicas.due()
        ]
        if first:
            await asyncio.wait(first)
        self._is_known.set()
        while True:
            self._wakes.clear()
            for number in self._replicas.due():
                if number not in self._checking:
                    self._start_check(self._check(number, _CHECK_TIMEOUT_S))
            # A replica that is being checked stays due until its answer, which wakes this loop.
            wait_s = max(self._replicas.next_check_s(), 0.05 if self._checking else 0.0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._wakes.wait()

    def _start_check(self, check: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(check)
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)
        return task

    async def _check(self, number: int, timeout_s: float) -> None:
        """Check the health of a replica."""
        self._checking.add(number)
        before = self._replicas.state(number)
        status: int | None = None
        try:
            if self._health_path == NO_HEALTH_PATH:
                status = 200  # only calls can show more
            else:
                url = self._urls[number].removesuffix("/v1") + self._health_path
                status = await self._transports[number].fetch_status(url, timeout_s)
        except HostError as error:
            log.warning(
                "The health of %s was not checked, because this machine failed: %s",
                self._urls[number],
                error,
            )
            status = 200  # this machine failed, not the replica
        finally:
            self._checking.discard(number)
            self._replicas.record_check(number, status)
            self._wakes.set()
            if self._replicas.is_lost(number):
                for scope in self._in_flight[number]:
                    scope.reschedule(asyncio.get_running_loop().time())
        self._log_change(number, before, None)

    def _log_change(self, number: int, before: str, error: ModelError | None) -> None:
        """Log a change of a replica's state."""
        if (now := self._replicas.state(number)) != before:
            why = f": {error}" if error is not None else ""
            log.info("The server %s is now %s%s", self._urls[number], now, why)


class _Pace:
    """Spreads the calls of a replica evenly over a minute."""

    def __init__(self, rpm: float | None, now: Callable[[], float] = time.monotonic) -> None:
        self._interval_s = 60.0 / rpm if rpm else 0.0
        self._now = now
        self._next_at = now()

    def wait_s(self) -> float:
        """Seconds until the next call may be sent."""
        return max(0.0, self._next_at - self._now()) if self._interval_s else 0.0

    def reserve(self) -> float:
        """Reserve the next time for a call; returns the seconds until then."""
        wait_s = self.wait_s()
        self._next_at = self._now() + wait_s + self._interval_s
        return wait_s
