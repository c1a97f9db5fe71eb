"""The turn journal: every model reply and tool result, on disk before it is used.

A worker appends the events of its tasks to segments `inflight/worker-<n>-<k>.jsonl`, one event
per line (`JournalWriter`). A segment is deleted once all its tasks have durable records. After a
crash, the events that are left are read here and assigned with their tasks, which continue from
there. The key `deal` of a line is the number of the task's assignment.
"""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Container, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeGuard

import orjson

from agent.messages.message import (
    OUT_OF_PLACE,
    Event,
    ForkedEvent,
    ReplyEvent,
    is_cost_only,
    reply_in,
)
from batch_trajectories.basics import exact_json
from batch_trajectories.basics.errors import RunDirError
from batch_trajectories.basics.text import first_few
from batch_trajectories.records.files import (
    AppendFile,
    DamagedLine,
    StorageError,
    add_checksum,
    make_directory,
    read_object,
    set_aside,
    storage_error,
)
from batch_trajectories.records.names import MIRROR_NOTE, QUARANTINE
from batch_trajectories.records.tasks import task_key

# Write the turn journal: events are on disk before they are used.
#
# A line is in the page cache when `append` returns, so a killed process loses nothing. A thread
# syncs it about 20 ms later at most; a power loss can take that much.

_SYNC_EVERY_S = 0.02
_SEGMENT_BYTES = 16 << 20


class Journal(Protocol):
    """The journal to which a worker writes the events of its tasks."""

    def append(
        self, task_id: str, input_digest: str, event: Event, *, assignment: int, position: int
    ) -> None:
        """Append one event.

        `assignment` counts how often the task was assigned, `position` the events before this
        one. Together they order events of the task in the segments of several workers.
        """
        ...

    @property
    def wait_persisted(self) -> Callable[[bytes], Awaitable[None]] | None:
        """A function that waits until the replies of the task with a key survive a process kill.

        None if they survive as soon as `append` returns.
        """
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

    The first line of a segment has the key `boot`, the id of the machine's boot. It promises that
    the segment has an event for each call that began (see `BeganEvent`): only a power loss, which
    ends the boot, can take such an event.
    """

    def __init__(
        self,
        inflight: Path,
        worker: int,
        *,
        on_storage_error: Callable[[StorageError], None],
        sync_every_s: float = _SYNC_EVERY_S,
    ) -> None:
        """`sync_every_s` is how many seconds of work a power loss can take."""
        self._inflight = inflight
        self._worker = worker
        self._on_storage_error = on_storage_error
        self._sync_every_s = sync_every_s
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
        key = task_key(task_id, input_digest)
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
    def wait_persisted(self) -> None:
        """Do nothing: replies survive as soon as `append` returns."""
        return None

    def flush(self) -> None:
        """Do nothing: no event is buffered."""

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

    `place` names the storage of the task's workspace. `boot` is only in the first line of a
    segment (see `JournalWriter`).
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
    return add_checksum(exact_json.dumps(line))


@cache
def boot_id() -> str:
    """The id of the machine's current boot; "" if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


_REPLY = b'"kind":"reply"'
_COST = re.compile(rb'"cost_usd":(\d[0-9.eE+-]*)')

_SEGMENT_NAME = re.compile(r"worker-(\d+)-(\d+)\.jsonl")


class JournalPosition(NamedTuple):
    """One journaled event: its order, then its place on disk."""

    assignment: int
    position: int
    segment: Path
    offset: int
    length: int


class Inflight:
    """The events in the segments of workers that have died, by task."""

    def __init__(
        self, inflight: Path, *, read_only: bool = False, damaged: Iterable[str] = ()
    ) -> None:
        """Read nothing yet. With `read_only` nothing is deleted, and segments may vanish meanwhile.

        `damaged` are lines that were set aside before, as `worker-0-0.jsonl:7`.
        """
        self._inflight = inflight
        self._read_only = read_only
        self._positions: dict[bytes, list[JournalPosition]] = {}
        self._open_tasks: dict[Path, set[bytes]] = {}
        self._fetched = _fetched_segments(inflight.parent)
        self._of_this_boot: set[Path] = set()
        """Segments that were written since the machine was started; see `JournalWriter`."""
        self._with_damage = {name.partition(":")[0] for name in damaged if name[-1].isdigit()}
        """Names of segments that lost a complete line."""
        self._quarantine = inflight.parent / QUARANTINE
        self.damaged: list[str] = []
        """Unreadable lines that were found, as `worker-0-0.jsonl:7`."""
        self.paid_usd = 0.0
        """Dollars of the replies that were read, as far as known."""

    def read(self, *, settled: Container[bytes]) -> None:
        """Read all segments, at the start of a run, except for tasks that need no more work."""
        for segment in sorted(segments(self._inflight)):
            self._add(segment, wanted=lambda key: key not in settled)

    def add_worker(self, number: int, *, wanted: Callable[[bytes], bool]) -> None:
        """Read the segments of a worker that died, for the `wanted` tasks."""
        for segment in sorted(segments(self._inflight)):
            if _worker_number(segment) == number:
                self._add(segment, wanted=wanted)

    def add_living(self, wanted: Container[bytes]) -> None:
        """Read the events of `wanted` tasks, which nobody works on, from all segments.

        Living workers still write to some of these segments, so none is deleted.
        """
        living = Inflight(self._inflight, read_only=True)
        for segment in sorted(segments(self._inflight)):
            living._add(segment, wanted=lambda key: key in wanted)
        self._positions |= living._positions
        self._of_this_boot |= living._of_this_boot

    def _add(self, segment: Path, *, wanted: Callable[[bytes], bool]) -> None:
        """Add the places of the events of wanted tasks; delete a segment without any.

        A torn last line was never used and is skipped. Any other unreadable line is copied to the
        quarantine (`set_aside_damaged` has removed those that were there at the start).
        """
        tasks = set()
        offset = 0
        boot = boot_id()
        try:
            content = segment.read_bytes()
        except FileNotFoundError:
            if self._read_only:
                return  # the record of its last task was just written
            raise
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            entry = _parse_line(line)
            key = None if entry is None else task_key(entry["task"], entry["input_digest"])
            is_first = number == 1 and f"inflight/{segment.name}" not in self._fetched
            if is_first and entry is not None and boot and entry.get("boot") == boot:
                self._of_this_boot.add(segment)
            if entry is not None and key is not None and wanted(key):
                if _REPLY in line and (reply := reply_in(entry["event"])) is not None:
                    self.paid_usd += reply.get("cost_usd") or 0.0
                tasks.add(key)
                place = JournalPosition(
                    assignment=entry["deal"],
                    position=entry["position"],
                    segment=segment,
                    offset=offset,
                    length=len(line),
                )
                self._positions.setdefault(key, []).append(place)
            elif key is None and line.endswith(b"\n") and not self._read_only:
                set_aside(self._quarantine, f"{segment.name}.line{number}", line)
                self.damaged.append(f"{segment.name}:{number}")
                self._with_damage.add(segment.name)
            offset += len(line)
        if tasks:
            self._open_tasks[segment] = tasks
        elif not self._read_only:
            segment.unlink()

    def events(self, key: bytes) -> list[Event]:
        """The journaled events of one task, as far as each follows from those before it.

        An assignment continues from the events that the parent could use then, so later events of
        older assignments no longer count. Their replies were paid for, so they are added as
        discarded replies.
        """
        events: list[Event] = []
        unusable: list[Event] = []
        assignment = 0
        for place in sorted(self._positions.get(key, ())):
            if place.assignment != assignment:
                events, assignment = _continuable_events(events, unusable), place.assignment
                # Not empty if the parent was an older version, which used fewer events.
                unusable = events[place.position :]
            event = _read_line(place)["event"]
            if place.position > len(events):
                unusable.append(event)  # events before it were lost in a power failure
            else:
                events[place.position :] = [event]
        return _continuable_events(events, unusable)

    def take_damaged(self) -> str:
        """A message about the damaged lines found since the last call; "" if there are none."""
        if not self.damaged:
            return ""
        names, count = first_few(self.damaged), len(self.damaged)
        self.damaged.clear()
        return (
            f"{count} damaged lines of its journals were set aside in {self._quarantine}: "
            f"{names}; these calls are made again"
        )

    def workspace_id(self, key: bytes) -> str:
        """The storage that holds the task's workspace; "" for the run directory."""
        last = max(self._positions.get(key, ()), default=None)
        return "" if last is None else str(_read_line(last).get("place", ""))

    def has_start_events(self, key: bytes) -> bool:
        """Whether the events of a task include a start event for each call that began.

        If not, any call may have begun. Start events may be missing after a power loss, if a line
        was damaged, in journals of earlier versions or of workers on other machines, and in
        journals from a mirror.
        """
        segments = {place.segment for place in self._positions.get(key, ())}
        names = {segment.name for segment in segments}
        return segments <= self._of_this_boot and not names & self._with_damage

    def task_id(self, key: bytes) -> str:
        """The id of a task that has journaled events."""
        return str(_read_line(self._positions[key][0])["task"])

    def tasks(self) -> list[bytes]:
        """The tasks that have journaled events."""
        return list(self._positions)

    def next_assignment(self, key: bytes) -> int:
        """The number of the next assignment of a task, above all in its journal."""
        return max((place.assignment for place in self._positions.get(key, ())), default=0) + 1

    def finish(self, key: bytes) -> None:
        """Forget a task whose record is durable; delete segments without unfinished tasks."""
        if self._positions.pop(key, None) is None:
            return
        for segment, tasks in list(self._open_tasks.items()):
            tasks.discard(key)
            if not tasks:
                segment.unlink(missing_ok=True)
                del self._open_tasks[segment]


_NEW_NOTE = "restore it, or remove it and start with another --mirror"


def read_note(path: Path) -> dict[str, Any] | None:
    """The note about the mirror in a run directory; None if it has no mirror.

    Raises `RunDirError`.
    """
    try:
        note = orjson.loads((path / MIRROR_NOTE).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except orjson.JSONDecodeError as error:
        raise RunDirError(f"{path / MIRROR_NOTE}: damaged: {error}; {_NEW_NOTE}") from None
    if not isinstance(note, dict) or not {"url", "number", "files"} <= note.keys():
        raise RunDirError(f"{path / MIRROR_NOTE}: damaged: not what a mirror writes; {_NEW_NOTE}")
    return note


def _fetched_segments(run_dir: Path) -> frozenset[str]:
    """The segments that came from a mirror, which may have lacked their last events."""
    return frozenset((read_note(run_dir) or {}).get("fetched", ()))


def _continuable_events(events: list[Event], unusable: list[Event]) -> list[Event]:
    """The events that a conversation can continue from; later paid replies are discarded ones."""
    usable = usable_prefix(events)
    lost = [*events[len(usable) :], *unusable]
    if not lost:
        return usable
    turn = 1 + max((event["turn"] for event in usable if _is_turn(event)), default=0)
    for event in lost:
        reply = reply_in(event)
        if reply is not None and "batch_item" not in reply:  # those can be fetched again for free
            usable.append({**reply, "turn": turn, "discarded": OUT_OF_PLACE})
    return usable


def _is_turn(event: Event) -> TypeGuard[ReplyEvent | ForkedEvent]:
    return event["kind"] == "forked" or (event["kind"] == "reply" and "discarded" not in event)


def _read_line(place: JournalPosition) -> dict[str, Any]:
    """One line of a segment. Raises `StorageError` if it is no longer there."""
    try:
        with place.segment.open("rb") as file:
            file.seek(place.offset)
            return read_object(file.read(place.length))
    except (FileNotFoundError, DamagedLine) as error:
        raise StorageError(
            f"{place.segment}: it was removed or changed while the run needed it. Put it back if "
            "you can; then run the same command again to continue."
        ) from error


def next_worker_number(inflight: Path) -> int:
    """A number that no segment on disk has."""
    return max(map(_worker_number, segments(inflight)), default=-1) + 1


@dataclass(slots=True)
class JournaledReplies:
    """The replies of one task in the journals."""

    positions: set[int] = field(default_factory=set)
    """The positions of replies in the conversation; a later assignment replaces earlier ones."""
    costs: list[float | None] = field(default_factory=list)
    """Dollars of each reply, including replaced ones; None if unknown."""

    @property
    def turns(self) -> int:
        """Number of replies that were not replaced."""
        return len(self.positions)


class Journaled(NamedTuple):
    """The replies in all journals."""

    tasks: dict[bytes, JournaledReplies]
    damaged: set[bytes]
    """Unreadable lines with a reply; their tasks are unknown."""


def read_journaled_replies(inflight: Path, *, settled: Container[bytes] = frozenset()) -> Journaled:
    """Read the replies in the journals, except those of `settled` tasks; writes nothing."""
    tasks: defaultdict[bytes, JournaledReplies] = defaultdict(JournaledReplies)
    damaged = set()
    for segment in sorted(segments(inflight)):
        try:
            content = segment.read_bytes()
        except FileNotFoundError:
            continue  # the record of its last task was just written
        for line in content.splitlines(keepends=True):
            if _REPLY not in line:
                continue
            if (entry := _parse_line(line)) is None:
                if line.endswith(b"\n"):  # a line that is torn at the end was never used
                    damaged.add(line)
                continue
            key = task_key(entry["task"], entry["input_digest"])
            if key not in settled and (reply := reply_in(entry["event"])) is not None:
                tasks[key].positions.add(entry["position"])
                tasks[key].costs.append(reply.get("cost_usd"))
    return Journaled(dict(tasks), damaged)


def damaged_replies(content: bytes) -> set[bytes]:
    """The unreadable lines of a segment that held a reply."""
    lines = content.splitlines(keepends=True)
    # A line that is torn at the end was never used.
    whole = (line for line in lines if _REPLY in line and line.endswith(b"\n"))
    return {line for line in whole if not is_event(line)}


def damaged_cost(line: bytes) -> float | None:
    """The cost of the reply in an unreadable line, None if that is unreadable too."""
    cost = _COST.search(line)
    return None if cost is None else float(cost[1])


def usable_prefix(events: list[Event]) -> list[Event]:
    """The events up to the first that does not follow from those before it.

    A power loss can drop lines in the middle; events after a gap cannot be used.
    """
    usable: list[Event] = []
    turn = 0
    results: set[int] = set()
    calls = exchanges = 0
    for event in events:
        if event["kind"] == "forked":
            turn = event["turn"]  # earlier turns are in the row
        elif event["kind"] == "restarted":
            turn, results, calls = 0, set(), 0
        elif is_cost_only(event):
            pass  # it does not depend on other events
        elif event["kind"] == "reply":
            if event["turn"] != turn + 1 or len(results) < calls:
                break
            if "discarded" in event:  # the model was called again for this turn
                usable.append(event)
                continue
            turn, results = event["turn"], set()
            calls = len(event["message"].get("tool_calls", ()))
        elif event["kind"] == "result":
            is_second = event["call"] in results  # the tool had asked the user a question
            if event["turn"] != turn or event["call"] >= calls or is_second != ("reply" in event):
                break
            results.add(event["call"])
        elif event["kind"] == "exchange":
            if event["number"] != exchanges:
                break
            exchanges += 1
        elif event["kind"] == "answered" and event["exchange"] >= exchanges:
            break
        usable.append(event)
    return usable


def segments(inflight: Path) -> list[Path]:
    """The journal files of a run; none if it has not begun. Reading a pipe would never end."""
    if not inflight.is_dir():
        return []
    matching = (path for path in inflight.iterdir() if _SEGMENT_NAME.fullmatch(path.name))
    return [path for path in matching if path.is_file()]


def _worker_number(segment: Path) -> int:
    return int(segment.name.split("-")[1])


def key_and_order(line: bytes) -> tuple[bytes | None, int, int]:
    """Task key, assignment and position of a journal line; the key is None if unreadable."""
    if (entry := _parse_line(line)) is None:
        return None, 0, 0
    return task_key(entry["task"], entry["input_digest"]), entry["deal"], entry["position"]


def is_event(line: bytes) -> bool:
    """Whether a line of a journal can be read."""
    return _parse_line(line) is not None


def _parse_line(line: bytes) -> dict[str, Any] | None:
    """A journal line, None if it is unreadable."""
    try:
        entry = read_object(line)
        entry["deal"], entry["position"] = int(entry["deal"]), int(entry["position"])
        task_key(entry["task"], entry["input_digest"])
        has_kind = isinstance(entry["event"]["kind"], str)
    except (KeyError, TypeError, ValueError):
        return None
    return entry if has_kind else None
