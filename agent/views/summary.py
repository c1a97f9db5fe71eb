"""Shows the model the older part of a long conversation as a summary; the record is complete.

The same model writes the summary, which costs money. So its events are journaled as an inner
conversation "summary#N", which replaces N messages. After a crash the summary is used again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from agent.messages.message import SUMMARY, UNREADABLE, Event, Message, summary_key, summary_upto
from agent.models.conversation_id import inner_conversation_id
from agent.models.errors import ModelError
from agent.models.model import Completion, ConversationChanged, Model, Request
from agent.options import AgentOptions
from agent.state.events import Clock, note_event, reply_event
from agent.state.trajectory import Trajectory
from batch_trajectories.basics import exact_json

_log = logging.getLogger(__name__)

_NO_SUMMARY = "no_summary"
"""The reason of a discarded reply, and of the note in an inner conversation without a reply."""

_INSTRUCTION = (
    "Summarize the conversation below for someone who will continue it: the task, what was done "
    "and found, what failed, exact names and values that matter, and what is still open. "
    "Write the summary only, in at most 900 words."
)
_CHARS_PER_TOKEN = 4


class SummarizingModel:
    """A model that is shown the older messages of a long conversation as a summary."""

    def __init__(
        self,
        model: Model,
        writer: Model,
        trajectory: Trajectory,
        options: AgentOptions,
        record_inner: Callable[[str, str, Event], None],
    ) -> None:
        """`writer` writes the summaries: the same model without the views around `model`.

        `record_inner` records an event of an inner conversation, given its key and name.
        """
        self._model = model
        self._writer = writer
        self._trajectory = trajectory
        self._options = options
        self._record_inner = record_inner

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. If the summary fails, the older messages are shown as before.

        Raises `ConversationChanged` after each summary, whose cost may have used up the budget.
        """
        shown = self._apply_summary(request.messages)
        view = replace(request, messages=shown)
        if not self._is_long(shown) or not (upto := self._boundary(request.messages)):
            return await self._model.complete(view)
        try:
            await self._summarize(request, upto)
        except ModelError as error:
            if error.action == "stop_run":
                raise
            _log.warning(
                "There is no summary, and the conversation continues without it: %s", error
            )
            completion = await self._model.complete(view)
            # Noted only now: if this call failed, too, the summary was not the problem.
            note = note_event(0, _NO_SUMMARY, f"{error.kind}: {error}")
            self._record_inner(summary_key(upto), SUMMARY, note)
            return completion
        raise ConversationChanged

    def _apply_summary(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Replace older messages by the latest summary, if there is one."""
        summary = latest_summary(self._trajectory)
        if not summary.upto:
            return messages
        # The system message and the task itself are never summarized.
        task = messages[self._trajectory.opening_length - 1].copy()
        task["content"] += f"\n\n[Summary of the conversation so far]\n{summary.text}"
        system = [message for message in messages[:1] if message["role"] == "system"]
        return [*system, task, *messages[summary.upto :]]

    def _is_long(self, messages: Sequence[Message]) -> bool:
        limit = self._options.summarize_over_messages
        if limit is not None and len(messages) > limit:
            return True
        limit = self._options.summarize_over_tokens
        return limit is not None and _estimate_tokens(messages) > limit

    def _boundary(self, messages: Sequence[Message]) -> int:
        """The number of messages to replace: whole turns, without the last ones; 0: no summary.

        At least `summarize_keep` messages must be new since the last summary, or nearly every
        call would pay for one. Each failed summary doubles that number.
        """
        keep = self._options.summarize_keep
        upto = len(messages) - keep
        while upto > 0 and messages[upto]["role"] != "assistant":
            upto -= 1
        written = latest_summary(self._trajectory).upto
        tried = [summary.upto for summary in _summaries(self._trajectory)]
        failed = sum(n > written for n in tried)
        gap = upto - max(self._trajectory.opening_length, *tried, 0)
        return upto if gap >= keep << failed else 0

    async def _summarize(self, request: Request, upto: int) -> None:
        messages, deadline = request.messages, request.deadline
        shown = self._apply_summary(messages)
        older = shown[: len(shown) - (len(messages) - upto)]
        opening = [
            Message(role="system", content=_INSTRUCTION),
            Message(role="user", content="\n\n".join(map(_as_text, older))),
        ]
        key = summary_key(upto)
        self._record_inner(key, SUMMARY, {"kind": "opening", "messages": opening})
        clock = Clock()
        waited_s = deadline.waited_s if deadline is not None else 0.0

        def record_unreadable(completion: Completion) -> None:
            event = reply_event(1, completion, Clock(), discarded=UNREADABLE)
            self._record_inner(key, SUMMARY, event)

        summary_request = Request(
            opening,
            deadline=deadline,
            on_unreadable=record_unreadable,
            conversation=inner_conversation_id(request.conversation, key),
        )
        completion = await self._writer.complete(summary_request)
        waited_s = deadline.waited_s - waited_s if deadline is not None else 0.0
        whole = completion.finish_reason == "stop" and completion.message["content"].strip()
        why = None if whole else _NO_SUMMARY
        event = reply_event(1, completion, clock, discarded=why, waited_s=waited_s)
        self._record_inner(key, SUMMARY, event)


class Summary(NamedTuple):
    """A summary of the first `upto` messages; `text` is "" if writing it failed."""

    upto: int
    text: str


def latest_summary(t: Trajectory) -> Summary:
    """The latest summary that was written; one of 0 messages if there is none."""
    return max((summary for summary in _summaries(t) if summary.text), default=Summary(0, ""))


def _summaries(t: Trajectory) -> list[Summary]:
    return [
        Summary(summary_upto(key), inner.trajectory.final_text().strip())
        for key, inner in t.inner.items()
        if inner.name == SUMMARY
        and (inner.trajectory.api_calls() or inner.trajectory.count_notes(_NO_SUMMARY))
    ]


def _estimate_tokens(messages: Sequence[Message]) -> int:
    return -(-len(exact_json.dumps(messages)) // _CHARS_PER_TOKEN)


def _as_text(message: Message) -> str:
    calls = "".join(
        f"\n[calls {call['function']['name']} with {call['function']['arguments']}]"
        for call in message.get("tool_calls", ())
    )
    return f"{message['role']}: {message['content']}{calls}"
