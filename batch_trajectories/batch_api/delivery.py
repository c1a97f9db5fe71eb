"""Processes a batch job: creates the batch, waits for it, and fetches its results.

A creation that a crash or the network interrupted may have succeeded. So the job first searches the
provider's batches for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from agent.models.batches.base import Batches, LostBatch, Undecided
from agent.models.batches.calls import read_reply
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.prices import add_cost, price
from batch_trajectories.batch_api.batch_log import BatchJob, BatchLog

log = logging.getLogger(__name__)

_POLL_S = (0.2, 60.0)
_POLL_SHARE = 0.1
"""Time between polls as a share of the batch's age, within `_POLL_S`."""

_SETTLE_S = 5.0
_SETTLE_BYTES_PER_S = 10**6
"""An interrupted creation appears within `_SETTLE_S`, and a second more per so many bytes."""

_KEPT_S = 29 * 86400
"""Seconds for which providers keep results."""

_LOOK_S = 0.5
"""Seconds between two checks whether a delayed job may be sent."""

_PAUSE_S = (1.0, 60.0)
_NO_ROOM_S = (30.0, 600.0)

T = TypeVar("T")


@dataclass(slots=True)
class _Fetched:
    """The replies of a batch, and their cost as far as it is known."""

    replies: int = 0
    unpriced: int = 0
    cost_usd: float = 0.0
    saved_usd: float = 0.0


class BatchDelivery:
    """Processes the jobs of one model."""

    def __init__(
        self,
        batch_log: BatchLog,
        settings: ModelSettings,
        api: Batches,
        *,
        known: Iterable[str],
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`known` are the batches of existing jobs.

        An endpoint that fails for longer than `patience_s` stops the run.
        """
        self.api = api
        self.not_before = 0.0
        """No job is sent before this time (monotonic clock)."""
        self.max_calls = api.max_items
        """Maximum number of calls per job."""
        self._log = batch_log
        self._settings = settings
        self._known = set(known)
        self._under_way: set[BatchJob] = set()
        self._patience_s = patience_s
        self._say = say
        self._no_room_s = _NO_ROOM_S[0]

    async def process(self, job: BatchJob) -> None:
        """Process a job until it is collected, failed or void.

        Raises `ModelError` and `StorageError`; the job then keeps its last state on disk.
        """
        if job.state == "gathered":
            while (wait_s := self.not_before - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s, _LOOK_S))
            await self._create(job)
        elif job.state == "sending":
            await self._find_created(job)
        if job.state == "created":
            self._under_way.add(job)
            try:
                await self._wait_for_end(job)
            finally:
                self._under_way.discard(job)
        if job.state == "created":
            await self._collect(job)

    async def _create(self, job: BatchJob) -> None:
        items = self._log.items_file(job)
        upload = await self._retry(lambda: self.api.upload(items))

        async def create() -> str | None:
            self._log.note(job, "sending", upload=upload, bytes=job.size)
            try:
                return await self.api.create(job.name, items, upload)
            except ModelError as error:
                if not (error.may_have_cost or error.kind == "overloaded"):
                    self._log.note(job, "void")
                    raise
                log.warning(
                    "The request for a batch failed but may have made it, so it is looked for: %s",
                    error,
                )
            return None

        batch = await self._retry(create)
        if batch is None:
            await self._find_created(job)
        else:
            self._note_created(job, batch)
            log.info("Batch %s was created with %d calls to %s.", batch, len(job.ids), job.model)
        items.unlink(missing_ok=True)

    async def _find_created(self, job: BatchJob) -> None:
        """Search for a batch that may have been created although its id did not arrive."""
        lost = LostBatch(
            job.name, job.upload, frozenset(map(job.provider_id, job.ids)), job.sent_at
        )
        began = time.monotonic()
        settle_s = _SETTLE_S + job.size / _SETTLE_BYTES_PER_S
        # If the clock was set back, `sent_at` is in the future.
        settles_at = began + min(settle_s, settle_s - (time.time() - job.sent_at))
        while True:
            if is_last := time.monotonic() >= settles_at:
                await self._retry(lambda: self.api.withdraw(job.upload))
            try:
                batch = await self._retry(lambda: self.api.find(lost, self._known))
            except Undecided:
                await self._pause(time.monotonic() - began)
                continue
            if batch is not None:
                self._note_created(job, batch)
                log.info("Batch %s was found again; it has %d calls.", batch, len(job.ids))
                return
            if is_last:
                self._log.note(job, "void")
                return
            await asyncio.sleep(min(1.0, max(0.0, settles_at - time.monotonic())))

    async def _wait_for_end(self, job: BatchJob) -> None:
        """Wait until a batch has ended. It has failed if none of its calls was made."""
        while True:
            try:
                state = await self._retry(lambda: self.api.state(job.batch))
            except ModelError as error:
                if error.kind != "not_found":
                    raise
                if time.time() - job.created_at < _KEPT_S:
                    message = (
                        f"{error}; the endpoint does not know batch {job.batch}. Use the key and "
                        "base URL that created it. To give it up and make its calls again, remove "
                        "batches.jsonl from the run directory"
                    )
                    error.args = (message,)
                    raise
                self._log.note(job, "failed", why="the provider no longer has it")
                return
            if state.is_for_want_of_room:
                self._delay_jobs(job, state.failure)
                self._log.note(job, "void")
                return
            if state.failure:
                self._say(f"batch {job.batch} failed, its calls are made live: {state.failure}")
                self._log.note(job, "failed", why=state.failure)
                return
            if state.is_over:
                return
            await self._pause(time.time() - job.sent_at)

    async def _collect(self, job: BatchJob) -> None:
        """Fetch the results, and log their cost."""
        fetched = await self._retry(lambda: self._fetch(job))
        self._log.note(
            job,
            "collected",
            batch=job.batch,
            replies=fetched.replies,
            failed=len(job.ids) - fetched.replies,
            cost_usd=fetched.cost_usd,
            saved_usd=fetched.saved_usd,
            unpriced=fetched.unpriced,
            seconds=max(0.0, time.time() - job.sent_at),
        )
        self._no_room_s = _NO_ROOM_S[0]
        log.info("Batch %s has %d of %d replies.", job.batch, fetched.replies, len(job.ids))

    async def _fetch(self, job: BatchJob) -> _Fetched:
        ids = frozenset(job.ids)
        fetched = _Fetched()
        results = self._log.begin_results(job)
        try:
            async for result in self.api.results(job.batch):
                id = job.call_id(result.id)
                if id is None or id not in ids or not results.add(replace(result, id=id)):
                    continue
                if result.reply is None:
                    continue
                fetched.replies += 1
                cost, full = _costs(result.reply, self._settings)
                if cost is None or full is None:
                    fetched.unpriced += 1
                else:
                    fetched.cost_usd += cost
                    fetched.saved_usd += full - cost
            results.keep()
        finally:
            results.close()
        return fetched

    def _note_created(self, job: BatchJob, batch: str) -> None:
        self._log.note(job, "created", batch=batch)
        self._known.add(batch)

    # Waiting.

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request; retry temporary failures."""
        failing_since = time.monotonic()
        pause_s = _PAUSE_S[0]
        while True:
            try:
                return await call()
            except ModelError as error:
                failed_s = time.monotonic() - failing_since
                is_enough = failed_s >= self._patience_s and error.kind != "rate_limited"
                if error.action != "retry" or is_enough:
                    raise
                wait_s = min(_PAUSE_S[1], max(pause_s, error.retry_after_s or 0.0))
                log.info(
                    "A request about batches failed and is sent again in %.0f s: %s: %s",
                    wait_s,
                    error.kind,
                    error,
                )
                await asyncio.sleep(wait_s)
                pause_s = min(_PAUSE_S[1], 2 * pause_s)

    async def _pause(self, age_s: float) -> None:
        await asyncio.sleep(min(_POLL_S[1], max(_POLL_S[0], _POLL_SHARE * age_s)))

    def _delay_jobs(self, job: BatchJob, why: str) -> None:
        """Delay all jobs for a while; halve the maximum size if this was the only batch."""
        if self._under_way == {job}:
            self.max_calls = max(1, min(self.max_calls, len(job.ids) // 2))
        if time.monotonic() < self.not_before:
            return
        self._say(
            f"no room for a batch of {len(job.ids):,} calls now; the next, of at most "
            f"{self.max_calls:,}, in {self._no_room_s:.0f} s: {why}"
        )
        self.not_before = time.monotonic() + self._no_room_s
        self._no_room_s = min(_NO_ROOM_S[1], 2 * self._no_room_s)


def _costs(reply: bytes, settings: ModelSettings) -> tuple[float | None, float | None]:
    """Return the cost of a reply, and its cost if it had been made live; None if unknown."""
    try:
        completion = read_reply(reply, settings)
    except ModelError:
        return None, None
    return add_cost(completion, settings, by_batch=True).cost_usd, price(completion, settings)
