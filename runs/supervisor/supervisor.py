"""The supervisor: deals tasks to worker processes and writes what they finish.

It knows which tasks each worker holds. A worker that dies or falls silent is replaced, and its
tasks are dealt again from where their journal ends; `task_queue` says in which order.

A finished task is acknowledged to its worker only after its record is durable; records of
several tasks share one sync.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from agent.loop.steps import Finish
from agent.models.model import url_of
from runs.amounts import Cost
from runs.batch_api.collector import BatchCollector
from runs.batch_api.service import BatchService
from runs.config.models import Setups, limits_of
from runs.config.run_config import RunConfig
from runs.config.sampling import setup_of_task
from runs.errors import DatasetChanged, EnvironmentStop
from runs.executors.base import Executor, WorkerHandle
from runs.protocol.messages import Assignment, pack, unpack
from runs.protocol.worker_setup import WorkerSetup
from runs.record import dump_record, make_record
from runs.run_dir import RunDir
from runs.store.failures import Failure, FailureFile
from runs.store.files import StorageError
from runs.store.index import PASSED, index_fields
from runs.store.journal import Inflight, next_worker_number
from runs.store.records import RecordFile
from runs.store.settled import WORKER_DIED
from runs.supervisor.budget import BudgetLog, RunBudget
from runs.supervisor.damaged import listed_in_words
from runs.supervisor.key_service import KeyService
from runs.supervisor.limits import RunLimits
from runs.supervisor.outages import Outages
from runs.supervisor.progress import Progress
from runs.supervisor.task_queue import TaskQueue
from runs.supervisor.worker_pool import KILL_AFTER_GRACE_S, WorkerPool
from runs.tasks import Task

log = logging.getLogger(__name__)

_TICK_S = 0.25
_FAILED_STARTS = 3
_FAILURES_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run: what it works on and with."""

    run_dir: RunDir
    config: RunConfig
    executor: Executor
    setups: Setups
    setup: WorkerSetup
    tasks: Iterator[Task]
    """Those that need work."""
    records: RecordFile
    failures: FailureFile
    inflight: Inflight
    progress: Progress
    spent: Cost
    """What the run has used up of its budget before this start."""
    held: dict[bytes, dict[str, list[Any]]]
    """What of that is reserved for calls in batches, by task and call."""
    budget_log: BudgetLog
    batches: BatchService
    keys: KeyService


class Supervisor:
    """Runs all tasks of one start. Use `run` once."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._setup = start.setup
        self._progress = start.progress
        self._queue = TaskQueue(start.tasks, start.failures.deaths)
        self._failed_now: set[bytes] = set()
        """Tasks that failed in this start: their journals stay for the next one."""
        self.limits = RunLimits(limits_of(start.config, start.setups))
        self.budget = RunBudget(start.setup.budget, spent=start.spent, budget_log=start.budget_log)
        first_number = next_worker_number(start.run_dir.inflight)
        self._pool = WorkerPool(start.executor, start.config, first_number=first_number)
        self._failed_starts = 0
        self._outages = Outages(start.setup.proven, say=start.progress.say)
        self._signals = 0
        self._stop_reason: str | None = None
        self.is_out_of_budget = False
        self.is_dataset_changed = False
        self._kill_at: float | None = None

    def interrupt(self) -> None:
        """Stop the run: the first time in good order, the second at once. For signal handlers."""
        self._pool.inbox.put((None, None))

    def run(self) -> str | None:
        """Work until every task has ended, or the run is stopped.

        Returns None, or why the environment stopped the run ("" after `interrupt`). Raises
        `EnvironmentStop` where the records cannot be written or no worker starts.
        """
        try:
            for _ in range(min(self._start.config.num_workers, self._progress.left)):
                self._pool.start(self._setup)
            while not self._is_over():
                self._take_in()
                self._look_after_workers()
                self.limits.share(self._pool.workers)
                self._keep_budget()
                self._assign()
                self._keep_batches()
                self._progress.show(self._pool.held, self._describe())
            self._shut_down_workers()
        finally:
            self._pool.kill()
            self._start.batches.close()
        return self._stop_reason

    def _describe(self) -> str:
        parts = (self._outages, self._start.batches, self.limits, self.budget)
        return ", ".join(filter(None, (part.describe() for part in parts)))

    def _is_over(self) -> bool:
        if self._pool.held:
            return False
        return self._stop_reason is not None or self._queue.is_empty()

    # Taking in what workers say.

    def _take_in(self) -> None:
        """Handle all that has come in, waiting for the first message; sync once for all."""
        finished: list[tuple[WorkerHandle, bytes]] = []
        try:
            item = self._pool.inbox.get(timeout=_TICK_S)
            while True:
                self._handle(*item, finished)
                item = self._pool.inbox.get_nowait()
        except queue.Empty:
            pass
        self._start.run_dir.check_is_there()
        if (words := self._start.run_dir.what_vanished()) is not None:
            self._stop(words)
        if finished:
            self._start.records.sync()
            self._start.failures.sync()
        durable: dict[WorkerHandle, list[bytes]] = {}
        for worker, key in finished:
            self._start.inflight.finish(key)
            self._start.batches.do(BatchCollector.forget, key)
            durable.setdefault(worker, []).append(key)
        for worker, keys in durable.items():
            worker.durable(keys)

    def _handle(
        self,
        worker: WorkerHandle | None,
        message: bytes | None,
        finished: list[tuple[WorkerHandle, bytes]],
    ) -> None:
        if worker is None:
            self._on_signal()
        elif message is None:
            self._on_death(worker, finished)
        else:
            worker.heard_at = time.monotonic()
            header, payload = unpack(message)
            self._on_message(worker, header, payload, finished)

    def _on_message(
        self,
        worker: WorkerHandle,
        header: dict[str, Any],
        payload: bytes,
        finished: list[tuple[WorkerHandle, bytes]],
    ) -> None:
        match header["type"]:
            case "ready":
                worker.ready = True
                self._start.keys.attach(worker)
                self._failed_starts = 0
            case "alive":
                self._progress.add(header["counters"])
                self.limits.on_busy(header["busy"])
                proven = self._setup.proven | set(header["proven"])
                self._setup = replace(self._setup, proven=proven)
            case "finished":
                key = bytes.fromhex(header["key"])
                self._release(worker, key)
                if header["failure"]:
                    self._start.failures.append(Failure(**header["failure"]))
                self._start.records.append(payload, header["fields"])
                failed = header["failure"] and header["failure"]["error_class"]
                self._progress.task_ended(failure=failed, passed=header["fields"][PASSED])
                finished.append((worker, key))
            case "failed":
                failure = Failure(**header["failure"])
                self._release(worker, bytes.fromhex(header["key"]))
                self._start.failures.append(failure)
                self._failed_now.add(bytes.fromhex(header["key"]))
                self._progress.task_ended(failure=failure.error_class)
                self._say_failed(failure)
            case "released":
                self._release(worker, bytes.fromhex(header["key"]))
            case "ask":
                answer, most = partial(_answer, worker), header["most"]
                self._start.batches.do(
                    BatchCollector.ask, header["id"], header["model"], payload, answer, most
                )
            case "load":
                self.limits.on_load(worker, header["endpoint"], header["load"])
                if header["load"]["replies"]:
                    self._outages.on_replies(url_of(header["endpoint"]))
            case "refused":
                self.limits.on_refusal(
                    header["endpoint"], header["retry_after_s"], header["sent_at"]
                )
            case "key_rejected":
                self._start.keys.on_rejected(header["command"], header["number"])
            case "purse":
                self.budget.on_worker_budget(worker, header["told"])
            case "outage":
                self._outages.note(header["url"], header["words"], header["left_s"])
            case "say":
                self._progress.say(header["message"])
            case "halt":
                self._stop(header["message"])

    def _say_failed(self, failure: Failure) -> None:
        """Show the first failures each: a run may have thousands, and failures.jsonl has all."""
        if len(self._failed_now) <= _FAILURES_SHOWN:
            self._progress.say(
                f"{failure.id}: attempt {failure.attempt} failed ({failure.error_class}): "
                f"{failure.message.strip().splitlines()[-1]}"
            )
        if len(self._failed_now) == _FAILURES_SHOWN:
            self._progress.say(f"further failures: {self._start.run_dir.path / 'failures.jsonl'}")

    def _release(self, worker: WorkerHandle, key: bytes) -> None:
        worker.held.pop(key, None)
        worker.isolated = False
        self._start.batches.do(BatchCollector.leave, key)

    def _keep_budget(self) -> None:
        self.budget.grant_shares(self._pool.workers)
        if self._stop_reason is None and (words := self.budget.used_up(self._pool.workers)):
            self.is_out_of_budget = True
            self._stop(words)

    def _keep_batches(self) -> None:
        while not self._start.batches.news.empty():
            self._progress.say(self._start.batches.news.get())
        if self._start.batches.problem is not None:
            self._stop(self._start.batches.problem)
        held = self._pool.held if self._pool.is_ready else None
        is_tail = self._progress.ended_share >= self._start.config.batch_live_share
        self._start.batches.do(BatchCollector.tick, held, is_tail=is_tail)

    # Workers: starting, watching, replacing.

    def _on_death(self, worker: WorkerHandle, finished: list[tuple[WorkerHandle, bytes]]) -> None:
        if not self._pool.reap(worker):
            return
        why = f": {worker.last_words}" if worker.last_words else ""
        log.warning("%s died holding %d tasks%s", worker.name, len(worker.held), why)
        for key in worker.held:
            self._start.batches.do(BatchCollector.leave, key)
        if self._stop_reason is not None:
            return
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                msg = (
                    f"workers die before they are ready{why}; "
                    f"{self._start.run_dir.path / 'run.log'} may say more"
                )
                raise EnvironmentStop(msg)
        if worker.held:
            self._progress.say(f"{worker.name} died; its {len(worker.held)} tasks go on in another")
            self._take_over(worker)
        self._pool.start(self._setup)

    def _take_over(self, worker: WorkerHandle) -> None:
        """Assign the tasks of a dead worker again, or fail the one that it held alone."""
        # What it finished must be durable before its journals are looked through.
        self._start.records.sync()
        self._start.inflight.add_worker(
            worker.number, wanted=lambda key: key in worker.held or key in self._failed_now
        )
        if damaged := self._start.inflight.damaged:
            self._progress.say(
                f"{len(damaged)} damaged lines of its journals were set aside in "
                f"{self._start.run_dir.quarantine}: {listed_in_words(damaged)}; what they "
                "told is asked again"
            )
            damaged.clear()
        for key, (task, attempt) in worker.held.items():
            failure = Failure(
                task.id,
                task.input_digest,
                attempt,
                WORKER_DIED,
                "the worker process died while this task was in flight",
            )
            self._start.failures.append(failure)
            if worker.isolated:
                self._fail_poison_task(key, task, failure)
            else:
                self._queue.put_back(task)
        self._start.failures.sync()

    def _fail_poison_task(self, key: bytes, task: Task, failure: Failure) -> None:
        row = self._start.config.row_rules(self._setup.api).read(task.columns)
        record = make_record(
            task,
            row.trajectory(self._start.inflight.events(key)),
            end=Finish("failed"),
            spec=row.spec,
            setup=setup_of_task(self._start.setups, self._start.config, task),
            failure=failure,
            attempt=failure.attempt,
            provenance=self._setup.provenance,
        )
        self._start.records.append(dump_record(record), index_fields(record))
        self._start.records.sync()
        self._start.inflight.finish(key)
        self._start.batches.do(BatchCollector.forget, key)
        self._progress.task_ended(failure=failure.error_class)

    def _look_after_workers(self) -> None:
        self._pool.kill_silent()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._pool.kill()

    # Dealing.

    def _assign(self) -> None:
        """Give tasks to the workers with the most room, `batch_size` at a time at most."""
        if self._stop_reason is not None:
            return
        assignments: dict[WorkerHandle, list[Assignment]] = {}
        while worker := self._pool.with_room(self._progress.left):
            try:
                if (task := self._queue.next()) is None:
                    break
                deal = self._assignment_of(worker, task)
            except (DatasetChanged, StorageError) as error:
                self.is_dataset_changed = isinstance(error, DatasetChanged)
                self._stop(str(error))
                break
            assignments.setdefault(worker, []).append(deal)
        for worker in self._pool.idle():
            if suspect := self._queue.next_suspect():
                worker.isolated = True
                assignments[worker] = [self._assignment_of(worker, suspect)]
        for worker, deals in assignments.items():
            for first in range(0, len(deals), self._start.config.batch_size):
                batch = deals[first : first + self._start.config.batch_size]
                worker.send(pack("tasks", deals=batch))

    def _assignment_of(self, worker: WorkerHandle, task: Task) -> Assignment:
        """Note who has a task, and give what it is to be told. Raises `StorageError`."""
        attempt = self._start.failures.attempts[task.key] + 1
        assignment = Assignment(
            task=task._asdict(),
            attempt=attempt,
            number=self._start.inflight.next_assignment(task.key),
            events=self._start.inflight.events(task.key),
            place=self._start.inflight.workspace_place(task.key),
            # Once: a worker that dies with it may have had the answer, and booked it.
            held=self._start.held.pop(task.key, {}),
        )
        worker.held[task.key] = (task, attempt)
        return assignment

    # Stopping.

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1 and self._stop_reason is not None:
            self._progress.say("already stopping; interrupt again to stop at once")
        elif self._signals == 1 and self._outages.are_all():
            self._progress.say("stopping: no call has succeeded, so there is nothing to wait for")
            self._stop("", grace_s=0.0)
        elif self._signals == 1:
            self._progress.say(
                f"stopping: running turns get {self._start.config.grace_s:g} s to finish; "
                "interrupt again to stop at once (nothing that was finished is lost)"
            )
            self._stop("")
        else:
            self._pool.kill()

    def _stop(self, reason: str, *, grace_s: float | None = None) -> None:
        """Stop the run; turns get `grace_s` to finish, by default what the user says."""
        grace_s = self._start.config.grace_s if grace_s is None else grace_s
        if self._stop_reason is not None:
            self._stop_reason = self._stop_reason or reason
            return
        self._stop_reason = reason
        self._kill_at = time.monotonic() + grace_s + KILL_AFTER_GRACE_S
        self._start.batches.do(BatchCollector.stop)
        self._pool.tell(pack("stop", grace_s=grace_s))

    def _shut_down_workers(self) -> None:
        """Let the workers go, and hear what they say last of limits and money."""
        is_done = self._stop_reason is None and not self._failed_now
        for leaver, message in self._pool.shut_down(is_done=is_done):
            header = unpack(message)[0]
            if header["type"] == "load":
                self.limits.on_load(leaver, header["endpoint"], header["load"])
            elif header["type"] == "purse":
                self.budget.on_worker_budget(leaver, header["told"])


def _answer(worker: WorkerHandle, id: str, how: str, reply: bytes) -> None:
    worker.send(pack("answer", reply, id=id, how=how))
