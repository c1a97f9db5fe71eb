"""Makes events from replies, results and requests."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from agent.messages.message import (
    TOOL_TEXT_END,
    TOOL_TEXT_START,
    CutEvent,
    ExchangeEvent,
    Message,
    NoteEvent,
    ReplyEvent,
    ResultEvent,
    ToolCall,
)
from agent.messages.tokens import encode_tokens
from agent.models.model import Completion
from toolsets.tool import ASKS, ToolResult

if TYPE_CHECKING:
    from agent.wires.threads import Threads
    from agent.wires.wire import WireRequest


class Clock:
    """Measures when an act began and how long it took."""

    def __init__(self) -> None:
        self.started_at = time.time()
        """Epoch seconds."""
        self._began = time.monotonic()

    def seconds(self) -> float:
        """Seconds since the beginning, to the microsecond."""
        return round(time.monotonic() - self._began, 6)


_WAITED_S = 0.001
"""Shorter waits are not worth their bytes in the journal."""


def reply_event(
    turn: int,
    completion: Completion,
    clock: Clock,
    *,
    discarded: str | None,
    waited_s: float = 0.0,
    before: Sequence[ReplyEvent] = (),
) -> ReplyEvent:
    """The event of a reply for turn `turn`; see `ReplyEvent` for `discarded` and `waited_s`.

    `before` are the replies of the conversation so far: token ids are stored relative to them.
    """
    event = ReplyEvent(
        kind="reply",
        turn=turn,
        message=completion.message,
        finish_reason=completion.finish_reason,
        usage=completion.usage,
        cost_usd=completion.cost_usd,
        model=completion.model,
        response_id=completion.response_id,
        started_at=clock.started_at,
        duration_s=clock.seconds(),
    )
    if discarded is not None:
        event["discarded"] = discarded
    if waited_s >= _WAITED_S:
        event["waited_s"] = waited_s
    if completion.extra:
        event["extra"] = dict(completion.extra)
    if completion.tokens is not None:
        event["tokens"] = encode_tokens(completion.tokens, before, completion.token_texts)
        if completion.sampling is not None:
            event["tokens"]["sampling"] = dict(completion.sampling)
    if completion.batch_item is not None:
        event["batch_item"] = completion.batch_item
    return event


def cut_event(turn: int, clock: Clock, *, waited_s: float) -> CutEvent:
    """The event of a model call for turn `turn` that was cut off; see `CutEvent`."""
    event = CutEvent(kind="cut", turn=turn, started_at=clock.started_at, duration_s=clock.seconds())
    if waited_s >= _WAITED_S:
        event["waited_s"] = waited_s
    return event


def result_event(
    turn: int, n: int, call: ToolCall, result: ToolResult, clock: Clock
) -> ResultEvent:
    """The event of the result of call number `n` of turn `turn`."""
    message = Message(
        role="tool",
        tool_call_id=call["id"],
        name=call["function"]["name"],
        content=result.content,
        is_error=result.is_error,
    )
    if result.details:
        message["details"] = dict(result.details)
    return ResultEvent(
        kind="result",
        turn=turn,
        call=n,
        message=message,
        started_at=clock.started_at,
        duration_s=clock.seconds(),
    )


def continued_event(
    asking: ResultEvent, reply: str, result: ToolResult | None, clock: Clock
) -> ResultEvent:
    """The event that continues `asking`, the result with which a tool asked the user.

    Its message is that result, the user's reply and `result`, the tool's second result; None if the
    tool was not called again.
    """
    message = asking["message"].copy()
    message["content"] += f"\n\nUser: {reply}"
    details = {key: value for key, value in message.get("details", {}).items() if key != ASKS}
    if result is not None:
        message["content"] += "\n\n"
        own_from = len(message["content"])
        message["content"] += result.content
        if TOOL_TEXT_END in details:
            details |= {TOOL_TEXT_START: own_from, TOOL_TEXT_END: len(message["content"])}
        message["is_error"] = result.is_error
        details |= result.details
    message["details"] = details
    event = asking.copy()
    event["message"] = message
    event["reply"] = reply
    event["duration_s"] = asking["duration_s"] + clock.seconds()
    return event


def note_event(turn: int, reason: str, text: str) -> NoteEvent:
    """The event of a note after turn `turn`; see `NoteEvent`."""
    return NoteEvent(kind="note", turn=turn, reason=reason, text=text, at=time.time())


def exchange_event(
    threads: Threads,
    request: WireRequest,
    completion: Completion,
    body: dict[str, Any],
    clock: Clock,
) -> ExchangeEvent:
    """The event of an agent's call whose reply is complete.

    `completion` is the content of the reply, `body` its body in the dialect of the agent.
    """
    placed = threads.place(request)
    before = threads.token_chain(placed.previous_with_ids)
    reply = reply_event(placed.turn, completion, clock, discarded=None, before=before)
    got = [call["id"] for call in reply["message"].get("tool_calls", ())]
    make_ids_unique(reply["message"], placed.call_ids, turn=placed.turn)
    event = ExchangeEvent(
        kind="exchange",
        number=threads.next_number,
        key=request.key,
        dialect=request.api,
        asked=request.model,
        thread=placed.thread,
        shared=placed.shared,
        added=threads.parts.deduplicate(placed.added),
        reply=reply,
        body=body,
    )
    if placed.parent is not None:
        event["of"] = placed.parent
    if request.is_instructed:
        event["instructed"] = True
    if got != [call["id"] for call in reply["message"].get("tool_calls", ())]:
        event["ids"] = got
    if placed.repeated_replies:
        event["echoes"] = placed.repeated_replies
    if placed.tools is not None:
        event["tools"] = placed.tools
    if placed.patch_changes:
        event["shown"] = [[at, patch] for at, patch in placed.patch_changes.items()]
    if request.server_tools:  # they were removed from it
        event["stripped"] = list(request.server_tools)
    return event


def make_ids_unique(message: Message, used: Collection[str], *, turn: int) -> None:
    """Replace empty and repeated call ids, which some servers send: results are found by id.

    Ids that end in a number keep their form, since their models read them.
    """
    calls = message.get("tool_calls")
    if not calls:
        return
    taken = {call["id"] for call in calls} | {""}
    seen: set[str] = set()
    for n, call in enumerate(calls):
        if call["id"] in seen or call["id"] in used or not call["id"]:
            call["id"] = _next_numbered_id(call["id"], taken, used) or _new_id(
                f"call_{turn}_{n}", taken, used
            )
        taken.add(call["id"])
        seen.add(call["id"])
    # Verbatim blocks of some dialects contain the same calls and need the same ids.
    ids = iter(call["id"] for call in calls)
    for block in message.get("provider_blocks", {"blocks": []})["blocks"]:
        if field := _id_field(block):
            block[field] = next(ids)


def _id_field(block: Mapping[str, Any]) -> str | None:
    """The field with the call id in a block that calls one of our tools; None for other blocks."""
    kind = str(block.get("type"))
    if kind == "tool_use":
        return "id"
    is_call = kind == "function_call" or (kind.endswith("_call") and "call_id" in block)
    return "call_id" if is_call else None


_NUMBERED = re.compile(r"(?P<stem>(?:functions\.)?[A-Za-z_][\w.\-]*:)(?P<number>[0-9]{1,9})")
"""The form of Kimi's ids: its template shows them to the model, which counts all its calls."""


def _next_numbered_id(id: str, taken: Collection[str], used: Collection[str]) -> str | None:
    """A numbered `id` with the next number that no other id has; None if `id` has no number."""
    if (parts := _NUMBERED.fullmatch(id)) is None:
        return None
    found = (_NUMBERED.fullmatch(other) for other in itertools.chain(taken, used))
    numbers = {int(other["number"]) for other in found if other is not None}
    free = (n for n in itertools.count(int(parts["number"]) + 1) if n not in numbers)
    return f"{parts['stem']}{next(free)}"


def _new_id(wanted: str, taken: Collection[str], used: Collection[str]) -> str:
    candidates = itertools.chain([wanted], (f"{wanted}_{n}" for n in itertools.count(2)))
    return next(id for id in candidates if id not in taken and id not in used)
