"""Batches as the supervisor sees them: it passes on what workers ask, and hears of trouble.

The work is done in a thread with an event loop of its own (`wave_office`), so that dealing and
recording never wait for it. Where a run does not ask by batches, nothing here does anything.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Container
from typing import Concatenate, ParamSpec

from agent.models.batches.calls import open_batches
from agent.models.resolve import read_key
from runs.batch_api.batch_log import BatchJob, BatchLog
from runs.batch_api.collector import BatchCollector, CollectorLimits
from runs.batch_api.delivery import BatchDelivery
from runs.config.models import Setups, called_models
from runs.config.run_config import RunConfig
from runs.protocol.batch_calls import name_of
from runs.run_dir import RunDir

log = logging.getLogger(__name__)

P = ParamSpec("P")

_MOST_S = 10.0
"""For creations under way to be told their ids when a run ends."""


class BatchService:
    """The batches of one start."""

    def __init__(
        self, config: RunConfig, setups: Setups, run_dir: RunDir, settled: Container[bytes]
    ) -> None:
        """`settled` are the tasks that need no more work. Raises `StorageError`."""
        self._config = config
        self._setups = setups
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What the user should hear."""
        self.problem: str | None = None
        """Why the run has to stop."""
        self._office: BatchCollector | None = None
        self._thread: threading.Thread | None = None
        if not config.batch_api:
            return
        ledger = BatchLog(run_dir.path, run_dir.quarantine)
        jobs = ledger.load(settled)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(ledger, jobs),), name="waves", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def do(
        self, act: Callable[Concatenate[BatchCollector, P], object], *args: P.args, **more: P.kwargs
    ) -> None:
        """Have the thread call a method of `BatchCollector`; where it fails, the run stops."""
        if self._thread is None or self._office is None:
            return

        def guarded(office: BatchCollector) -> None:
            try:
                act(office, *args, **more)
            except Exception as error:
                log.exception("batches")
                self._on_problem(str(error))

        self._loop.call_soon_threadsafe(guarded, self._office)

    def describe(self) -> str:
        """For the progress line; "" while nothing is in a batch."""
        calls, batches = (0, 0) if self._office is None else self._office.in_batches
        return f"{calls:,} calls in {batches:,} batches" if batches else ""

    def close(self) -> None:
        """End the thread; batches go on at the provider."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._end.set)
            self._thread.join()
            self._thread = None

    async def _serve(self, ledger: BatchLog, jobs: list[BatchJob]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        config = self._config
        try:
            office = self._office = BatchCollector(
                ledger,
                jobs,
                {
                    name_of(one): BatchDelivery(
                        ledger,
                        one,
                        open_batches(one, api_key=read_key(one)),
                        known=[job.batch for job in jobs],
                        patience_s=config.call_timeout_s,
                        say=self.news.put,
                    )
                    for one in called_models(self._setups)
                },
                CollectorLimits(config.batch_wait_s, config.batch_max_requests),
                on_problem=self._on_problem,
            )
        except Exception as error:
            log.exception("batches cannot be taken up")
            self._on_problem(str(error))
            await self._end.wait()
            return
        finally:
            self._ready.set()
        await self._end.wait()
        try:
            await office.close(min(config.grace_s, _MOST_S))
        except Exception as error:
            log.exception("batches: not closed in good order")
            self._on_problem(str(error))

    def _on_problem(self, words: str) -> None:
        self.problem = self.problem or words


def with_open_batches(config: RunConfig, run_dir: RunDir, settled: Container[bytes]) -> RunConfig:
    """The config of a start that is to ask live although earlier ones have left batches.

    What is in these is paid for, so it is waited for; all else is asked live.
    """
    if config.batch_api:
        return config
    ledger = BatchLog(run_dir.path, run_dir.quarantine)
    if not ledger.load(settled):
        return config
    return config.model_copy(update={"batch_api": True, "batch_live_share": 0.0})
