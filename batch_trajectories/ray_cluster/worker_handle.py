"""The supervisor's handle of a worker that is a Ray actor."""

from __future__ import annotations

import logging
import os
import pickle
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from msgspec.structs import replace

from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import (
    EventsStored,
    FromWorker,
    HaltRun,
    StoreEvents,
    WorkerSetup,
    WriteLog,
    encode,
)
from batch_trajectories.ray_cluster.actor import Welcome, shut_down
from batch_trajectories.records.files import StorageError
from batch_trajectories.records.journal import JournalWriter

log = logging.getLogger(__name__)

_SYNC_EVERY_S = 0.1
"""Seconds between syncs of a journal: the journals of all workers share the driver's disk."""


@dataclass(frozen=True, slots=True)
class ClusterStart:
    """The values that all workers of a start share."""

    key: bytes
    address: Any
    code: str
    inflight: Path
    is_remote: bool
    token: str
    lock: bytes
    environment: Mapping[str, str]
    log_fd: int


@dataclass(eq=False, kw_only=True)
class RayWorker(WorkerHandle):
    """A worker in a Ray actor.

    If the worker does not share the run directory, its journal is written here, by the thread that
    receives its events. That thread then acknowledges them.
    """

    setup: WorkerSetup
    run: ClusterStart
    actor: Any
    ended: Any
    """Ray's reference to the result of the actor's work."""
    is_gone: bool = False
    _connection: Connection | None = None
    _journal: JournalWriter | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Guards `is_gone` and the journal."""

    @property
    def is_waiting(self) -> bool:
        """See `WorkerHandle`."""
        return self._connection is None

    def attach(self, connection: Connection, hello: Mapping[str, Any]) -> None:
        """Connect the handle to the actor's process, which has introduced itself by `hello`."""
        if hello["code"] != self.run.code:
            message = (
                f"node {hello['host']} has another version of this program ({hello['code']}, here "
                f"{self.run.code}): install the same version there, or submit it with the job"
            )
            self.inbox.put((self, HaltRun(message)))
            connection.close()
            return
        setup = replace(self.setup, is_remote=self.run.is_remote)
        with self._lock:
            if self.is_gone or self._connection is not None:
                connection.close()
                return
            if self.run.is_remote:
                self._journal = JournalWriter(
                    self.run.inflight,
                    self.number,
                    on_storage_error=self._on_storage_error,
                    sync_every_s=_SYNC_EVERY_S,
                )
            self._connection = connection
        self.name = f"{self.name} on {hello['host']}"
        self.heard_at = time.monotonic()
        welcome = Welcome(
            setup=setup,
            run_token=self.run.token,
            lock=self.run.lock,
            environment=self.run.environment,
            cwd=Path.cwd(),
            sent_at=time.monotonic(),
        )
        try:
            connection.send_bytes(pickle.dumps(welcome))
        except OSError:
            # The thread that reads from the connection notices that, too.
            log.warning("%s disconnected at once, before it began to work.", self.name)
        self._move_bytes(connection)

    def end(self, why: str | None) -> None:
        """Note that the worker has ended, or counts as ended: later messages are ignored."""
        with self._lock:
            if self.is_gone:
                return
            self.is_gone = True
            self.last_words = why
            connection = self._connection
        if connection is None:
            self.inbox.put((self, None))
        else:
            shut_down(connection)

    def is_alive(self) -> bool:
        """See `WorkerHandle`."""
        return not self.is_gone

    def kill(self) -> None:
        """See `WorkerHandle`. A process that cannot be reached ends when its connection breaks."""
        self._end_actor()
        self.end(None)

    def reap(self) -> None:
        """See `WorkerHandle`."""
        self.end(None)
        self._outbox.put(None)
        self._end_actor()
        for thread in self._threads:
            thread.join()
        if self._connection is not None:
            self._connection.close()
        if self._journal is not None:
            self._journal.close()

    def durable(self, keys: Sequence[bytes]) -> None:
        """See `WorkerHandle`."""
        if self._journal is not None:
            with self._lock:
                for key in keys:
                    self._journal.finish(key)
        super().durable(keys)

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case StoreEvents():
                self._write_events(message)
            case WriteLog():
                with suppress(OSError):  # the run continues without its log
                    os.write(self.run.log_fd, message.payload)
            case _:
                super()._on_message(message)

    def _write_events(self, events: StoreEvents) -> None:
        assert self._journal is not None
        assert self._connection is not None
        try:
            with self._lock:
                self._journal.append_lines(events.keys, events.payload)
        except StorageError as error:
            self._on_storage_error(error)
            return
        # From this thread: a message through the sending thread costs twice as much.
        with suppress(OSError), self._sending:
            self._connection.send_bytes(encode(EventsStored(events.number)))

    def _on_storage_error(self, error: StorageError) -> None:
        self.inbox.put((self, HaltRun(str(error))))

    def _end_actor(self) -> None:
        try:
            ray.kill(self.actor, no_restart=True)
        except Exception as error:
            # Any class: the cluster itself may be shutting down.
            log.warning("Ray cannot end %s: %s", self.name, error)
