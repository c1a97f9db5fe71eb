"""The turn journal of a worker on another machine: the parent writes it.

Events go to the parent, which writes and acknowledges them. A reply is not used before that
(`kept`), so a paid model call is on the parent's disk. Tool results are sent with the next reply of
any task, or at most 20 ms later.

Until the parent has acknowledged a message, further events wait and are then sent together, so a
busy parent gets fewer and larger messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from agent.messages.message import Event, reply_in
from batch_trajectories.engine.messages import StoreEvents
from batch_trajectories.records.journal import journal_line
from batch_trajectories.records.tasks import task_key

_RESULTS_WAIT_S = 0.02


class RemoteJournal:
    """A `Journal` whose files the parent writes. Use it in the event loop's thread."""

    def __init__(self, send: Callable[[StoreEvents], None], *, workspace_id: str) -> None:
        self._send = send
        self._workspace_id = workspace_id
        self._lines: list[bytes] = []
        self._keys: set[bytes] = set()
        self._reply_numbers: dict[bytes, int] = {}
        """The number of the message with each task's last reply."""
        self._sent = 0
        self._kept = 0
        self._is_urgent = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def append(
        self, task_id: str, input_digest: str, event: Event, *, assignment: int, position: int
    ) -> None:
        """See `Journal`."""
        key = task_key(task_id, input_digest)
        self._lines.append(
            journal_line(
                task_id,
                input_digest,
                event,
                assignment=assignment,
                position=position,
                place=self._workspace_id,
            )
        )
        self._keys.add(key)
        if reply_in(event) is not None:
            self._reply_numbers[key] = self._sent + 1
            if not self._is_urgent:
                self._is_urgent = True
                asyncio.get_running_loop().call_soon(self._send_if_acknowledged)
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_RESULTS_WAIT_S, self.flush)

    async def wait_persisted(self, key: bytes) -> None:
        """See `Journal`."""
        number = self._reply_numbers.get(key, 0)
        if number > self._kept:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((number, answer))
            await answer

    def on_kept(self, number: int) -> None:
        """Note that the parent has written all messages up to this number."""
        self._kept = number
        waiting, self._waiting = self._waiting, []
        for wanted, answer in waiting:
            if wanted > number:
                self._waiting.append((wanted, answer))
            elif not answer.done():
                answer.set_result(None)
        if self._is_urgent:
            self.flush()

    def flush(self) -> None:
        """See `Journal`."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_urgent = False
        if self._lines:
            self._sent += 1
            self._send(
                StoreEvents(keys=list(self._keys), number=self._sent, payload=b"".join(self._lines))
            )
            self._lines, self._keys = [], set()

    def finish(self, key: bytes) -> None:
        """Forget a task; the parent has finished it in the journal already."""
        self._reply_numbers.pop(key, None)

    def close(self) -> None:
        """See `Journal`."""
        self.flush()

    def _send_if_acknowledged(self) -> None:
        if self._is_urgent and self._kept == self._sent:
            self.flush()
