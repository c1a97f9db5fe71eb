"""The supervisor's handle of a worker, and the interface of executors."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

import msgspec

from batch_trajectories.engine.messages import (
    FromWorker,
    HaltRun,
    RecordsDurable,
    ToWorker,
    WorkerSetup,
    decode_from_worker,
    encode,
)
from batch_trajectories.records.tasks import Task

Inbox = queue.SimpleQueue[tuple["WorkerHandle | None", "FromWorker | None"]]
"""Messages of workers, in order: (worker, message), and (worker, None) when it has died."""


@dataclass(eq=False)
class WorkerHandle(ABC):
    """One worker. Two threads send and receive its messages, so a worker that is stopped in the
    middle of a message does not block others."""

    number: int
    name: str
    inbox: Inbox
    ready: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    assigned: dict[bytes, tuple[Task, int]] = field(default_factory=dict)
    """The worker's unfinished tasks by key, each with its attempt."""
    isolated: bool = False
    """The worker runs a suspect and gets no other task."""
    last_words: str | None = None
    """The reason why the worker died; None if unknown."""
    _outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_waiting(self) -> bool:
        """Whether the worker cannot run yet because the cluster has no room for it."""
        return False

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether the worker is not known to be dead."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the worker; the inbox reports its death."""

    @abstractmethod
    def reap(self) -> None:
        """Release the resources of a dead worker; its threads end by themselves."""

    def send(self, message: ToWorker) -> None:
        """Queue a message; never blocks."""
        self._outbox.put(encode(message))

    def durable(self, keys: Sequence[bytes]) -> None:
        """Acknowledge that the records of these tasks are durable."""
        self.send(RecordsDurable(list(keys)))

    def _move_bytes(self, connection: Connection) -> None:
        """Start the threads."""
        for target in (self._listen, self._talk):
            thread = threading.Thread(target=target, args=(connection,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._on_message(decode_from_worker(connection.recv_bytes()))
        except (EOFError, OSError):
            self.inbox.put((self, None))
        except msgspec.DecodeError as error:  # a bug: both ends are of the same version
            self.inbox.put((self, HaltRun(f"{self.name} sent an unreadable message: {error}")))

    def _on_message(self, message: FromWorker) -> None:
        self.inbox.put((self, message))

    def _talk(self, connection: Connection) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                with self._sending:
                    connection.send_bytes(message)
        except OSError:
            return  # the listening thread notices its death


class Executor(Protocol):
    """Starts workers."""

    def start(self, setup: WorkerSetup, inbox: Inbox) -> WorkerHandle:
        """Start a worker for `setup`; its messages go to `inbox`."""
        ...

    def close(self) -> None:
        """Release shared resources; all workers have ended."""
        ...
