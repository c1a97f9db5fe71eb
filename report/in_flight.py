"""What the conversations in flight are doing, read from their journals beside the running workers.

A journal holds what has happened: a call that goes on and a first reply that is waited for are
seen by what is missing. Nothing is written, and segments may vanish while they are read.
"""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from runs.store.checksum import read_object
from runs.tasks import task_key


class _Seen(NamedTuple):
    """What is kept of one journaled event."""

    kind: str
    turn: int
    at: float | None
    """When it had happened, epoch seconds."""
    calls: tuple[str, ...] = ()
    """The tools that a reply calls."""
    call: int = 0
    """Which call of its turn a result belongs to."""


class _Line(NamedTuple):
    """A line of a journal: whose it is, where it stands, what it says."""

    task: str
    key: bytes
    deal: int
    position: int
    event: _Seen


def conversations_under_way(
    run_dir: Path, *, settled: Container[bytes], now: float
) -> list[dict[str, Any]]:
    """One entry per unfinished conversation with journaled events, the longest silent first.

    `settled` holds the keys of tasks that have a record, `now` is epoch seconds. Keys: `id`,
    `turns` (replies so far), `tool` (the last one called, or None), `doing` ("model": a reply is
    waited for; "tools": calls have no result yet), `calls` (the names of those), `idle_s`
    (seconds since the last event, None where no event says when).
    """
    tasks: dict[bytes, list[_Line]] = {}
    for segment in sorted((run_dir / "inflight").glob("worker-*-*.jsonl")):
        try:
            file = segment.open("rb")
        except FileNotFoundError:
            continue  # its last task has just got its record
        with file:
            for text in file:
                line = _read(text)
                if line is not None and line.key not in settled:
                    tasks.setdefault(line.key, []).append(line)
    found = [_state(lines, now) for lines in tasks.values()]
    return sorted(found, key=lambda one: -(one["idle_s"] or 0.0))


def _state(lines: list[_Line], now: float) -> dict[str, Any]:
    events: list[_Seen] = []
    for line in sorted(lines, key=lambda line: (line.deal, line.position)):
        # A later deal goes on from what it could use: what older ones left beyond is void.
        events[line.position :] = [line.event]
    replies = [event for event in events if event.kind == "reply"]
    calls = replies[-1].calls if replies else ()
    turn = replies[-1].turn if replies else 0
    answered = {event.call for event in events if event.kind == "result" and event.turn == turn}
    open_calls = [name for n, name in enumerate(calls) if n not in answered]
    tools = [name for reply in replies for name in reply.calls]
    times = [event.at for event in events if event.at is not None]
    return {
        "id": lines[0].task,
        "turns": len(replies),
        "tool": tools[-1] if tools else None,
        "doing": "tools" if open_calls else "model",
        "calls": open_calls,
        "idle_s": round(max(0.0, now - max(times)), 1) if times else None,
    }


def _read(text: bytes) -> _Line | None:
    """A whole line; one that is being written, or that a crash tore, says nothing yet."""
    try:
        line = read_object(text)
        task, event = line["task"], line["event"]
        key = task_key(task, line["input_digest"])
        return _Line(task, key, line["deal"], line["position"], _seen(event))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _seen(event: dict[str, Any]) -> _Seen:
    kind = event["kind"]
    if kind == "sub":  # as an event of its own it is no turn of the outer conversation
        return _Seen(kind, 0, _seen(event["event"]).at)
    at = event.get("at")
    if "started_at" in event:
        at = event["started_at"] + event["duration_s"]
    if kind == "reply" and "discarded" not in event:
        calls = event["message"].get("tool_calls", ())
        return _Seen(kind, event["turn"], at, tuple(call["function"]["name"] for call in calls))
    return _Seen(
        "discarded" if kind == "reply" else kind, event.get("turn", 0), at, (), event.get("call", 0)
    )
