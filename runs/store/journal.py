"""The turn journal: every model reply and tool result, on disk before it is used.

A worker appends its tasks' events to segments `inflight/worker-<n>-<k>.jsonl`, each line one
event with its task (`journal_writer`). A segment is deleted once every task in it has its durable
record. What is left after a crash is read back here and dealt out with the tasks, which then go on
where they were.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from agent.messages import OUT_OF_PLACE, Event, ForkedEvent, ReplyEvent, is_paid_alone
from runs.store.checksum import DamagedLine, read_object
from runs.store.files import StorageError, set_aside
from runs.tasks import task_key

_REPLY = b'"kind":"reply"'
_COST = re.compile(rb'"cost_usd":(\d[0-9.eE+-]*)')

_SEGMENT_NAME = re.compile(r"worker-(\d+)-(\d+)\.jsonl")


class JournalPosition(NamedTuple):
    """One journaled event: its order, then where it lies."""

    deal: int
    position: int
    segment: Path
    offset: int
    length: int


class Inflight:
    """What dead workers left in their segments, by task."""

    def __init__(self, inflight: Path, *, reads_only: bool = False) -> None:
        """With `reads_only` nothing is deleted or set aside, and segments may vanish meanwhile."""
        self._inflight = inflight
        self._reads_only = reads_only
        self._places: dict[bytes, list[JournalPosition]] = {}
        self._open_tasks: dict[Path, set[bytes]] = {}
        self._quarantine = inflight.parent / "quarantine"
        self.damaged: list[str] = []
        """Unreadable lines that were met, as `worker-0-0.jsonl:7`."""
        self.paid_usd = 0.0
        """Dollars of the replies that were read, as far as they are known."""

    def read(self, *, settled: Container[bytes]) -> None:
        """Read all segments, at the start of a run, but for tasks that need no more work."""
        for segment in sorted(segments(self._inflight)):
            self._add(segment, wanted=lambda key: key not in settled)

    def add_worker(self, number: int, *, wanted: Callable[[bytes], bool]) -> None:
        """Read the segments of a worker that died, for the tasks that are `wanted`."""
        for segment in sorted(segments(self._inflight)):
            if _worker_of(segment) == number:
                self._add(segment, wanted=wanted)

    def _add(self, segment: Path, *, wanted: Callable[[bytes], bool]) -> None:
        """Note where the events of wanted tasks lie; delete a segment without any.

        A torn last line was never used for anything and is passed over; a copy of any other
        unreadable line is set aside in the quarantine (`set_aside_damaged` has taken out those
        that a start finds).
        """
        tasks = set()
        offset = 0
        try:
            content = segment.read_bytes()
        except FileNotFoundError:
            if self._reads_only:
                return  # its last task has just got its record
            raise
        for number, line in enumerate(content.splitlines(keepends=True), start=1):
            entry = _parsed(line)
            key = None if entry is None else task_key(entry["task"], entry["input_digest"])
            if entry is not None and key is not None and wanted(key):
                deal, position = entry["deal"], entry["position"]
                if _REPLY in line and (reply := _reply_in(entry["event"])) is not None:
                    self.paid_usd += reply.get("cost_usd") or 0.0
                tasks.add(key)
                place = JournalPosition(deal, position, segment, offset, len(line))
                self._places.setdefault(key, []).append(place)
            elif key is None and line.endswith(b"\n") and not self._reads_only:
                set_aside(self._quarantine, f"{segment.name}.line{number}", line)
                self.damaged.append(f"{segment.name}:{number}")
            offset += len(line)
        if tasks:
            self._open_tasks[segment] = tasks
        elif not self._reads_only:
            segment.unlink()

    def events(self, key: bytes) -> list[Event]:
        """The journaled events of one task, as far as they follow from each other.

        A deal goes on from the events that its parent could use, so where it begins, what older
        deals left beyond that point no longer counts. Its replies were paid for all the same, so
        they follow as discarded ones, which the deal has from there on.
        """
        events: list[Event] = []
        beyond: list[Event] = []
        deal = 0
        for place in sorted(self._places.get(key, ())):
            if place.deal != deal:
                events, deal = _dealt(events, beyond), place.deal
                # More than its parent could use is there where it ran an older version.
                beyond = events[place.position :]
            event = _read(place)["event"]
            if place.position > len(events):
                beyond.append(event)  # it stands behind a hole that a power loss left
            else:
                events[place.position :] = [event]
        return _dealt(events, beyond)

    def workspace_place(self, key: bytes) -> str:
        """Where the workspace is that the task's last events were made in; "" for the run's own
        directory."""
        last = max(self._places.get(key, ()), default=None)
        return "" if last is None else str(_read(last).get("place", ""))

    def task_id(self, key: bytes) -> str:
        """The id of a task that has journaled events."""
        return str(_read(self._places[key][0])["task"])

    def tasks(self) -> list[bytes]:
        """The tasks that have journaled events."""
        return list(self._places)

    def next_deal(self, key: bytes) -> int:
        """The number of the next deal of a task, above all that its journal speaks of."""
        return max((place.deal for place in self._places.get(key, ())), default=0) + 1

    def finish(self, key: bytes) -> None:
        """Forget a task whose record is durable; delete segments that nobody needs any more."""
        if self._places.pop(key, None) is None:
            return
        for segment, tasks in list(self._open_tasks.items()):
            tasks.discard(key)
            if not tasks:
                segment.unlink(missing_ok=True)
                del self._open_tasks[segment]


def _dealt(events: list[Event], beyond: list[Event]) -> list[Event]:
    """What a deal is given of the events before it, and of those that stand behind a hole."""
    usable = usable_prefix(events)
    lost = [*events[len(usable) :], *beyond]
    if not lost:
        return usable
    turn = 1 + max((one["turn"] for one in usable if _is_turn(one)), default=0)
    for event in lost:
        reply = _reply_in(event)
        if reply is not None and "batch_item" not in reply:  # that can be had again for nothing
            usable.append({**reply, "turn": turn, "discarded": OUT_OF_PLACE})
    return usable


def _is_turn(event: Event) -> TypeGuard[ReplyEvent | ForkedEvent]:
    return event["kind"] == "forked" or (event["kind"] == "reply" and "discarded" not in event)


def _reply_in(event: Event) -> ReplyEvent | None:
    """The reply that an event is, in a conversation at whatever depth; None where it is none."""
    while event["kind"] == "sub":
        event = event["event"]
    return event if event["kind"] == "reply" else None


def _read(place: JournalPosition) -> dict[str, Any]:
    """One line of a segment. Raises `StorageError` where it is not there any more."""
    try:
        with place.segment.open("rb") as file:
            file.seek(place.offset)
            line = read_object(file.read(place.length))
    except (FileNotFoundError, DamagedLine) as error:
        msg = (
            f"{place.segment}: it was removed or changed while the run needed it. Put it back if "
            "you can; then run the same command again to go on."
        )
        raise StorageError(msg) from error
    return line


def next_worker_number(inflight: Path) -> int:
    """A number that no segment on disk carries."""
    return max(map(_worker_of, segments(inflight)), default=-1) + 1


@dataclass(slots=True)
class UnderWay:
    """What the journals hold of one task."""

    replies: set[int] = field(default_factory=set)
    """Where in the conversation they stand: a later deal may have replaced what stood there."""
    costs: list[float | None] = field(default_factory=list)
    """Dollars of each reply, those that were replaced included; None where that is unknown."""


class Journaled(NamedTuple):
    """What all journals hold."""

    tasks: dict[bytes, UnderWay]
    damaged: set[bytes]
    """Lines that held a reply and are unreadable; nobody can tell whose they are."""


def under_way(inflight: Path) -> Journaled:
    """The replies that are journaled, also those of tasks that have a record; writes nothing."""
    tasks: defaultdict[bytes, UnderWay] = defaultdict(UnderWay)
    damaged = set()
    for segment in sorted(segments(inflight)):
        try:
            content = segment.read_bytes()
        except FileNotFoundError:
            continue  # its last task has just got its record
        for line in content.splitlines(keepends=True):
            if _REPLY not in line:
                continue
            if (entry := _parsed(line)) is None:
                # One that is torn at the end was never used for anything, nor has it a price.
                damaged |= {line} if line.endswith(b"\n") else set()
            elif (reply := _reply_in(entry["event"])) is not None:
                one = tasks[task_key(entry["task"], entry["input_digest"])]
                one.replies.add(entry["position"])
                one.costs.append(reply.get("cost_usd"))
    return Journaled(dict(tasks), damaged)


def turns_under_way(inflight: Path, *, settled: Container[bytes]) -> dict[bytes, int]:
    """How many replies are journaled for each unfinished task; writes nothing."""
    tasks = under_way(inflight).tasks
    return {key: len(one.replies) for key, one in tasks.items() if key not in settled}


def damaged_replies(content: bytes) -> set[bytes]:
    """The lines of a segment that held a reply and are unreadable."""
    lines = content.splitlines(keepends=True)
    # One that is torn at the end was never used for anything, nor has it a price.
    whole = (line for line in lines if _REPLY in line and line.endswith(b"\n"))
    return {line for line in whole if not is_event(line)}


def cost_of_damaged(line: bytes) -> float | None:
    """What the reply cost that such a line held, None where that is unreadable too."""
    cost = _COST.search(line)
    return None if cost is None else float(cost[1])


def usable_prefix(events: list[Event]) -> list[Event]:
    """The events up to the first that does not follow from those before it.

    A power loss can drop lines in the middle; what stands after the hole has no ground.
    """
    usable: list[Event] = []
    turn = 0
    results: set[int] = set()
    calls = 0
    for event in events:
        if event["kind"] == "forked":
            turn = event["turn"]  # what came before it is in the row
        elif is_paid_alone(event):
            pass  # nothing follows from it, so it follows from anything
        elif event["kind"] == "reply":
            if event["turn"] != turn + 1 or len(results) < calls:
                break
            if "discarded" in event:  # the turn was asked for again
                usable.append(event)
                continue
            turn, results = event["turn"], set()
            calls = len(event["message"].get("tool_calls", ()))
        elif event["kind"] == "result":
            is_second = event["call"] in results  # the tool had asked the user
            if event["turn"] != turn or event["call"] >= calls or is_second != ("reply" in event):
                break
            results.add(event["call"])
        usable.append(event)
    return usable


def segments(inflight: Path) -> list[Path]:
    """The journal files of a run; none where it has not begun."""
    if not inflight.is_dir():
        return []
    return [path for path in inflight.iterdir() if _SEGMENT_NAME.fullmatch(path.name)]


def _worker_of(segment: Path) -> int:
    return int(segment.name.split("-")[1])


def key_and_order(line: bytes) -> tuple[bytes | None, int, int]:
    """Task key, deal and position of a journal line; the key is None where it is unreadable."""
    if (entry := _parsed(line)) is None:
        return None, 0, 0
    return task_key(entry["task"], entry["input_digest"]), entry["deal"], entry["position"]


def is_event(line: bytes) -> bool:
    """Whether a line of a journal can be read."""
    return _parsed(line) is not None


def _parsed(line: bytes) -> dict[str, Any] | None:
    """A journal line, None where it is unreadable."""
    try:
        entry = read_object(line)
        entry["deal"], entry["position"] = int(entry["deal"]), int(entry["position"])
        task_key(entry["task"], entry["input_digest"])
        is_event = isinstance(entry["event"]["kind"], str)
    except (KeyError, TypeError, ValueError):
        return None
    return entry if is_event else None
