"""Long conversations shown with their older part as a summary; the record stays whole.

The summary is written by the same model. It is paid for, so it is an event of its own (an inner
conversation "summary#N", where N messages are replaced by it), and a conversation that is taken
up again goes on with the summary that it had.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from agent.messages import UNREADABLE, Event, Message
from agent.models.errors import ModelError
from agent.models.model import Completion, ConversationChanged, Model, Request
from agent.options import AgentOptions
from agent.state.events import Clock, note_event, reply_event
from agent.state.trajectory import Trajectory
from toolsets import exact_json

log = logging.getLogger(__name__)

STAGE = "summary"

_NO_SUMMARY = "no_summary"
"""Why a reply is none, and what an inner conversation without a reply notes."""

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
        """`writer` writes the summaries: the same model, without the views that `model` has.

        `record_inner` records an event of an inner conversation, given its key and name.
        """
        self._model = model
        self._writer = writer
        self._trajectory = trajectory
        self._options = options
        self._record_inner = record_inner

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. A summary that cannot be had is done without.

        Raises `ConversationChanged` after each summary: paying for it may have used up the budget.
        """
        shown = self._shown(request.messages)
        asked = replace(request, messages=shown)
        if not self._is_long(shown) or not (upto := self._boundary(request.messages)):
            return await self._model.complete(asked)
        try:
            await self._summarize(request, upto)
        except ModelError as error:
            if error.action == "stop_run":
                raise
            log.warning("no summary, the conversation goes on without: %s", error)
            completion = await self._model.complete(asked)
            # Only now: an endpoint that fails altogether says nothing about summaries.
            note = note_event(0, _NO_SUMMARY, f"{error.kind}: {error}")
            self._record_inner(f"{STAGE}#{upto}", STAGE, note)
            return completion
        raise ConversationChanged

    async def close(self) -> None:
        """See `Model.close`."""
        await self._model.close()

    def _shown(self, messages: Sequence[Message]) -> Sequence[Message]:
        upto, summary = latest_summary(self._trajectory)
        if not upto:
            return messages
        # Neither the system message nor the task itself is ever summarized away.
        task = messages[self._trajectory.opening - 1].copy()
        task["content"] += f"\n\n[Summary of the conversation so far]\n{summary}"
        system = [message for message in messages[:1] if message["role"] == "system"]
        return [*system, task, *messages[upto:]]

    def _is_long(self, messages: Sequence[Message]) -> bool:
        over = self._options.summarize_over_messages
        if over is not None and len(messages) > over:
            return True
        over = self._options.summarize_over_tokens
        return over is not None and _estimated_tokens(messages) > over

    def _boundary(self, messages: Sequence[Message]) -> int:
        """How many messages to replace: whole turns, and the last ones stay; 0 for none.

        A summary that replaces only a few messages more than the one before it would be paid for
        again and again. Each one that failed doubles what must have come since.
        """
        keep = self._options.summarize_keep
        upto = len(messages) - keep
        while upto > 0 and messages[upto]["role"] != "assistant":
            upto -= 1
        written, _ = latest_summary(self._trajectory)
        tried = [n for n, _ in _summaries(self._trajectory)]
        failed = sum(n > written for n in tried)
        gap = upto - max(self._trajectory.opening, *tried, 0)
        return upto if gap >= keep << failed else 0

    async def _summarize(self, request: Request, upto: int) -> None:
        messages, deadline = request.messages, request.deadline
        shown = self._shown(messages)
        older = shown[: len(shown) - (len(messages) - upto)]
        asked = [
            Message(role="system", content=_INSTRUCTION),
            Message(role="user", content="\n\n".join(map(_as_text, older))),
        ]
        key = f"{STAGE}#{upto}"
        self._record_inner(key, STAGE, {"kind": "opening", "messages": asked})
        clock = Clock()
        waited_s = deadline.waited_s if deadline is not None else 0.0

        def pay(unreadable: Completion) -> None:
            event = reply_event(1, unreadable, Clock(), discarded=UNREADABLE)
            self._record_inner(key, STAGE, event)

        request = Request(asked, deadline=deadline, on_unreadable=pay)
        completion = await self._writer.complete(request)
        waited_s = deadline.waited_s - waited_s if deadline is not None else 0.0
        whole = completion.finish_reason == "stop" and completion.message["content"].strip()
        why = None if whole else _NO_SUMMARY
        event = reply_event(1, completion, clock, discarded=why, waited_s=waited_s)
        self._record_inner(key, STAGE, event)


def latest_summary(t: Trajectory) -> tuple[int, str]:
    """How many messages the latest summary replaces, and its text; (0, "") without one."""
    return max(((upto, text) for upto, text in _summaries(t) if text), default=(0, ""))


def _summaries(t: Trajectory) -> list[tuple[int, str]]:
    """How many messages each summary was to replace, and its text, "" where none came."""
    return [
        (int(key.rpartition("#")[2]), inner.trajectory.final_text().strip())
        for key, inner in t.inner.items()
        if inner.name == STAGE
        and (inner.trajectory.api_calls() or inner.trajectory.notes_of(_NO_SUMMARY))
    ]


def _estimated_tokens(messages: Sequence[Message]) -> int:
    return -(-len(exact_json.dumps(messages)) // _CHARS_PER_TOKEN)


def _as_text(message: Message) -> str:
    calls = "".join(
        f"\n[calls {call['function']['name']} with {call['function']['arguments']}]"
        for call in message.get("tool_calls", ())
    )
    return f"{message['role']}: {message['content']}{calls}"
