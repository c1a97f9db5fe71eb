"""One wave on its way: created, waited for, and collected, or found out to have been none.

A creation that was cut short, by a crash or on the network, may have worked. Then the provider's
batches are looked through before anything else is done with its calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from agent.models.batches.base import Batches, LostBatch, Undecided
from agent.models.batches.calls import read_reply
from agent.models.errors import ModelError
from agent.models.model import ModelSettings
from agent.models.prices import price
from runs.batch_api.batch_log import BatchJob, BatchLog

log = logging.getLogger(__name__)

_POLL_S = (0.2, 60.0)
_POLL_PART = 0.1
"""A batch is looked at again after this part of its age, within these bounds."""

_SETTLE_S = 5.0
_SETTLE_BYTES_PER_S = 10**6
"""How long a creation that was cut short may take to show: longer for what was large."""

_KEPT_S = 29 * 86400
"""For how long providers keep results."""

_LOOK_S = 0.5
"""How often a wave that is held back looks whether it still is."""

_PAUSE_S = (1.0, 60.0)
_NO_ROOM_S = (30.0, 600.0)

T = TypeVar("T")


class BatchDelivery:
    """Sees the waves of one model through."""

    def __init__(
        self,
        ledger: BatchLog,
        settings: ModelSettings,
        api: Batches,
        *,
        known: Iterable[str],
        patience_s: float,
        say: Callable[[str], None],
    ) -> None:
        """`known` are the batches of waves that there are. An endpoint that fails for longer than
        `patience_s` stops the run."""
        self.api = api
        self.not_before = 0.0
        """By the monotonic clock: until then waves are held back."""
        self.most = api.max_items
        """Calls that a wave should have at most."""
        self._ledger = ledger
        self._settings = settings
        self._known = set(known)
        self._under_way: set[BatchJob] = set()
        self._patience_s = patience_s
        self._say = say
        self._no_room_s = _NO_ROOM_S[0]

    async def see_through(self, job: BatchJob) -> None:
        """Carry a wave on until it is collected, failed or void.

        Raises `ModelError` and `StorageError`; the wave then stays as it is noted.
        """
        if job.state == "gathered":
            while (wait_s := self.not_before - time.monotonic()) > 0:
                await asyncio.sleep(min(wait_s, _LOOK_S))
            await self._create(job)
        elif job.state == "sending":
            await self._look_for(job)
        if job.state == "created":
            self._under_way.add(job)
            try:
                await self._wait_for(job)
            finally:
                self._under_way.discard(job)
        if job.state == "created":
            await self._collect(job)

    async def _create(self, job: BatchJob) -> None:
        items = self._ledger.items_file(job)
        upload = await self._patiently(lambda: self.api.upload(items))

        async def create() -> str | None:
            self._ledger.note(job, "sending", upload=upload, bytes=job.size)
            try:
                return await self.api.create(job.name, items, upload)
            except ModelError as error:
                if not _may_have_worked(error):
                    self._ledger.note(job, "void")
                    raise
                log.warning("creating a batch: %s; looking whether it is there", error)
            return None

        batch = await self._patiently(create)
        if batch is None:
            await self._look_for(job)
        else:
            self._note_created(job, batch)
            log.info("batch %s: %d calls to %s", batch, len(job.ids), job.model)
        items.unlink(missing_ok=True)

    async def _look_for(self, job: BatchJob) -> None:
        """Find out whether a batch was created whose id nobody was told."""
        lost = LostBatch(job.name, job.upload, frozenset(map(job.sent_id, job.ids)), job.sent_at)
        began = time.monotonic()
        settle_s = _SETTLE_S + job.size / _SETTLE_BYTES_PER_S
        # By a clock that was set back, it was sent in the future.
        settles_at = began + min(settle_s, settle_s - (time.time() - job.sent_at))
        while True:
            if is_last := time.monotonic() >= settles_at:
                await self._patiently(lambda: self.api.withdraw(job.upload))
            try:
                batch = await self._patiently(lambda: self.api.find(lost, self._known))
            except Undecided:
                await self._wait_part_of(time.monotonic() - began)
                continue
            if batch is not None:
                self._note_created(job, batch)
                log.info("batch %s: found again, %d calls", batch, len(job.ids))
                return
            if is_last:
                self._ledger.note(job, "void")
                return
            await asyncio.sleep(min(1.0, max(0.0, settles_at - time.monotonic())))

    async def _wait_for(self, job: BatchJob) -> None:
        """Wait until a batch is over; it has failed where none of its calls was made."""
        while True:
            try:
                state = await self._patiently(lambda: self.api.state(job.batch))
            except ModelError as error:
                if error.kind != "not_found":
                    raise
                if time.time() - job.created_at < _KEPT_S:
                    words = (
                        f"{error}; batch {job.batch} is not known there. Is it the key and the "
                        "base URL that made it? To give it up and ask its calls again, remove "
                        "batches.jsonl from the run directory"
                    )
                    error.args = (words,)
                    raise
                self._ledger.note(job, "failed", why="the provider keeps it no longer")
                return
            if state.is_for_want_of_room:
                self._no_room(job, state.failure)
                self._ledger.note(job, "void")
                return
            if state.failure:
                self._say(f"batch {job.batch} failed, its calls are made live: {state.failure}")
                self._ledger.note(job, "failed", why=state.failure)
                return
            if state.is_over:
                return
            await self._wait_part_of(time.time() - job.sent_at)

    async def _collect(self, job: BatchJob) -> None:
        """Fetch the results and note what they cost."""
        replies, cost_usd, saved_usd, unpriced = await self._patiently(lambda: self._fetch(job))
        self._ledger.note(
            job,
            "collected",
            batch=job.batch,
            replies=replies,
            failed=len(job.ids) - replies,
            cost_usd=cost_usd,
            saved_usd=saved_usd,
            unpriced=unpriced,
            seconds=max(0.0, time.time() - job.sent_at),
        )
        self._no_room_s = _NO_ROOM_S[0]
        log.info("batch %s: %d of %d replies", job.batch, replies, len(job.ids))

    async def _fetch(self, job: BatchJob) -> tuple[int, float, float, int]:
        ours = frozenset(job.ids)
        replies = unpriced = 0
        cost_usd = saved_usd = 0.0
        results = self._ledger.begin_results(job)
        try:
            async for result in self.api.results(job.batch):
                id = job.own_id(result.id)
                if id is None or id not in ours or not results.add(replace(result, id=id)):
                    continue
                if result.reply is None:
                    continue
                replies += 1
                cost, full = _costs(result.reply, self._settings)
                if cost is None or full is None:
                    unpriced += 1
                else:
                    cost_usd += cost
                    saved_usd += full - cost
            results.keep()
        finally:
            results.close()
        return replies, cost_usd, saved_usd, unpriced

    def _note_created(self, job: BatchJob, batch: str) -> None:
        self._ledger.note(job, "created", batch=batch)
        self._known.add(batch)

    # Waiting.

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make a request, again and again while it fails in a way that passes."""
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
                log.info("batches: %s: %s; again in %.0f s", error.kind, error, wait_s)
                await asyncio.sleep(wait_s)
                pause_s = min(_PAUSE_S[1], 2 * pause_s)

    async def _wait_part_of(self, age_s: float) -> None:
        await asyncio.sleep(min(_POLL_S[1], max(_POLL_S[0], _POLL_PART * age_s)))

    def _no_room(self, job: BatchJob, why: str) -> None:
        """Hold all waves back for a while; where this one was alone, it was too large."""
        if self._under_way == {job}:
            self.most = max(1, min(self.most, len(job.ids) // 2))
        if time.monotonic() < self.not_before:
            return
        self._say(
            f"no room for a batch of {len(job.ids):,} calls now; the next, of {self.most:,} at "
            f"most, in {self._no_room_s:.0f} s: {why}"
        )
        self.not_before = time.monotonic() + self._no_room_s
        self._no_room_s = min(_NO_ROOM_S[1], 2 * self._no_room_s)


def _may_have_worked(error: ModelError) -> bool:
    """Whether a creation that failed like this may have been carried out."""
    return error.may_have_cost or error.kind == "overloaded"


def _costs(reply: bytes, settings: ModelSettings) -> tuple[float | None, float | None]:
    """What a reply cost, and what it would have cost live."""
    try:
        completion = read_reply(reply, settings)
    except ModelError:
        return None, None
    return price(completion, settings, by_batch=True), price(completion, settings)
