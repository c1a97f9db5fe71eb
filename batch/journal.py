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
from pathlib import Path
from typing import Any, NamedTuple

from agent.messages import Event
from batch.checksum import DamagedLine, read_object
from batch.files import StorageError, set_aside
from batch.prompts import task_key

_SEGMENT_NAME = re.compile(r"worker-(\d+)-(\d+)\.jsonl")


class Place(NamedTuple):
    """One journaled event: its order, then where it lies."""

    deal: int
    position: int
    segment: Path
    offset: int
    length: int


class Inflight:
    """What dead workers left in their segments, by task."""

    def __init__(self, inflight: Path) -> None:
        self._inflight = inflight
        self._places: dict[bytes, list[Place]] = {}
        self._open_tasks: dict[Path, set[bytes]] = {}
        self._quarantine = inflight.parent / "quarantine"
        self.damaged: list[str] = []
        """Unreadable lines that were met, as `worker-0-0.jsonl:7`."""

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
        for number, line in enumerate(segment.read_bytes().splitlines(keepends=True), start=1):
            key, deal, position = key_and_order(line)
            if key is not None and wanted(key):
                tasks.add(key)
                place = Place(deal, position, segment, offset, len(line))
                self._places.setdefault(key, []).append(place)
            elif key is None and line.endswith(b"\n"):
                set_aside(self._quarantine, f"{segment.name}.line{number}", line)
                self.damaged.append(f"{segment.name}:{number}")
            offset += len(line)
        if tasks:
            self._open_tasks[segment] = tasks
        else:
            segment.unlink()

    def events(self, key: bytes) -> list[Event]:
        """The journaled events of one task, as far as they follow from each other.

        A deal goes on from the events that its parent could use, so where it begins, what older
        deals left beyond that point no longer counts.
        """
        events: list[Event] = []
        for place in sorted(self._places.get(key, ())):
            if place.position > len(events):
                continue  # it stands behind a hole that a power loss left
            events[place.position :] = [_read(place)["event"]]
        return usable_prefix(events)

    def workspace_place(self, key: bytes) -> str:
        """Where the workspace is that the task's last events were made in; "" for the run's own
        directory."""
        last = max(self._places.get(key, ()), default=None)
        return "" if last is None else str(_read(last).get("place", ""))

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


def _read(place: Place) -> dict[str, Any]:
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


def turns_under_way(inflight: Path, *, settled: Container[bytes]) -> dict[bytes, int]:
    """How many replies are journaled for each unfinished task; writes nothing."""
    turns: defaultdict[bytes, set[int]] = defaultdict(set)
    for segment in segments(inflight):
        try:
            content = segment.read_bytes()
        except FileNotFoundError:
            continue  # its last task has just got its record
        for line in content.splitlines():
            key, _, position = key_and_order(line)
            if key is not None and key not in settled and b'"kind":"reply"' in line:
                turns[key].add(position)  # a later deal may have replaced what stood there
    return {key: len(positions) for key, positions in turns.items()}


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
    try:
        entry = read_object(line)
        key = task_key(entry["task"], entry["input_digest"])
        return key, int(entry["deal"]), int(entry["position"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return None, 0, 0


def is_event(line: bytes) -> bool:
    """Whether a line of a journal can be read."""
    return key_and_order(line)[0] is not None
