"""The parent's side of batches, in an event loop of its own: calls come in, waves go out.

Nothing is paid twice because every step is on disk before the next (see `wave_ledger`), and
because a call that may be in a batch is never asked elsewhere until that is decided.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent.models.batches.base import ItemResult
from agent.models.errors import RULES, ModelError
from runs.batch_api.batch_log import BatchJob, BatchLog
from runs.batch_api.delivery import BatchDelivery
from runs.errors import EnvironmentStop
from runs.protocol.batch_calls import task_of
from runs.store.files import AppendFile
from toolsets.errors import HostError, machine_failure

log = logging.getLogger(__name__)

Reply = Callable[[str, str, bytes], None]
"""Answers a call: its id, how (see `Answer`), and the reply."""

_QUIET_S = 0.3
"""All wait, and for so long nobody has joined: the wave is complete."""

_ANSWERS, _ANSWERS_S = 500, 0.05
"""So many answers go out at a time."""


@dataclass(frozen=True, slots=True)
class CollectorLimits:
    """When a wave is closed, beside when nobody can join it any more."""

    wait_s: float
    max_requests: int


@dataclass
class _Gathering:
    """A wave that calls are still joining."""

    job: BatchJob
    file: AppendFile
    began: float = field(default_factory=time.monotonic)


class BatchCollector:
    """Gathers calls, sees their batches through, and answers. All calls belong to one loop."""

    def __init__(
        self,
        ledger: BatchLog,
        jobs: Iterable[BatchJob],
        couriers: Mapping[str, BatchDelivery],
        bounds: CollectorLimits,
        *,
        on_problem: Callable[[str], None],
    ) -> None:
        """`jobs` are those of earlier starts; `couriers` by `name_of`.

        `on_problem` stops the run.
        """
        self._ledger = ledger
        self._couriers = couriers
        self._bounds = bounds
        self._on_problem = on_problem
        self._waves: set[BatchJob] = set()
        self._wave_of: dict[str, BatchJob] = {}
        self._calls_of: defaultdict[bytes, set[str]] = defaultdict(set)
        self._waiting: dict[str, Reply] = {}
        self._waiting_of: defaultdict[bytes, set[str]] = defaultdict(set)
        self._gathering: dict[str, _Gathering] = {}
        self._working: dict[asyncio.Task[None], BatchJob] = {}
        self._joined_at = 0.0
        self._is_tail = self._is_stopping = False
        self.live = 0
        """Calls that were sent live."""
        self.in_batches = (0, 0)
        """How many calls are in batches that are not over, and how many such batches there are."""
        for job in jobs:
            self._take_up(job)

    def ask(
        self, id: str, model: str, body: bytes, reply: Reply, most: list[Any] | None = None
    ) -> None:
        """A worker wants a call made, and has set `most` aside for it if there is a budget."""
        if self._is_stopping:
            return
        self._waiting[id] = reply
        self._waiting_of[task_of(id)].add(id)
        self._joined_at = time.monotonic()
        job = self._wave_of.get(id)
        if job is not None:
            self._answer(job, id)
        elif self._is_tail:
            self._send(id, "live")
        else:
            self._gather(id, model, body, most)

    def leave(self, task: bytes) -> None:
        """Nobody waits for the calls of a task any more."""
        for id in self._waiting_of.pop(task, ()):
            self._waiting.pop(id, None)

    def forget(self, task: bytes) -> None:
        """A task has its record: its calls are never asked again."""
        self.leave(task)
        for id in self._calls_of.pop(task, ()):
            job = self._wave_of.pop(id)
            job.index.pop(id, None)
            job.needed -= 1
            if not job.needed and job.state in ("collected", "failed"):
                self._ledger.remove(job)
                self._waves.discard(job)

    def tick(self, held: int | None, *, is_tail: bool) -> None:
        """Close the waves that are complete.

        `held` is how many tasks the workers have, None while more of them are starting. With
        `is_tail` the run is so near its end that what comes now is asked live.
        """
        under_way = [job for job in self._waves if job.state in ("sending", "created")]
        self.in_batches = (sum(len(job.ids) for job in under_way), len(under_way))
        now = time.monotonic()
        if self._is_stopping:
            return
        if is_tail and not self._is_tail:
            self._is_tail = True
            for gathering in list(self._gathering.values()):
                self._drop(gathering)
                self._let_go(gathering.job, "live")
        waiting = sum(map(bool, self._waiting_of.values()))
        is_complete = waiting == held and now - self._joined_at >= _QUIET_S
        for gathering in list(self._gathering.values()):
            if is_complete or now - gathering.began >= self._bounds.wait_s:
                self._close(gathering)

    def stop(self) -> None:
        """Send nothing that has not been sent."""
        self._is_stopping = True
        for gathering in list(self._gathering.values()):
            self._drop(gathering)
            if gathering.job.most:
                self._note_gathered(gathering.job)  # the next start gives back what is set aside
        for task, job in self._working.items():
            if job.state == "gathered":
                task.cancel()

    async def close(self, wait_s: float) -> None:
        """Wait `wait_s` at most for creations under way, so that their ids get known; then end."""
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
        for courier in self._couriers.values():
            await courier.api.close()
        if self.live:
            self._ledger.note_live(self.live)
        self._ledger.close()

    # Gathering.

    def _gather(self, id: str, model: str, body: bytes, most: list[Any] | None) -> None:
        courier = self._couriers[model]
        api = courier.api
        gathering = self._gathering.get(model)
        room = min(self._bounds.max_requests, courier.most)
        line = api.line(gathering.job.sent_id(id) if gathering else id, body)
        if gathering is not None and (
            len(gathering.job.ids) >= room or gathering.file.size + len(line) > api.max_bytes
        ):
            self._close(gathering)
            gathering = None
        if gathering is None:
            job = BatchJob(secrets.token_hex(4), model, [])
            gathering = _Gathering(job, AppendFile(self._ledger.items_file(job)))
            self._gathering[model] = gathering
            self._waves.add(job)
            line = api.line(job.sent_id(id), body)
        gathering.file.append(line)
        gathering.job.ids.append(id)
        gathering.job.needed += 1
        if most is not None:
            gathering.job.most.append(most)
        self._know(id, gathering.job)

    def _close(self, gathering: _Gathering) -> None:
        """Send a wave, if all its calls are still wanted; else those that are gather anew."""
        job = gathering.job
        del self._gathering[job.model]
        gathering.file.close()
        if not all(id in self._waiting for id in job.ids):
            self._ledger.remove(job)
            self._let_go(job, "again")
            return
        job.size = gathering.file.size
        self._note_gathered(job)
        self._work(job)

    def _note_gathered(self, job: BatchJob) -> None:
        most = {"most": job.most} if job.most else {}
        self._ledger.note(job, "gathered", model=job.model, items=job.ids, **most)

    def _drop(self, gathering: _Gathering) -> None:
        """Forget a wave of which nothing was sent."""
        del self._gathering[gathering.job.model]
        gathering.file.close()
        self._ledger.remove(gathering.job)

    def _know(self, id: str, job: BatchJob) -> None:
        self._wave_of[id] = job
        self._calls_of[task_of(id)].add(id)

    def _let_go(self, job: BatchJob, how: str) -> None:
        """The calls of a wave belong to it no longer."""
        self._waves.discard(job)
        for id in job.ids:
            if self._wave_of.get(id) is job:
                del self._wave_of[id]
                self._calls_of[task_of(id)].discard(id)
            self._send(id, how)

    # Answering.

    def _answer(self, job: BatchJob, id: str) -> None:
        """Answer a call of a wave that is waited for, if it is decided."""
        if job.state not in ("collected", "failed") or id not in self._waiting:
            return
        result = ItemResult(id, None, job.why)
        if job.state == "collected":
            result = self._ledger.result(job, id)
        if result.reply is None:
            log.info("%s: asked live: %s", id, result.why)
            self._send(id, "live")
        else:
            self._send(id, "reply", result.reply)

    def _send(self, id: str, how: str, reply: bytes = b"") -> None:
        if (answer := self._waiting.pop(id, None)) is not None:
            self._waiting_of[task_of(id)].discard(id)
            self.live += how == "live"
            answer(id, how, reply)

    # Seeing a wave through.

    def _take_up(self, job: BatchJob) -> None:
        """Go on with a wave of an earlier start."""
        if job.model not in self._couriers:
            log.warning("batch %s asks %s, which this run no longer does", job.batch, job.model)
            return
        self._waves.add(job)
        for id in job.ids:
            self._know(id, job)
        if job.state in ("sending", "created"):
            self._work(job)

    def _work(self, job: BatchJob) -> None:
        task = asyncio.get_running_loop().create_task(self._see_through(job))
        self._working[task] = job
        task.add_done_callback(lambda task: self._working.pop(task, None))

    async def _see_through(self, job: BatchJob) -> None:
        """From the calls of a wave to their answers. What fails for good stops the run."""
        try:
            await self._couriers[job.model].see_through(job)
            if job.state == "void":
                self._let_go(job, "again")
            for n, id in enumerate(job.ids, 1):
                self._answer(job, id)
                if n % _ANSWERS == 0:  # else the pipes would hold all replies of a large wave
                    await asyncio.sleep(_ANSWERS_S)
            if not job.needed:
                self._ledger.remove(job)
        except ModelError as error:
            self._on_problem(f"batches of {job.model}: {RULES[error.kind].meaning}: {error}")
        except (EnvironmentStop, HostError) as error:
            self._on_problem(str(error))
        except Exception as error:
            if (words := machine_failure(error)) is not None:
                self._on_problem(words)
                return
            log.exception("batch %s: a defect of this program", job.batch or job.name)
            self._on_problem(f"a defect of this program, see run.log: {error!r}")
