"""Restores the events of a finished conversation from its record, up to the end of a turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import (
    SUMMARY,
    Event,
    Message,
    NoteEvent,
    OpeningEvent,
    ReplyEvent,
    ResultEvent,
    failure_of,
)
from agent.state.trajectory import Trajectory


class NotForkable(Exception):
    """The conversation cannot continue from that turn; the message says why."""


def events_until(
    record: Mapping[str, Any], turn: int, *, opening: Sequence[Message]
) -> list[Event]:
    """The events of `record` from its opening to the last result of `turn`, in order.

    Replies are marked as inherited. `opening` are the messages of its prompt. Notes after the turn
    are left out, and so are inner conversations: only their results count. Raises `NotForkable` if
    the conversation did not continue after that turn, or if the record does not determine its
    events.
    """
    if "agent" in record:
        raise NotForkable("an agent that runs as a command cannot begin in the middle")
    if turn >= len(record["turns"]):
        raise NotForkable(f"it does not continue after turn {turn}")
    if any(inner["key"].startswith(f"{SUMMARY}#") for inner in record["inner"]):
        raise NotForkable("the model was shown summaries of it")
    messages: list[Message] = record["messages"]
    own = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    if len(own) < len(record["turns"]) or not own[-len(record["turns"])]:
        raise NotForkable("its messages do not fit its turns")
    first = own[-len(record["turns"])]
    notes = [_note(note) for note in record["notes"] if note["turn"] < turn]
    events: list[Event] = []
    begun = _without_notes(messages[:first], [note for note in notes if note["turn"] == 0])
    if begun != list(opening):
        events.append(OpeningEvent(kind="opening", messages=begun))
    events += [note for note in notes if note["turn"] == 0]
    results = {
        message["tool_call_id"]: message for message in messages if "tool_call_id" in message
    }
    for number in range(1, turn + 1):
        events += [
            _reply(discarded) for discarded in record["discarded"] if discarded["turn"] == number
        ]
        message = messages[own[number - 1 - len(record["turns"])]]
        events.append(_reply({**record["turns"][number - 1], "message": message}))
        added = [note for note in record["notes"] if note["turn"] == number]
        events += _results(record, number, message, results, added)
        events += [note for note in notes if note["turn"] == number]
    _check(Trajectory(opening, events), messages, record, turn)
    return events


def paid_for(events: Sequence[Event]) -> dict[str, Any]:
    """The cost of the inherited replies of `events`: `api_calls`, `usage`, `cost_usd`."""
    replies: list[Event] = []
    for event in events:
        if event["kind"] == "reply":
            event = event.copy()
            event.pop("inherited", None)
            replies.append(event)
    paid = Trajectory((), replies)
    return {"api_calls": paid.api_calls(), "usage": paid.usage(), "cost_usd": paid.cost_usd()}


def _note(fields: Mapping[str, Any]) -> NoteEvent:
    return NoteEvent(
        kind="note",
        turn=fields["turn"],
        reason=fields["reason"],
        text=fields["text"],
        at=fields["at"],
    )


def _reply(fields: Mapping[str, Any]) -> ReplyEvent:
    reply: ReplyEvent = {"kind": "reply", **fields, "inherited": True}  # type: ignore[typeddict-item]
    return reply


def _results(
    record: Mapping[str, Any],
    turn: int,
    message: Message,
    results: Mapping[str, Message],
    notes: Sequence[Mapping[str, Any]],
) -> list[ResultEvent]:
    timings = {call["call"]: call for call in record["tool_calls"] if call["turn"] == turn}
    calls = message.get("tool_calls", [])
    if not calls and turn == len(record["turns"]):
        raise NotForkable("it had ended")
    found: list[ResultEvent] = []
    for n, call in enumerate(calls):
        result = results.get(call["id"])
        if result is None or n not in timings:
            raise NotForkable(f"a call of turn {turn} has no result")
        if failure_of(result) == "not_run":
            raise NotForkable(f"a call of turn {turn} was not run")
        is_last = n == len(calls) - 1
        found.append(
            ResultEvent(
                kind="result",
                turn=turn,
                call=n,
                message=_without_notes([result], notes)[0] if is_last else result,
                started_at=timings[n]["started_at"],
                duration_s=timings[n]["duration_s"],
            )
        )
    return found


def _without_notes(
    messages: Sequence[Message], notes: Sequence[Mapping[str, Any]]
) -> list[Message]:
    """The messages without `notes`, which the runtime added to the last of them."""
    *before, last = messages
    if not notes or "notes" not in last:
        return list(messages)
    last = last.copy()
    for note in reversed(notes):
        last["content"] = last["content"].removesuffix("\n\n" + note["text"])
    kept = last["notes"][: -len(notes)]
    if kept:
        last["notes"] = kept
    else:
        del last["notes"]
    return [*before, last]


def _check(
    trajectory: Trajectory, messages: Sequence[Message], record: Mapping[str, Any], turn: int
) -> None:
    """The events must give the messages of the record, or the branch would not continue it."""
    if (record["options"] or {}).get("awaiting_input") and any(
        "\n\nUser: " in message["content"] for message in trajectory.messages[trajectory.opening :]
    ):
        raise NotForkable("a tool asked the user before that turn")
    count = len(trajectory.messages)
    expected = list(messages[:count])
    if trajectory.messages and trajectory.messages[-1]["role"] == "tool":
        after = [note for note in record["notes"] if note["turn"] == turn]
        expected = _without_notes(expected, after)
    if trajectory.messages != expected:
        raise NotForkable("its record does not determine its events")
