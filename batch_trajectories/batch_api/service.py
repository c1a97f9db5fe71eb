"""The supervisor's interface to the Batch API: it passes on calls, and returns messages.

A `BatchCollector` does the work in a thread with its own event loop, so assigning and recording
never wait for it. A run has a service only if it uses the Batch API.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from agent.models.batches.base import ItemResult
from agent.models.batches.calls import open_batches
from agent.models.errors import RULES, ModelError
from agent.models.resolve import read_key
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import EnvironmentStop, HostError, machine_failure
from batch_trajectories.batch_api.batch_log import BatchJob, BatchLog
from batch_trajectories.batch_api.delivery import BatchDelivery
from batch_trajectories.config.models import Setups, called_models
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import AnswerCall, CollectCall, model_label, parse_task_key
from batch_trajectories.engine.run_dir import RunDir
from batch_trajectories.records.files import AppendFile

# Gathers calls into batch jobs and answers them, in an event loop of its own.
#
# Nothing is paid twice: every step is on disk before the next (see `batch_log`), and a call that
# may be in a batch is never made elsewhere until that is decided.

log = logging.getLogger(__name__)

Reply = Callable[[str, str, bytes], None]
"""Answers a call: its id, how ("reply", "live" or "again"), and the reply."""

_QUIET_S = 0.3
"""Seconds without a new call after which a job is complete, if all tasks wait."""

_ANSWERS, _ANSWERS_S = 500, 0.05
"""Number of answers after which the sender pauses, and the seconds of the pause."""


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """The limits at which a job is closed, even if more calls could join it."""

    wait_s: float
    max_requests: int


@dataclass
class _Gathering:
    """A job to which calls are added until it is sent."""

    job: BatchJob
    file: AppendFile
    began: float = field(default_factory=time.monotonic)


class BatchCollector:
    """Gathers calls, sends them as batches, and answers them. Use it from one event loop."""

    def __init__(
        self,
        batch_log: BatchLog,
        jobs: Iterable[BatchJob],
        deliveries: Mapping[str, BatchDelivery],
        limits: CollectorLimits,
        *,
        on_problem: Callable[[str], None],
    ) -> None:
        """`jobs` are those of earlier starts; `deliveries` are by `model_label`.

        `on_problem` stops the run.
        """
        self._log = batch_log
        self._deliveries = deliveries
        self._limits = limits
        self._on_problem = on_problem
        self._jobs: set[BatchJob] = set()
        self._job_by_call: dict[str, BatchJob] = {}
        self._calls_by_task: defaultdict[bytes, set[str]] = defaultdict(set)
        self._waiting: dict[str, Reply] = {}
        self._waiting_by_task: defaultdict[bytes, set[str]] = defaultdict(set)
        self._gathering: dict[str, _Gathering] = {}
        self._working: dict[asyncio.Task[None], BatchJob] = {}
        self._last_call_at = 0.0
        self._is_tail = self._is_stopping = False
        self.live = 0
        """Number of calls that were made live."""
        self.in_batches = (0, 0)
        """The number of calls in unfinished batches, and the number of these batches."""
        for job in jobs:
            self._resume(job)

    def ask(
        self, id: str, model: str, body: bytes, reply: Reply, reserve: list[Any] | None = None
    ) -> None:
        """Request a call for a worker, which has set aside `reserve` for it (None: no budget)."""
        if self._is_stopping:
            return
        self._waiting[id] = reply
        self._waiting_by_task[parse_task_key(id)].add(id)
        self._last_call_at = time.monotonic()
        job = self._job_by_call.get(id)
        if job is not None:
            self._answer(job, id)
        elif self._is_tail:
            self._send(id, "live")
        else:
            self._gather(id, model, body, reserve)

    def leave(self, task: bytes) -> None:
        """Answer no calls of this task any more, because its worker has ended."""
        for id in self._waiting_by_task.pop(task, ()):
            self._waiting.pop(id, None)

    def forget(self, task: bytes) -> None:
        """Forget the calls of a task that has a record: they are never requested again."""
        self.leave(task)
        for id in self._calls_by_task.pop(task, ()):
            job = self._job_by_call.pop(id)
            job.index.pop(id, None)
            job.needed -= 1
            if not job.needed and job.state in ("collected", "failed"):
                self._log.remove(job)
                self._jobs.discard(job)

    def tick(self, held: int | None, *, is_tail: bool) -> None:
        """Close the jobs that are complete.

        `held` is the number of tasks in flight; None while workers are starting. If `is_tail`, the
        run is near its end and new calls are made live.
        """
        under_way = [job for job in self._jobs if job.state in ("sending", "created")]
        self.in_batches = (sum(len(job.ids) for job in under_way), len(under_way))
        now = time.monotonic()
        if self._is_stopping:
            return
        if is_tail and not self._is_tail:
            self._is_tail = True
            for gathering in list(self._gathering.values()):
                self._drop(gathering)
                self._answer_all(gathering.job, "live")
        waiting = sum(1 for calls in self._waiting_by_task.values() if calls)
        is_complete = waiting == held and now - self._last_call_at >= _QUIET_S
        for gathering in list(self._gathering.values()):
            if is_complete or now - gathering.began >= self._limits.wait_s:
                self._close(gathering)

    def stop(self) -> None:
        """Send no more jobs."""
        self._is_stopping = True
        for gathering in list(self._gathering.values()):
            self._drop(gathering)
            if gathering.job.reserves:
                self._note_gathered(gathering.job)  # the next start frees the reserved amounts
        for task, job in self._working.items():
            if job.state == "gathered":
                task.cancel()

    async def close(self, wait_s: float) -> None:
        """Wait at most `wait_s` for the ids of batches that are being created, then end."""
        self.stop()
        creating = [task for task, job in self._working.items() if job.state == "sending"]
        deadline = time.monotonic() + wait_s
        while creating and time.monotonic() < deadline:
            await asyncio.wait(creating, timeout=0.05)
            creating = [
                task
                for task in creating
                if not task.done() and self._working[task].state == "sending"
            ]
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        try:
            await close_all(*(delivery.api.close for delivery in self._deliveries.values()))
        finally:
            if self.live:
                self._log.note_live(self.live)
            self._log.close()

    # Gathering.

    def _gather(self, id: str, model: str, body: bytes, reserve: list[Any] | None) -> None:
        delivery = self._deliveries[model]
        api = delivery.api
        gathering = self._gathering.get(model)
        room = min(self._limits.max_requests, delivery.max_calls)
        line = api.line(gathering.job.provider_id(id) if gathering else id, body)
        if gathering is not None and (
            len(gathering.job.ids) >= room or gathering.file.size + len(line) > api.max_bytes
        ):
            self._close(gathering)
            gathering = None
        if gathering is None:
            job = BatchJob(secrets.token_hex(4), model, [])
            gathering = _Gathering(job, AppendFile(self._log.items_file(job)))
            self._gathering[model] = gathering
            self._jobs.add(job)
            line = api.line(job.provider_id(id), body)
        gathering.file.append(line)
        gathering.job.ids.append(id)
        gathering.job.needed += 1
        if reserve is not None:
            gathering.job.reserves.append(reserve)
        self._add_call(id, gathering.job)

    def _close(self, gathering: _Gathering) -> None:
        """Send a job if all its calls are still wanted; else gather the wanted ones again."""
        job = gathering.job
        del self._gathering[job.model]
        gathering.file.close()
        if not all(id in self._waiting for id in job.ids):
            self._log.remove(job)
            self._answer_all(job, "again")
            return
        job.size = gathering.file.size
        self._note_gathered(job)
        self._work(job)

    def _note_gathered(self, job: BatchJob) -> None:
        reserves = {"most": job.reserves} if job.reserves else {}
        self._log.note(job, "gathered", model=job.model, items=job.ids, **reserves)

    def _drop(self, gathering: _Gathering) -> None:
        """Remove a job that was not sent."""
        del self._gathering[gathering.job.model]
        gathering.file.close()
        self._log.remove(gathering.job)

    def _add_call(self, id: str, job: BatchJob) -> None:
        self._job_by_call[id] = job
        self._calls_by_task[parse_task_key(id)].add(id)

    def _answer_all(self, job: BatchJob, how: str) -> None:
        """Remove a job and answer its calls."""
        self._jobs.discard(job)
        for id in job.ids:
            if self._job_by_call.get(id) is job:
                del self._job_by_call[id]
                self._calls_by_task[parse_task_key(id)].discard(id)
            self._send(id, how)

    # Answering.

    def _answer(self, job: BatchJob, id: str) -> None:
        """Answer a call of a finished job if a worker waits for it."""
        if job.state not in ("collected", "failed") or id not in self._waiting:
            return
        result = ItemResult(id, None, job.why)
        if job.state == "collected":
            result = self._log.result(job, id)
        if result.reply is None:
            log.info("Call %s has no reply in its batch and is made by itself: %s", id, result.why)
            self._send(id, "live")
        else:
            self._send(id, "reply", result.reply)

    def _send(self, id: str, how: str, reply: bytes = b"") -> None:
        if (answer := self._waiting.pop(id, None)) is not None:
            self._waiting_by_task[parse_task_key(id)].discard(id)
            if how == "live":
                self.live += 1
            answer(id, how, reply)

    # Processing jobs.

    def _resume(self, job: BatchJob) -> None:
        """Continue a job of an earlier start."""
        if job.model not in self._deliveries:
            log.warning(
                "Batch %s is not fetched, because this run no longer calls %s.",
                job.batch,
                job.model,
            )
            return
        self._jobs.add(job)
        for id in job.ids:
            self._add_call(id, job)
        if job.state in ("sending", "created"):
            self._work(job)

    def _work(self, job: BatchJob) -> None:
        task = asyncio.get_running_loop().create_task(self._process(job))
        self._working[task] = job
        task.add_done_callback(lambda task: self._working.pop(task, None))

    async def _process(self, job: BatchJob) -> None:
        """Process a job and answer its calls. Permanent failures stop the run."""
        try:
            await self._deliveries[job.model].process(job)
            if job.state == "void":
                self._answer_all(job, "again")
            for n, id in enumerate(job.ids, 1):
                self._answer(job, id)
                if n % _ANSWERS == 0:  # else the pipes would hold all replies of a large job
                    await asyncio.sleep(_ANSWERS_S)
            if not job.needed:
                self._log.remove(job)
        except ModelError as error:
            rule = RULES[error.kind]
            self._on_problem(f"batches of {job.model}: {rule.meaning}: {error}. {rule.remedy}")
        except (EnvironmentStop, HostError) as error:
            self._on_problem(str(error))
        except Exception as error:
            if (failure := machine_failure(error)) is not None:
                self._on_problem(failure)
                return
            log.exception(
                "A bug in this program stops the work on batch %s.", job.batch or job.name
            )
            self._on_problem(f"a bug in this program, see run.log: {error!r}")


P = ParamSpec("P")

_MAX_CLOSE_S = 10.0
"""Maximum seconds that the end of a run waits for the ids of batches being created."""


_LIVE_SHARE = 0.95
"""The share of ended tasks from which on calls are made live, because the last conversations would
wait hours for tiny batches."""


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

        With `is_new`, calls may go into new batches. Otherwise the run only waits for batches of
        earlier starts, which are paid for, and makes all other calls live.
        """
        self._live_share = _LIVE_SHARE if is_new else 0.0
        self._config = config
        self._setups = setups
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        """Messages for the user."""
        self.problem: str | None = None
        """The reason for which the run must stop; None without one."""
        self._collector: BatchCollector | None = None
        batch_log = BatchLog(run_dir.path, run_dir.quarantine)
        jobs = batch_log.load(settled)
        self._ready = threading.Event()
        self._thread = threading.Thread(
            target=asyncio.run, args=(self._serve(batch_log, jobs),), name="batches", daemon=True
        )
        self._thread.start()
        self._ready.wait()

    def ask(self, worker: WorkerHandle, call: CollectCall) -> None:
        """Request a call for a worker; the answer is sent to the worker."""

        def answer(id: str, how: str, reply: bytes) -> None:
            worker.send(AnswerCall(id=id, how=how, payload=reply))

        most = None if call.most is None else call.most.to_json()
        self._post(BatchCollector.ask, call.id, call.model, call.payload, answer, most)

    def leave(self, task: bytes) -> None:
        """See `BatchCollector`."""
        self._post(BatchCollector.leave, task)

    def forget(self, task: bytes) -> None:
        """See `BatchCollector`."""
        self._post(BatchCollector.forget, task)

    def tick(self, held: int | None, *, ended_share: float, say: Callable[[str], object]) -> None:
        """See `BatchCollector`; also pass messages to `say`. `ended_share`: share of tasks done."""
        while not self._messages.empty():
            say(self._messages.get())
        is_tail = ended_share >= self._live_share
        self._post(BatchCollector.tick, held, is_tail=is_tail)

    def stop(self) -> None:
        """See `BatchCollector`."""
        self._post(BatchCollector.stop)

    def _post(
        self, act: Callable[Concatenate[BatchCollector, P], object], *args: P.args, **more: P.kwargs
    ) -> None:
        """Call a method of `BatchCollector` in its thread; if it raises, the run stops."""
        if self._collector is None:
            return

        def run_guarded(collector: BatchCollector) -> None:
            try:
                act(collector, *args, **more)
            except Exception as error:
                log.exception("A bug in this program stops the work on batches, and so the run.")
                self._on_problem(str(error))

        self._loop.call_soon_threadsafe(run_guarded, self._collector)

    def describe(self) -> str:
        """Return a part of the progress line; "" if no call is in a batch."""
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
                    model_label(settings): BatchDelivery(
                        batch_log,
                        settings,
                        open_batches(settings, api_key=read_key(settings)),
                        known=[job.batch for job in jobs],
                        patience_s=config.call_timeout_s,
                        say=self._messages.put,
                    )
                    for settings in called_models(self._setups)
                },
                CollectorLimits(config.batch_wait_s, config.batch_max_requests),
                on_problem=self._on_problem,
            )
        except Exception as error:
            log.exception("The batches cannot be opened, so the run stops.")
            self._on_problem(str(error))
            await self._end.wait()
            return
        finally:
            self._ready.set()
        await self._end.wait()
        try:
            await collector.close(min(config.grace_s, _MAX_CLOSE_S))
        except Exception as error:
            log.exception(
                "The batches could not be closed in order; the next start continues them."
            )
            self._on_problem(str(error))

    def _on_problem(self, problem: str) -> None:
        self.problem = self.problem or problem
