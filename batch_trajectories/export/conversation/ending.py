"""Rewrites a final answer that was given by a call of `final_answer` as a last message in text.

So rows look the same however the model had to end its conversation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from agent.messages.message import split_inline_reasoning
from agent.state.final_answer import RESERVED_TOOLS
from batch_trajectories.export.conversation.row_json import read_arguments
from batch_trajectories.export.conversation.turns import remove_reserved, tool_names
from batch_trajectories.export.conversation.validity import (
    Reason,
    Rejected,
    check_conversation,
    final_answer_call,
)
from batch_trajectories.records.checks import ended_by_wrong_answer
from batch_trajectories.records.record_types import Record, StoredCall, StoredMessage, Tools


class PlainEnding(NamedTuple):
    """A conversation whose answer, if it has one, is text."""

    messages: Sequence[StoredMessage]
    tools: Tools
    """The tools on offer; without the reserved ones unless a message calls one."""
    completion: Literal["final_answer", "text"] | None
    """The way in which the answer was given; None without an answer."""
    invented: Sequence[str] = ()
    """Descriptions of calls of tools that were not offered, found before the answer was moved."""


def rewrite_ending(
    messages: Sequence[StoredMessage],
    tools: Tools,
    *,
    answered: bool,
) -> PlainEnding:
    """Rewrite the answer of a conversation as text, if it was `answered`. Raises Rejected.

    A conversation without an answer keeps all its calls, also those of the reserved tools.
    """
    may_be_by_call = answered and bool(messages) and messages[-1].role == "tool"
    call = final_answer_call(messages) if may_be_by_call else None
    invented: Sequence[str] = ()
    if call is not None:
        invented = check_conversation(messages, tool_names(tools))
        messages = _replace_answer_call(messages, call)
    others = remove_reserved(tools)
    if others is not tools and not _has_reserved_call(messages):
        tools = others
    if not answered:
        return PlainEnding(messages, tools, None)
    return PlainEnding(messages, tools, "text" if call is None else "final_answer", invented)


def is_answered(record: Record) -> bool:
    """Whether a conversation ended with an answer, be it right or wrong."""
    return record.status == "completed" or ended_by_wrong_answer(record)


def _has_reserved_call(messages: Sequence[StoredMessage]) -> bool:
    for message in messages:
        for call in message.tool_calls:
            if call.function.name in RESERVED_TOOLS:
                return True
    return False


def find_answer(record: Record) -> str | None:
    """The final answer of a conversation, None without one."""
    answered = is_answered(record)
    try:
        ending = rewrite_ending(record.messages, record.tools, answered=answered)
    except Rejected:
        return None
    last = ending.messages[-1]
    if last.role != "assistant":
        return None
    return split_inline_reasoning(last.content).rest.strip() or None


def _replace_answer_call(
    messages: Sequence[StoredMessage], call: StoredCall
) -> list[StoredMessage]:
    """The messages with `call` and its result replaced by a last message that holds the answer.

    If the turn had no other calls, that message follows it directly and continues the same turn.
    """
    start = max(n for n, message in enumerate(messages) if message.role == "assistant")
    turn, *results = messages[start:]
    others = [other for other in turn.tool_calls if other is not call]
    earlier = [result for result in results if result.tool_call_id != call.id]
    answer = _answer(call)
    for result in results:
        if result not in earlier:
            if result.is_error:
                raise Rejected(Reason.UNFINISHED, "completed, but the final answer was refused")
            # The answer as the runtime took it, with its references resolved.
            answer = result.details.get("text", answer)
    last = StoredMessage("assistant", answer)
    return [*messages[:start], replace(turn, tool_calls=others), *earlier, last]


def _answer(call: StoredCall) -> str:
    _, arguments = read_arguments(call, where="last turn")
    answer = arguments.get("answer", "")
    if not isinstance(answer, str):
        raise Rejected(Reason.NOT_TEXT, f"last turn: the answer is a {type(answer).__name__}")
    if not answer.strip():
        raise Rejected(Reason.EMPTY_VALUE, "last turn: the final answer says nothing")
    return answer.strip()
