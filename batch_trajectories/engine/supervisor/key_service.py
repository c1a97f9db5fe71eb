"""Runs the key commands of a run, and sends the keys to its workers through their pipes.

One run of a command serves all workers; a key is on no disk and in no command line. Workers on
other machines run the commands themselves: the connections to them are not encrypted.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from agent.models.client.key_command import CommandKey, KeyCommandError, configured_key
from batch_trajectories.basics.errors import EnvironmentStop
from batch_trajectories.config.models import Setups, called_models
from batch_trajectories.engine.executor import WorkerHandle
from batch_trajectories.engine.messages import SetKey

log = logging.getLogger(__name__)


class KeyService:
    """The keys of one start."""

    def __init__(self, setups: Setups) -> None:
        """Run each command once. Raises `EnvironmentStop` if one gives no key."""
        connections = {one.connection.command_id: one.connection for one in called_models(setups)}
        self._lock = threading.Lock()
        self._workers: list[WorkerHandle] = []
        self._commands = {
            id: _Command(id, configured_key(connection), self._broadcast)
            for id, connection in connections.items()
            if id
        }
        for command in self._commands.values():
            command.begin()

    def attach(self, worker: WorkerHandle) -> None:
        """Send a new worker all keys, now and whenever they change."""
        with self._lock:
            for command in self._commands.values():
                worker.send(command.message())
            self._workers.append(worker)

    def on_rejected(self, command: str, number: int) -> None:
        """Renew a rejected key, unless a later `number` is known; all workers get the new one."""
        self._commands[command].inbox.put(number)

    def close(self) -> None:
        """End the threads; a command that is running is not waited for."""
        for command in self._commands.values():
            command.inbox.put(None)

    def _broadcast(self, message: SetKey) -> None:
        with self._lock:
            for worker in self._workers:
                worker.send(message)


class _Command:
    """One command and its thread."""

    def __init__(self, id: str, key: CommandKey, broadcast: Callable[[SetKey], None]) -> None:
        self._id = id
        self._source = key
        self._broadcast = broadcast
        self._key, self._number, self._problem = "", 0, ""
        self.inbox: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        """Numbers of rejected keys; None ends the thread."""

    def begin(self) -> None:
        """Run the command for the first time, then keep its key fresh."""
        try:
            self._key, self._number = self._source.read(), 1
        except KeyCommandError as error:
            raise EnvironmentStop(f"{error}; no model call was made") from error
        threading.Thread(target=self._keep, name="key command", daemon=True).start()

    def message(self) -> SetKey:
        """The message that gives workers the key."""
        return SetKey(command=self._id, number=self._number, key=self._key, problem=self._problem)

    def _keep(self) -> None:
        while True:
            rejected = False
            try:
                number = self.inbox.get(timeout=self._source.due_in_s)
                if number is None:
                    return
                rejected = number == self._number
            except queue.Empty:
                pass
            self._problem = ""
            try:
                key = self._source.read(self._key if rejected else None)
            except KeyCommandError as error:
                log.warning("No new key, and it is asked for again: %s", error)
                self._problem = str(error)
            else:
                if key != self._key:
                    self._key, self._number = key, self._number + 1
                    log.info(
                        "The key command printed key number %d, which calls use from now on.",
                        self._number,
                    )
            self._broadcast(self.message())
