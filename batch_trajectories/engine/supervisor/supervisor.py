"""The supervisor: assigns tasks to workers and writes the records of finished tasks.

It knows which tasks each worker has. A worker that dies or falls silent is replaced, and its tasks
are assigned again from the end of their journals, in the order of `TaskQueue`.

A finished task is acknowledged to its worker only after its record is durable; the records of
20 ms share one sync. The worker gets its next task without waiting for that.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from msgspec.structs import replace

from agent.loop.rules import Finish
from agent.models.model import endpoint_url
from batch_trajectories.basics.errors import DatasetChanged, EnvironmentStop
from batch_trajectories.basics.text import plural
from batch_trajectories.config.models import setup_of_task
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import (
    AskIfAnswered,
    Assignment,
    AssignTasks,
    CallRefused,
    CollectCall,
    EndpointAnswered,
    FromWorker,
    HaltRun,
    Heartbeat,
    KeyRejected,
    Ready,
    ReportBudget,
    ReportLoad,
    ReportOutage,
    Say,
    StopWorking,
    TaskFailed,
    TaskFinished,
    TaskReleased,
    make_assignment,
)
from batch_trajectories.engine.record import as_stored, make_record
from batch_trajectories.engine.supervisor.parser_watch import ParserWatch
from batch_trajectories.engine.supervisor.refusals import Outages
from batch_trajectories.engine.supervisor.run_watch import RunWatch, WhyRejected
from batch_trajectories.engine.supervisor.worker_pool import KILL_AFTER_GRACE_S, Start, WorkerPool
from batch_trajectories.records.failures import WORKER_DIED, Failure
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.journal import next_worker_number
from batch_trajectories.records.names import CONTROL_FILE, LOG_FILE
from batch_trajectories.records.tasks import Task

if TYPE_CHECKING:
    from batch_trajectories.engine.supervisor.steering import Steering

log = logging.getLogger(__name__)

_TICK_S = 0.25
_SYNC_EVERY_S = 0.02
"""Seconds between syncs, as for journals: a power loss costs no more records than replies."""
_FAILED_STARTS = 3


class Supervisor:
    """Runs all tasks of one start. Use `run` once."""

    def __init__(self, start: Start, *, why_rejected: WhyRejected | None = None) -> None:
        """`why_rejected` says of a record why it gives no training row; None: no rows are made."""
        self._start = start
        self._setup = start.setup
        self._progress = start.progress
        self._queue = start.queue
        self._finished: list[tuple[WorkerHandle, bytes]] = []
        """Tasks whose records are not durable yet, with their workers."""
        self._shown: set[str] = set()
        self.limits, self.budget = start.limits, start.budget
        first_number = next_worker_number(start.run_dir.inflight)
        self._pool = WorkerPool(start.executor, start.config, first_number=first_number)
        self._failed_starts = 0
        self._outages = Outages(start.setup.proven, say=start.progress.say)
        config = start.config
        self._parsers = ParserWatch(
            start.progress.say, may_stop=config.agent is None, accepts=config.accept_rows
        )
        self._watch: RunWatch | None = None
        if not (config.audit or config.checked_run):
            self._watch = RunWatch(start.progress.say, config, why_rejected=why_rejected)
        self._batches = start.batches
        self._signals = 0
        self._stop_reason: str | None = None
        self.is_out_of_budget = False
        self.is_hopeless = False
        """A rule of `--stop_if` stopped the run."""
        self.is_dataset_changed = False
        self._kill_at: float | None = None
        self._steering: Steering | None = None
        self._due = 0.0
        """Monotonic time of the next periodic duties."""

    def interrupt(self) -> None:
        """Stop the run: in good order, or at once if called again. For signal handlers."""
        self._pool.inbox.put((None, None))

    def run(self) -> str | None:
        """Work until every task has ended or the run is stopped.

        Returns the reason why the environment stopped the run ("" after `interrupt`), or None.
        Raises `EnvironmentStop` if records cannot be written or no worker starts.
        """
        try:
            for _ in range(min(self._start.config.num_workers, self._progress.left)):
                self._pool.start(self._setup)
            while not self._is_over():
                self._handle_messages()
                if time.monotonic() >= self._due:
                    self._run_duties()
                self._assign()
            self._acknowledge_finished()
            self._shut_down_workers()
        finally:
            self._pool.kill()
        self._parsers.tell_sums()
        if self._stop_reason is None and (reason := self._queue.problem()):
            self.is_out_of_budget = True
            return f"the budget of a model is used up: {reason}"
        return self._stop_reason

    def _describe(self) -> str:
        parts = (self._outages, self._batches, self.limits, self.budget)
        texts = [part.describe() for part in parts if part is not None]
        if self._is_paused:
            texts.insert(0, "paused")
        if self._pool.workers and not any(worker.ready for worker in self._pool.workers):
            texts.insert(0, f"starting {plural(len(self._pool.workers), 'worker')}")
        return ", ".join(filter(None, texts))

    def _is_over(self) -> bool:
        if self._pool.assigned or (
            self._start.refusals.has_held_back and self._stop_reason is None
        ):
            return False
        return self._stop_reason is not None or self._queue.is_empty()

    # Messages of workers.

    def _handle_messages(self) -> None:
        """Handle all messages; wait for the first one until the next duties are due."""
        try:
            item = self._pool.inbox.get(timeout=max(0.0, self._due - time.monotonic()))
            while True:
                self._handle(*item)
                item = self._pool.inbox.get_nowait()
        except queue.Empty:
            pass

    def _run_duties(self) -> None:
        """Run the periodic duties.

        Called after every message except `TaskFinished`: finished tasks are acknowledged
        together, after one sync.
        """
        self._start.run_dir.check_exists_still()
        if (problem := self._start.run_dir.problem() or self._parsers.problem()) is not None:
            self._stop(problem)
        if self._watch is not None and self._watch.stop_reason and self._stop_reason is None:
            self.is_hopeless = True
            self._stop(self._watch.stop_reason)
        self._acknowledge_finished()
        self._watch_workers()
        self._steer()
        self.limits.on_conversations(self._pool.assigned)
        self.limits.share(self._pool.workers)
        self._grant_budget()
        self._decide_refusals()
        self._serve_batches()
        self._progress.show(self._pool.assigned, self._describe(), pause_s=self.limits.pause_s())
        self._due = time.monotonic() + _TICK_S

    def _acknowledge_finished(self) -> None:
        if not self._finished:
            return
        self._start.records.sync()
        self._start.failures.sync()
        durable: dict[WorkerHandle, list[bytes]] = {}
        for worker, key in self._finished:
            self._forget(key)
            durable.setdefault(worker, []).append(key)
        for worker, keys in durable.items():
            worker.durable(keys)
        self._finished.clear()

    def _forget(self, key: bytes) -> None:
        """Drop the journal and the batch calls of a task whose record is durable."""
        self._start.inflight.finish(key)
        if self._batches is not None:
            self._batches.forget(key)

    def _handle(self, worker: WorkerHandle | None, message: FromWorker | None) -> None:
        now = due = time.monotonic()
        if worker is None:
            self._on_signal()
        elif message is None:
            self._on_death(worker)
        else:
            worker.heard_at = now
            self._on_message(worker, message)
            if isinstance(message, TaskFinished):
                due += _SYNC_EVERY_S
        self._due = min(self._due, due)

    def _on_message(self, worker: WorkerHandle, message: FromWorker) -> None:
        if self._start.refusals.hold_back(worker, message):
            assert isinstance(message, TaskFinished | TaskFailed)
            self._release(worker, message.key)
            return
        match message:
            case Ready():
                worker.ready = True
                if self._start.keys is not None:
                    self._start.keys.attach(worker)
                self._failed_starts = 0
            case Heartbeat():
                self._progress.add(message.counters)
                self.limits.on_busy(message.busy)
                proven = self._setup.proven.union(message.proven)
                self._setup = replace(self._setup, proven=proven)
            case TaskFinished():
                self._on_finished(worker, message)
            case TaskFailed():
                self._on_failed(worker, message)
            case TaskReleased(key):
                self._release(worker, key)
            case CollectCall():
                assert self._batches is not None
                self._batches.ask(worker, message)
            case ReportLoad(endpoint, load):
                self.limits.on_load(worker, endpoint, load)
                if load.replies:
                    self._outages.on_replies(endpoint_url(endpoint))
                    self._start.refusals.on_reply()
            case CallRefused():
                self.limits.on_refusal(message.endpoint, message.retry_after_s, message.sent_at)
            case AskIfAnswered(url):
                is_answered = self._outages.has_answered(url) or url in self._setup.proven
                worker.send(EndpointAnswered(url=url, is_answered=is_answered))
            case KeyRejected(command, number):
                assert self._start.keys is not None
                self._start.keys.on_rejected(command, number)
            case ReportBudget():
                self.budget.on_worker_budget(worker, message)
            case ReportOutage():
                self._outages.note(message.url, message.message, message.left_s)
            case Say(text):
                if text not in self._shown:
                    self._shown.add(text)
                    self._progress.say(text)
            case HaltRun(reason):
                self._stop(reason)
            case _:
                raise TypeError(f"{worker.name} sent {type(message).__name__}")

    def _on_finished(self, worker: WorkerHandle, task: TaskFinished) -> None:
        """Append the record of a task; `_acknowledge_finished` syncs it."""
        self._release(worker, task.key)
        if task.failure is not None:
            self._start.failures.append(task.failure)
            self._progress.show_failure(task.failure)
        for image in task.images:
            self._start.run_dir.record_image(**image)
        self._start.records.append(task.payload, task.fields)
        if self._watch is not None:
            self._watch.on_finished(task.fields, task.payload)
        if not (self._start.config.audit or self._start.config.checked_run):
            self._parsers.on_ended(task.signs)
        self.limits.on_tool_calls(task.fields.tool_calls)
        passed = task.fields.passed
        opened = self._queue.queue_followers(task.key, passed, task.fields.cost_usd)
        failed = None if task.failure is None else task.failure.error_class
        self._progress.count_ended_task(failure=failed, passed=passed, opened=opened)
        self._finished.append((worker, task.key))

    def _on_failed(self, worker: WorkerHandle, task: TaskFailed) -> None:
        """Count a failed attempt of a task that has attempts left."""
        self._queue.note_failure(task.key, task.failure.error_class, task.model)
        if self._watch is not None:
            self._watch.on_failed_attempt(task.failure.error_class)
        self._release(worker, task.key)
        self._start.failures.append(task.failure)
        self._progress.count_ended_task(failure=task.failure.error_class)
        self._progress.show_failure(task.failure)

    def _release(self, worker: WorkerHandle, key: bytes) -> None:
        # A message that was held back is of a task that the worker gave up before.
        if worker.assigned.pop(key, None) is not None:
            worker.isolated = False
        if self._batches is not None:
            self._batches.leave(key)

    def _decide_refusals(self) -> None:
        refusals = self._start.refusals
        is_last = not self._pool.assigned and (refusals.has_enough or self._queue.is_empty())
        messages, reason = refusals.decide(is_last=is_last)
        if reason is not None and self._stop_reason is None:
            self._stop(reason, grace_s=0.0)  # nothing is in flight
        for refused in messages:
            self._on_message(refused.worker, refused.message)

    def _grant_budget(self) -> None:
        if (problem := self.budget.problem()) is not None:
            self._stop(problem)
        self.budget.grant_shares(self._pool.workers)
        if self._stop_reason is None and (reason := self.budget.used_up(self._pool.workers)):
            self.is_out_of_budget = True
            self._stop(reason)

    @property
    def _is_paused(self) -> bool:
        return self._steering is not None and self._steering.is_paused

    @property
    def was_stopped_by_person(self) -> bool:
        """Whether a person has stopped the run by `stop RUN`."""
        return self._steering is not None and self._steering.is_stopping

    def _steer(self) -> None:
        """Carry out the requests of people who steer the run."""
        if self._steering is None:
            if not (self._start.run_dir.path / CONTROL_FILE).exists():
                return
            from batch_trajectories.engine.supervisor.steering import Steering  # few are steered

            self._steering = Steering(
                self._start, self._pool, self.limits, self.budget, interrupt=self.interrupt
            )
        self._steering.carry_out_requests()

    def _serve_batches(self) -> None:
        if self._batches is None or self._is_paused:
            return
        if self._batches.problem is not None:
            self._stop(self._batches.problem)
        in_flight = self._pool.assigned if self._pool.is_ready else None
        ended_share = self._progress.ended_share
        self._batches.tick(in_flight, ended_share=ended_share, say=self._progress.say)

    # Workers: starting, watching, replacing.

    def _on_death(self, worker: WorkerHandle) -> None:
        if not self._pool.reap(worker):
            return
        why = f": {worker.last_words}" if worker.last_words else ""
        held = plural(len(worker.assigned), "task")
        follows = "another worker takes over" if self._stop_reason is None else "the run stops"
        log.warning("%s died with %s, and %s%s", worker.name, held, follows, why or ".")
        if self._batches is not None:
            for key in worker.assigned:
                self._batches.leave(key)
        if self._stop_reason is not None:
            return
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                log_file = self._start.run_dir.path / LOG_FILE
                raise EnvironmentStop(f"workers die before they are ready{why}; see {log_file}")
        if worker.assigned:
            tasks = plural(len(worker.assigned), "task")
            self._progress.say(f"{worker.name} died; another worker takes over {tasks}")
            self._take_over(worker)
        if self._stop_reason is None:
            self._pool.start(self._setup)

    def _take_over(self, worker: WorkerHandle) -> None:
        """Queue the tasks of a dead worker again; fail its task if it was isolated."""
        # Its finished records must be durable before its journals are read.
        self._start.records.sync()
        failures = [
            Failure(
                id=task.id,
                input_digest=task.input_digest,
                attempt=attempt,
                error_class=WORKER_DIED,
                message="the worker process died while this task was in flight",
            )
            for task, attempt in worker.assigned.values()
        ]
        for failure in failures:
            self._start.failures.append(failure)
        self._start.failures.sync()
        with self._stopping_if_unreadable():
            self._start.inflight.add_worker(
                worker.number,
                wanted=lambda key: key in worker.assigned or key in self._queue.failed_now,
            )
            if damaged := self._start.inflight.take_damaged():
                self._progress.say(damaged)
            for (key, (task, _)), failure in zip(worker.assigned.items(), failures, strict=True):
                if worker.isolated:
                    self._fail_poison_task(key, task, failure)
                else:
                    self._queue.put_back(task)

    def _fail_poison_task(self, key: bytes, task: Task, failure: Failure) -> None:
        row = self._start.config.row_rules(self._setup.api).read(task.columns)
        made = make_record(
            task,
            row.trajectory(self._start.inflight.events(key)),
            end=Finish("failed"),
            spec=row.spec,
            setup=setup_of_task(self._start.setups, self._start.config, task),
            failure=failure,
            attempt=failure.attempt,
            provenance=self._setup.provenance,
        )
        record = as_stored(made)
        self._start.records.add(record)
        self._start.records.sync()
        self._forget(key)
        opened = self._queue.queue_followers(key, None, record.cost_usd)
        self._progress.count_ended_task(failure=failure.error_class, opened=opened)

    def _watch_workers(self) -> None:
        self._pool.kill_silent()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._pool.kill()

    # Assigning tasks.

    def _assign(self) -> None:
        """Assign tasks to the workers with the most room, at most `batch_size` per message."""
        if self._stop_reason is not None or self._start.refusals.has_enough or self._is_paused:
            return
        assignments: dict[WorkerHandle, list[Assignment]] = {}
        with self._stopping_if_unreadable():
            while worker := self._pool.find_room(self._progress.left):
                if (task := self._queue.next()) is None:
                    break
                assignments.setdefault(worker, []).append(self._assign_task(worker, task))
            for worker in self._pool.idle():
                if suspect := self._queue.next_suspect():
                    assignments[worker] = [self._assign_task(worker, suspect)]
                    worker.isolated = True
        size = self._start.config.batch_size
        for worker, assigned in assignments.items():
            for first in range(0, len(assigned), size):
                worker.send(AssignTasks(assigned[first : first + size]))

    @contextmanager
    def _stopping_if_unreadable(self) -> Iterator[None]:
        """Stop the run in good order if a task's row or journal cannot be read any more."""
        # Not at once: the tasks in flight do not need these files, and were paid for.
        try:
            yield
        except (DatasetChanged, StorageError) as error:
            self.is_dataset_changed = isinstance(error, DatasetChanged)
            self._stop(str(error))

    def _assign_task(self, worker: WorkerHandle, task: Task) -> Assignment:
        """Assign a task to a worker; return its message. Raises `StorageError`."""
        attempt = self._start.failures.attempts[task.key] + 1
        # Only once: a worker that dies may have received the answer and settled its cost.
        reserved = self._start.reserved.pop(task.key, {})
        deaths = self._start.failures.deaths[task.key]
        inflight = self._start.inflight
        assignment = make_assignment(task, attempt, inflight, deaths=deaths, reserved=reserved)
        worker.assigned[task.key] = (task, attempt)
        return assignment

    # Stopping.

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals == 1 and self._stop_reason is not None:
            self._progress.say("already stopping; interrupt again to stop at once")
        elif self._signals == 1 and self._outages.are_all():
            self._progress.say("stopping at once: no call has succeeded yet")
            self._stop("", grace_s=0.0)
        elif self._signals == 1:
            self._progress.say(
                f"stopping: running turns get {self._start.config.grace_s:g} s to finish; "
                "interrupt again to stop at once (finished work is safe)"
            )
            self._stop("")
        else:
            self._pool.kill()

    def _stop(self, reason: str, *, grace_s: float | None = None) -> None:
        """Stop the run; running turns get `grace_s` seconds to finish (None: the config's)."""
        grace_s = self._start.config.grace_s if grace_s is None else grace_s
        if self._stop_reason is not None:
            self._stop_reason = self._stop_reason or reason
            return
        self._stop_reason = reason
        self._kill_at = time.monotonic() + grace_s + KILL_AFTER_GRACE_S
        if self._batches is not None:
            self._batches.stop()
        self._pool.broadcast(StopWorking(grace_s))

    def _shut_down_workers(self) -> None:
        """Shut the workers down; handle their last messages about limits and budget."""
        is_done = self._stop_reason is None and not self._queue.failed_now
        for worker, message in self._pool.shut_down(is_done=is_done):
            if isinstance(message, ReportLoad | ReportBudget):
                self._on_message(worker, message)
