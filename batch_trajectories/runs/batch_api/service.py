"""The supervisor's interface to the Batch API: it passes on calls, and gets messages and problems.

The work is done by a `BatchCollector` in a thread with an event loop of its own, so assigning and
recording never wait for it. A run has one only if it uses the Batch API.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Container, Mapping
from typing import Any, Concatenate, ParamSpec

from agent.models.batches.calls import open_batches
from agent.models.resolve import read_key
from batch_trajectories.runs.batch_api.batch_log import BatchJob, BatchLog
from batch_trajectories.runs.batch_api.collector import BatchCollector, CollectorLimits
from batch_trajectories.runs.batch_api.delivery import BatchDelivery
from batch_trajectories.runs.config.models import Setups, called_models
from batch_trajectories.runs.config.run_config import RunConfig
from batch_trajectories.runs.directory.run_dir import RunDir
from batch_trajectories.runs.executors.base import WorkerHandle
from batch_trajectories.runs.protocol.messages import name_of, pack

log = logging.getLogger(__name__)

P = ParamSpec("P")

_MAX_CLOSE_S = 10.0
"""How long to wait for the ids of batches that are being created when a run ends."""


_LIVE_SHARE = 0.95
"""The share of ended tasks from which on calls are made live: the last conversations would wait
hours for tiny batches."""


class BatchService:
    """The batches of one start."""

    def __init__(
        self,
        config: RunConfig,
        setups: Setups,
        run_dir: RunDir,
        settled: Container[bytes],
        *,
        is_new: bool,
    ) -> None:
        """`settled` are the tasks that need no more work. Raises `StorageError`.

        `is_new`: calls may go into new batches. Otherwise the run only waits for those of earlier
        starts, whose calls are paid for, and makes all other calls live.
        """
        self._live_share = _LIVE_SHARE if is_new else 0.0
        self._config = config
        self._setups = setups
        self._news: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Messages for the user."""
        self.problem: str | None = None
        """Why the run has to stop."""
        self._collector: BatchCollector | None = None
        batch_log = BatchLog(run_dir.path, run_dir.quarantine)
        jobs = batch_log.load(settled)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(batch_log, jobs),), name="batches", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def ask(self, worker: WorkerHandle, header: Mapping[str, Any], payload: bytes) -> None:
        """A worker's call, to be made in a batch; it gets the answer."""

        def answer(id: str, how: str, reply: bytes) -> None:
            worker.send(pack("answer", reply, id=id, how=how))

        self._do(BatchCollector.ask, header["id"], header["model"], payload, answer, header["most"])

    def leave(self, task: bytes) -> None:
        """See `BatchCollector`."""
        self._do(BatchCollector.leave, task)

    def forget(self, task: bytes) -> None:
        """See `BatchCollector`."""
        self._do(BatchCollector.forget, task)

    def tick(self, held: int | None, *, ended_share: float, say: Callable[[str], object]) -> None:
        """See `BatchCollector`; `ended_share` is that of the tasks, `say` gets the messages."""
        while not self._news.empty():
            say(self._news.get())
        is_tail = ended_share >= self._live_share
        self._do(BatchCollector.tick, held, is_tail=is_tail)

    def stop(self) -> None:
        """See `BatchCollector`."""
        self._do(BatchCollector.stop)

    def _do(
        self, act: Callable[Concatenate[BatchCollector, P], object], *args: P.args, **more: P.kwargs
    ) -> None:
        """Call a method of `BatchCollector` in the thread; if it raises, the run stops."""
        if self._collector is None:
            return

        def guarded(collector: BatchCollector) -> None:
            try:
                act(collector, *args, **more)
            except Exception as error:
                log.exception("batches")
                self._on_problem(str(error))

        self._loop.call_soon_threadsafe(guarded, self._collector)

    def describe(self) -> str:
        """For the progress line; "" if no call is in a batch."""
        calls, batches = (0, 0) if self._collector is None else self._collector.in_batches
        return f"{calls:,} calls in {batches:,} batches" if batches else ""

    def close(self) -> None:
        """End the thread; batches continue at the provider."""
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    async def _serve(self, batch_log: BatchLog, jobs: list[BatchJob]) -> None:
        self._loop, self._end = asyncio.get_running_loop(), asyncio.Event()
        config = self._config
        try:
            collector = self._collector = BatchCollector(
                batch_log,
                jobs,
                {
                    name_of(settings): BatchDelivery(
                        batch_log,
                        settings,
                        open_batches(settings, api_key=read_key(settings)),
                        known=[job.batch for job in jobs],
                        patience_s=config.call_timeout_s,
                        say=self._news.put,
                    )
                    for settings in called_models(self._setups)
                },
                CollectorLimits(config.batch_wait_s, config.batch_max_requests),
                on_problem=self._on_problem,
            )
        except Exception as error:
            log.exception("cannot open batches")
            self._on_problem(str(error))
            await self._end.wait()
            return
        finally:
            self._ready.set()
        await self._end.wait()
        try:
            await collector.close(min(config.grace_s, _MAX_CLOSE_S))
        except Exception as error:
            log.exception("cannot close batches")
            self._on_problem(str(error))

    def _on_problem(self, problem: str) -> None:
        self.problem = self.problem or problem


def with_open_batches(config: RunConfig, run_dir: RunDir, settled: Container[bytes]) -> RunConfig:
    """The config, with the Batch API on if earlier starts have left open batches."""
    if config.batch_api or not BatchLog(run_dir.path, run_dir.quarantine).load(settled):
        return config
    return config.model_copy(update={"batch_api": True})
