"""Write the turn journal: events are on disk before they are used.

A line is in the page cache when `append` returns, so a killed process loses nothing. A thread
syncs it about 20 ms later at most; a power loss can take that much.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Protocol

from agent.messages.message import Event
from batch_trajectories.basics import exact_json
from batch_trajectories.runs.store.checksum import with_checksum
from batch_trajectories.runs.store.files import (
    AppendFile,
    StorageError,
    make_directory,
    storage_error,
)
from batch_trajectories.runs.store.tasks import task_key

_SYNC_EVERY_S = 0.02
_SEGMENT_BYTES = 16 << 20


class Journal(Protocol):
    """Where a worker writes the events of its tasks."""

    def append(
        self, task_id: str, input_digest: str, event: Event, *, assignment: int, position: int
    ) -> None:
        """Append one event.

        `assignment` counts how often the task was assigned, `position` the events before this
        one. Together they order events of the task in the segments of several workers.
        """
        ...

    @property
    def kept(self) -> Callable[[bytes], Awaitable[None]] | None:
        """Waits until the replies of the task with a key survive a process kill; None if they do
        once `append` has returned."""
        ...

    def flush(self) -> None:
        """Pass on all events so far, before any later message."""
        ...

    def finish(self, key: bytes) -> None:
        """Forget a task whose record is durable."""
        ...

    def close(self) -> None:
        """Finish: no event follows."""
        ...


class JournalWriter:
    """The segments of one worker. Any thread may append.

    The first line of a segment has the key `boot`, the start of the machine that it was written
    in: the segment has an event of each call that begins (see `BeganEvent`). Only a loss of power
    can take such an event while the call has run.
    """

    def __init__(
        self,
        inflight: Path,
        worker: int,
        *,
        on_storage_error: Callable[[StorageError], None],
        sync_every_s: float = _SYNC_EVERY_S,
    ) -> None:
        """`sync_every_s` is the time that a power loss can take."""
        self._inflight = inflight
        self._worker = worker
        self._on_storage_error = on_storage_error
        self._sync_every_s = sync_every_s
        self._key_of = lru_cache(maxsize=4096)(task_key)
        self._next_segment = 0
        self._open_tasks: dict[AppendFile, set[bytes]] = {}
        self._segment = self._new_segment()
        self._full: list[AppendFile] = []
        """Full segments that are not synced yet."""
        self._done: list[AppendFile] = []
        """Removed segments, to be closed by the thread that may be syncing them."""
        self._dirty = threading.Event()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._syncer = threading.Thread(target=self._sync_forever, name="journal-sync", daemon=True)
        self._syncer.start()

    def append(
        self, task_id: str, input_digest: str, event: Event, *, assignment: int, position: int
    ) -> None:
        """Append an event; once this returns, it survives a kill. Raises `StorageError`."""
        key = self._key_of(task_id, input_digest)
        with self._lock:
            segment = self._ready_segment()
            segment.append(
                journal_line(
                    task_id,
                    input_digest,
                    event,
                    assignment=assignment,
                    position=position,
                    boot="" if segment.size else boot_id(),
                )
            )
            self._open_tasks[segment].add(key)
        self._wake_syncer()

    def append_lines(self, keys: Iterable[bytes], lines: bytes) -> None:
        """Append lines made by `journal_line` for the tasks with these keys, like `append`."""
        with self._lock:
            segment = self._ready_segment()
            segment.append(lines)
            self._open_tasks[segment].update(keys)
        self._wake_syncer()

    def _wake_syncer(self) -> None:
        # It clears this before it syncs, so where it is set, the next sync has these lines too.
        if not self._dirty.is_set():
            self._dirty.set()

    def _ready_segment(self) -> AppendFile:
        """The segment for the next lines; the caller holds the lock."""
        if self._segment.was_removed():
            self._put_back()
        if self._segment.size >= _SEGMENT_BYTES:
            following = self._new_segment()
            self._full.append(self._segment)
            self._segment = following
        return self._segment

    @property
    def kept(self) -> None:
        """See `Journal`: `append` has written them."""
        return None

    def flush(self) -> None:
        """See `Journal`: nothing is buffered."""

    def finish(self, key: bytes) -> None:
        """Forget a task whose record is durable; delete segments without unfinished tasks."""
        with self._lock:
            for segment, tasks in list(self._open_tasks.items()):
                tasks.discard(key)
                if not tasks and segment != self._segment:
                    segment.path.unlink(missing_ok=True)
                    del self._open_tasks[segment]
                    self._done.append(segment)

    def close(self) -> None:
        """Sync the rest; delete the last segment if it has no unfinished task."""
        self._stopping.set()
        self._dirty.set()
        self._syncer.join()
        self._sync_once()
        try:
            if any(tasks and segment.was_removed() for segment, tasks in self._open_tasks.items()):
                self._put_back()
        except StorageError as error:
            self._on_storage_error(error)
        for segment, tasks in self._open_tasks.items():
            segment.close()
            if not tasks:
                segment.path.unlink(missing_ok=True)

    def _put_back(self) -> None:
        """Restore removed segments, and stop the run.

        Raises `StorageError` if that fails, for example because the whole run was removed.
        """
        removed = [segment for segment in self._open_tasks if segment.was_removed()]
        try:
            make_directory(self._inflight)
        except OSError as error:
            raise storage_error(self._inflight, error) from error
        for segment in removed:
            segment.put_back()
        msg = (
            f"{removed[0].path}: it was removed or replaced while the run wrote to it. Its content "
            "was restored; run the same command again to continue."
        )
        self._on_storage_error(StorageError(msg))

    def _new_segment(self) -> AppendFile:
        path = self._inflight / f"worker-{self._worker}-{self._next_segment}.jsonl"
        segment = AppendFile(path)
        self._next_segment += 1
        self._open_tasks[segment] = set()
        return segment

    def _sync_forever(self) -> None:
        """Group commit: one sync covers all events since the last."""
        while not self._stopping.is_set():
            self._dirty.wait()
            self._stopping.wait(self._sync_every_s)
            self._dirty.clear()
            if not self._sync_once():
                return

    def _sync_once(self) -> bool:
        with self._lock:
            full, self._full = self._full, []
            done, self._done = self._done, []
            segment = self._segment
        try:
            for retired in full:
                retired.sync()
            segment.sync()
            for removed in done:
                removed.close()
        except StorageError as error:
            self._on_storage_error(error)
            return False
        return True


def journal_line(
    task_id: str,
    input_digest: str,
    event: Event,
    *,
    assignment: int,
    position: int,
    place: str = "",
    boot: str = "",
) -> bytes:
    """One line of a segment; see `Journal.append`.

    `place` is where the task's workspace is, `boot` is in a first line (see `JournalWriter`).
    """
    line = {
        "task": task_id,
        "input_digest": input_digest,
        "deal": assignment,
        "position": position,
        "event": event,
    }
    if place:
        line["place"] = place
    if boot:
        line["boot"] = boot
    return with_checksum(exact_json.dumps(line))


@cache
def boot_id() -> str:
    """The id of the machine's current boot; "" where it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
