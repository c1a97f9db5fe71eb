"""A worker as the supervisor sees it, wherever it runs: what it holds, when it was last heard."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Protocol

from runs.protocol.messages import pack
from runs.protocol.worker_setup import WorkerSetup
from runs.tasks import Task

Inbox = queue.SimpleQueue[tuple["WorkerHandle | None", bytes | None]]
"""What workers say, in order: (worker, message), (worker, None) once it is gone."""


@dataclass(eq=False)
class WorkerHandle(ABC):
    """One worker. Two threads move its bytes, so that a worker that is stopped in mid-message
    holds up nobody else."""

    number: int
    name: str
    inbox: Inbox
    ready: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    held: dict[bytes, tuple[Task, int]] = field(default_factory=dict)
    """The tasks that it was dealt and has not ended, by key, each with its attempt."""
    isolated: bool = False
    """It holds one suspect and is dealt nothing else."""
    last_words: str | None = None
    """Why it died, where somebody knows."""
    _outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    _threads: list[threading.Thread] = field(default_factory=list)
    _sending: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_waiting(self) -> bool:
        """Nobody can expect to hear of it yet: there is no place for it to run."""
        return False

    @abstractmethod
    def is_alive(self) -> bool:
        """Whether nothing is known of its death."""

    @abstractmethod
    def kill(self) -> None:
        """Have it end at once; that it is gone comes through the inbox."""

    @abstractmethod
    def reap(self) -> None:
        """Release what a dead worker leaves; its threads end by themselves once it is gone."""

    def send(self, message: bytes) -> None:
        """Hand over a message; never blocks."""
        self._outbox.put(message)

    def durable(self, keys: Sequence[bytes]) -> None:
        """Tell it that the records of these tasks are safe."""
        self.send(pack("durable", keys=[key.hex() for key in keys]))

    def _move_bytes(self, connection: Connection) -> None:
        """Start the threads."""
        for target in (self._listen, self._talk):
            thread = threading.Thread(target=target, args=(connection,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._heard(connection.recv_bytes())
        except (EOFError, OSError):
            self.inbox.put((self, None))

    def _heard(self, message: bytes) -> None:
        self.inbox.put((self, message))

    def _talk(self, connection: Connection) -> None:
        try:
            while (message := self._outbox.get()) is not None:
                with self._sending:
                    connection.send_bytes(message)
        except OSError:
            return  # its death is noticed by the listening thread


class Executor(Protocol):
    """Where workers run."""

    def start(self, setup: WorkerSetup, inbox: Inbox) -> WorkerHandle:
        """Start a worker for `setup`; what it says goes to `inbox`."""
        ...

    def close(self) -> None:
        """Release what all workers had in common; they have ended."""
        ...
