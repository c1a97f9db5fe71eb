"""The state of conversations in flight, read from their journals during the run.

A journal has only events that are over: a conversation with calls without results is running
tools, any other is waiting for the model.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from agent.messages.message import Event, ReplyEvent, reply_in
from batch_trajectories.runs.store.files import StorageError
from batch_trajectories.runs.store.journal import Inflight


def conversations_in_flight(
    inflight: Path, *, settled: Container[bytes], now: float
) -> list[dict[str, Any]]:
    """See `StoredRun.in_flight`."""
    journals = Inflight(inflight, read_only=True)
    journals.read(settled=settled)
    found = []
    for key in journals.tasks():
        try:
            found.append(_state(journals.task_id(key), journals.events(key), now))
        except StorageError:
            continue  # the record of the last task of its segment was just written
    return sorted(found, key=lambda state: -(state["idle_s"] or 0.0))


def _state(task_id: str, events: Sequence[Event], now: float) -> dict[str, Any]:
    replies = [
        reply
        for event in events
        if event["kind"] in ("reply", "exchange")
        and (reply := reply_in(event)) is not None
        and "discarded" not in reply
    ]
    called = [_names(reply) for reply in replies]
    # What an agent has done with its last reply, only its next call shows.
    turn = replies[-1]["turn"] if replies else 0
    answered = {e["call"] for e in events if e["kind"] == "result" and e["turn"] == turn}
    last = called[-1] if called else []
    open_calls = [name for number, name in enumerate(last) if number not in answered]
    tools = [name for names in called for name in names]
    times = [at for event in events if (at := _ended_at(event)) is not None]
    return {
        "id": task_id,
        "turns": len(replies),
        "tool": tools[-1] if tools else None,
        "doing": "tools" if open_calls else "model",
        "calls": open_calls,
        "idle_s": round(max(0.0, now - max(times)), 1) if times else None,
    }


def _names(reply: ReplyEvent) -> list[str]:
    return [call["function"]["name"] for call in reply["message"].get("tool_calls", ())]


def _ended_at(event: Mapping[str, Any]) -> float | None:
    """The end of an event, epoch seconds."""
    if event["kind"] == "sub":
        return _ended_at(event["event"])
    if event["kind"] == "exchange":
        return _ended_at(event["reply"])
    if "started_at" in event:
        return float(event["started_at"] + event["duration_s"])
    return event.get("at")
