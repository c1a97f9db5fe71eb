"""A worker: one process, one event loop, many conversations in flight.

It journals every reply and tool result itself and sends finished records to the parent, which
writes them. It keeps a task's journal and workspace until the parent has acknowledged its record.
A worker never outlives its parent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from agent.models.model import ModelSettings
from batch_trajectories.basics.closing import close_all
from batch_trajectories.basics.errors import machine_failure
from batch_trajectories.basics.process import (
    STOPPING,
    allow_many_files,
    collect_garbage_rarely,
    die_with_parent,
    flush_log,
    log_through,
    log_to,
    use_pidfd_watcher,
)
from batch_trajectories.config.models import set_up_models, uses_key_command
from batch_trajectories.config.run_config import RunConfig
from batch_trajectories.config.toolsets import build_catalog
from batch_trajectories.engine.features import find_feature
from batch_trajectories.engine.messages import (
    Assignment,
    AssignTasks,
    CancelTask,
    EventsStored,
    Exit,
    FromWorker,
    HaltRun,
    Heartbeat,
    Ready,
    RecordsDurable,
    ReportOutage,
    Say,
    StopWorking,
    WorkerSetup,
    WriteLog,
    decode_to_worker,
    encode,
    no_counters,
)
from batch_trajectories.engine.worker.calls import Calls
from batch_trajectories.engine.worker.task_runner import TASK_ID, TaskRunner
from batch_trajectories.engine.worker.workspaces import Workspaces
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.journal import Journal, JournalWriter
from batch_trajectories.records.names import INFLIGHT, LOG_FILE
from batch_trajectories.records.tasks import Task
from toolsets.sandbox.factory import find_sandbox_class
from toolsets.sandbox.fork_servers import FORK_SERVERS

if TYPE_CHECKING:
    from agent.models.client.retrying import Retry
    from toolsets.browser.process import Browsers
    from toolsets.mcp.servers import McpServers

log = logging.getLogger(__name__)

_HEARTBEAT_S = 1.0

_REPORT_EVERY_S = 1.0

_SPARE_THREADS = 8
"""Threads of the event loop beside one for each conversation."""


def worker_main(connection: Connection, setup: WorkerSetup) -> None:
    """Entry point of a worker process."""
    die_with_parent(setup.parent_pid)
    run_worker(connection, setup)


def run_worker(connection: Connection, setup: WorkerSetup) -> bool:
    """Work in this process until the parent sends `Exit`; see `Worker.serve`.

    If the machine fails, reports the failure to the parent and exits.
    """
    # The parent handles Ctrl-C, a scheduler's SIGTERM and a closed terminal. Not SIG_IGN: commands
    # would inherit it, and `kill` would have no effect in them.
    for number in STOPPING:
        signal.signal(number, _ignore_signal)
    allow_many_files()
    collect_garbage_rarely()
    try:
        if not setup.is_remote:
            log_to(setup.run_dir / LOG_FILE, setup.config.log_level)
        use_pidfd_watcher()
        if setup.provenance.sandbox is not None:
            find_sandbox_class(setup.provenance.sandbox).prepare()
        worker = Worker(connection, setup)
        if setup.is_remote:
            log_through(lambda lines: worker.send(WriteLog(payload=lines)), setup.config.log_level)
        return asyncio.run(worker.serve())
    except StorageError as error:
        connection.send_bytes(encode(HaltRun(str(error))))
        sys.exit(1)
    except Exception as error:
        if (message := machine_failure(error)) is None:
            raise
        if log.hasHandlers():  # not where it is the log that cannot be opened
            log.exception("The machine failed, so the run stops; the traceback says what failed.")
        connection.send_bytes(encode(HaltRun(f"a worker cannot work: {message}")))
        sys.exit(1)


def _runner_class(config: RunConfig) -> type[TaskRunner]:
    if not config.audit:
        return TaskRunner
    runner: type[TaskRunner] = find_feature("audit" if config.checked_run is None else "recheck")
    return runner


def _ignore_signal(number: int, frame: FrameType | None) -> None:
    """Ignore a signal to the whole process group."""


class SentJournal(Journal, Protocol):
    """The journal of a worker on another machine, which the parent writes."""

    def on_kept(self, number: int) -> None:
        """The parent has written all messages up to this number."""
        ...


class Worker:
    """Runs all assigned tasks at the same time."""

    def __init__(self, connection: Connection, setup: WorkerSetup) -> None:
        self._connection = connection
        self._setup = setup
        self._config = setup.config
        self._servers: McpServers | None = None
        if self._config.mcp:
            from toolsets.mcp.servers import McpServers

            self._servers = McpServers(self._config.mcp)
        self._setups = set_up_models(self._config, build_catalog(self._config, self._servers))
        self._web = self._config.web_settings() if self._uses("web", "browser") else None
        self._browsers: Browsers | None = None
        if self._web is not None and self._uses("browser"):
            from toolsets.browser.process import Browsers

            self._browsers = Browsers(self._web.allow)
        self._running: dict[bytes, asyncio.Task[None]] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self.is_stopping = False
        self._reported_at: dict[str, float] = {}
        self._shown: set[str] = set()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._exit = asyncio.Event()
        self._cpu_s, self._asked_at = time.process_time(), time.monotonic()
        self._is_done = False

    async def serve(self) -> bool:
        """Run assigned tasks until the parent sends exit; return whether the run is done."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_lost_error)
        # Tools may wait in its threads while the time limit of their call runs.
        loop.set_default_executor(
            ThreadPoolExecutor(self._config.agents_per_worker + _SPARE_THREADS)
        )
        self._sender = sender = threading.Thread(
            target=self._send_forever, name="sender", daemon=True
        )
        sender.start()
        self._journal = self._open_journal()
        keys: ParentKeys | None = None
        if self._config.executor == "local" and uses_key_command(self._setups):
            from batch_trajectories.engine.worker.calls import ParentKeys

            keys = ParentKeys(self.send)
        self._calls = Calls(
            self._setup.limits,
            self._setup.budget,
            number=self._setup.number,
            workers=self._config.num_workers,
            proven=self._setup.proven,
            by_batch=self._config.batch_api,
            keys=keys,
            clock_offset_s=self._setup.clock_offset_s,
            send=self.send,
            on_retry=self._on_retry,
            say=self.say,
            conversations=-(-self._config.conversations // self._config.num_workers),
        )
        spaces = Workspaces(self._setup, web=self._web, browsers=self._browsers)
        self._runner = _runner_class(self._config)(
            self._setup,
            setups=self._setups,
            spaces=spaces,
            journal=self._journal,
            calls=self._calls,
            stops=self,
        )
        shared = [one for one in (self._servers, self._browsers, FORK_SERVERS) if one is not None]
        for one in shared:
            one.open()
        loop.add_reader(self._connection.fileno(), self._receive)
        self.send(Ready())
        while not self._exit.is_set():
            self.send(
                Heartbeat(
                    counters=self._runner.counters,
                    proven=sorted(self._calls.proven),
                    busy=self._busy(),
                )
            )
            self._runner.counters = no_counters()
            flush_log()
            try:
                async with asyncio.timeout(_HEARTBEAT_S):
                    await self._exit.wait()
            except TimeoutError:
                continue
        loop.remove_reader(self._connection.fileno())
        try:
            await close_all(
                self._await_removals,
                self._runner.close,
                spaces.close,
                self._calls.close,
                *(one.close for one in reversed(shared)),
            )
        finally:
            self._journal.close()
            flush_log()
            self._outbox.put(None)
            sender.join()
        return self._is_done

    def _uses(self, *toolsets: str) -> bool:
        """Whether a conversation or subagent can use one of these toolsets."""
        return any(setup.uses(name) for setup in self._setups.values() for name in toolsets)

    def _open_journal(self) -> SentJournal | JournalWriter:
        if self._setup.is_remote:
            open_sent: Callable[..., SentJournal] = find_feature("ray_journal")
            return open_sent(self.send, workspace_id=self._setup.workspace_id)
        return JournalWriter(
            self._setup.run_dir / INFLIGHT,
            self._setup.number,
            on_storage_error=lambda error: self.halt(str(error)),
        )

    def _busy(self) -> float:
        """The share of a core that this process has used since the last call."""
        cpu_s, self._cpu_s = self._cpu_s, time.process_time()
        asked_at, self._asked_at = self._asked_at, time.monotonic()
        return (self._cpu_s - cpu_s) / max(self._asked_at - asked_at, 0.001)

    def _receive(self) -> None:
        try:
            message = decode_to_worker(self._connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)  # the parent is gone, and another process may resume the run
        match message:
            case AssignTasks(assignments):
                for assignment in assignments:
                    self._start(assignment)
            case RecordsDurable(keys):
                for key in keys:
                    self._release(key)
            case StopWorking(grace_s):
                self._stop()
                asyncio.get_running_loop().call_later(grace_s, self._abandon)
            case CancelTask(key):
                if (running := self._running.get(key)) is not None:
                    self._runner.cancelled.add(key)
                    running.cancel()
            case EventsStored(number):
                assert not isinstance(self._journal, JournalWriter)
                self._journal.on_kept(number)
            case Exit(is_done):
                self._is_done = is_done
                self._exit.set()
            case _:
                self._calls.receive(message)

    def _start(self, assignment: Assignment) -> None:
        task = assignment.task
        self._running[task.key] = asyncio.create_task(self._run(task, assignment))

    async def _run(self, task: Task, assignment: Assignment) -> None:
        message = await self._runner.run(task, assignment)
        self._journal.flush()
        self._running.pop(task.key, None)
        self.send(message)

    def _release(self, key: bytes) -> None:
        """The task's record is durable: remove its other files."""
        context = self._runner.release(key)
        if context is not None:
            removal = asyncio.create_task(context.close(remove=True))
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)

    async def _await_removals(self) -> None:
        """Wait for the removals; one that failed is logged, and its files are left."""
        for failure in await asyncio.gather(*self._removals, return_exceptions=True):
            if isinstance(failure, BaseException):
                log.error(
                    "The files of a finished task were not removed; its record is safe.",
                    exc_info=failure,
                )

    def _abandon(self) -> None:
        """The grace period is over: cancel running turns; the next start repeats them."""
        for task in self._running.values():
            task.cancel()

    def _on_retry(self, settings: ModelSettings, retry: Retry) -> None:
        """Log every retry; report at most one per second to the parent, which shows outages.

        Rate limits of an endpoint that has answered are not an outage.
        """
        url = settings.base_url or ""
        if task_id := TASK_ID.get(""):
            log.info("Task %s at %s: %s", task_id, url, retry)
        else:
            log.info("At %s: %s", url, retry)
        now = time.monotonic()
        is_reported = now - self._reported_at.get(url, -_REPORT_EVERY_S) < _REPORT_EVERY_S
        if is_reported or (retry.kind == "rate_limited" and url in self._calls.proven):
            return
        self._reported_at[url] = now
        message = f"{retry.kind}: {retry.message}"
        self.send(ReportOutage(url=url, message=message, left_s=retry.left_s))

    def _on_lost_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """A callback failed; if the machine is the cause, stop the run."""
        error = context.get("exception")
        message = None if error is None else machine_failure(error)
        if message is None:
            loop.default_exception_handler(context)
            return
        log.error("The machine failed, so the run stops.", exc_info=error)
        self.halt(f"a worker cannot continue: {message}")
        self._outbox.put(None)
        self._sender.join()
        os._exit(1)

    def halt(self, message: str) -> None:
        """Ask the parent to stop the run; the next start continues its conversations."""
        self._stop()
        self.send(HaltRun(message))

    def say(self, message: str) -> None:
        """See `Stops`."""
        if message not in self._shown:
            self._shown.add(message)
            self.send(Say(message))

    def _stop(self) -> None:
        """Begin no more calls, and end agents that are commands."""
        self.is_stopping = True
        self._calls.stop()
        self._runner.stop_agents()

    def send(self, message: FromWorker) -> None:
        """Send a message to the parent, from any thread."""
        self._outbox.put(encode(message))

    def _send_forever(self) -> None:
        """Send in a thread: a full pipe must not block the event loop."""
        while (message := self._outbox.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                os._exit(1)
