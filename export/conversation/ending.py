"""A conversation that was ended by a call of `final_answer`, told as one that ends in plain text.

How the runtime is told that a conversation is over is the runtime's affair. A row says what the
user was answered, so rows look alike whichever way the model had to end them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from agent.reasoning import split_inline_reasoning
from agent.state.final_answer import RESERVED
from export.conversation.row_json import read_arguments
from export.conversation.tools import Tools, names_of, tools_of, without_reserved
from export.conversation.validity import Reason, Rejected, check_conversation, final_answer_call
from runs.store.checks import ended_by_wrong_answer


class Told(NamedTuple):
    """A conversation as a row tells it."""

    messages: Sequence[Mapping[str, Any]]
    tools: Tools
    """Those on offer, without the reserved ones where the messages hold no call of either."""
    completion: Literal["final_answer", "text"] | None
    """How the answer was given; None without one."""
    invented: Sequence[str] = ()
    """Which calls were of tools that were not on offer, where the messages do not show it."""


def plain_ending(
    messages: Sequence[Mapping[str, Any]],
    tools: Tools,
    *,
    answered: bool,
) -> Told:
    """Tell a conversation that was `answered` with its answer as text; raises Rejected.

    One that was not keeps its calls, also those of the reserved tools.
    """
    call = final_answer_call(messages) if answered else None
    invented: Sequence[str] = ()
    if call is not None:
        invented = check_conversation(messages, names_of(tools))
        messages = _with_answer_as_text(messages, call)
    others = without_reserved(tools)
    if others is not tools and not _call_reserved(messages):
        tools = others
    if not answered:
        return Told(messages, tools, None)
    return Told(messages, tools, "text" if call is None else "final_answer", invented)


def is_answered(record: Mapping[str, Any]) -> bool:
    """Whether a conversation ended with an answer of its model, be it a wrong one."""
    return record["status"] == "completed" or ended_by_wrong_answer(record)


def _call_reserved(messages: Sequence[Mapping[str, Any]]) -> bool:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call["function"]["name"] in RESERVED:
                return True
    return False


def answer_of(record: Mapping[str, Any]) -> str | None:
    """The words that a conversation ends with, None where it does not end with the model's."""
    answered = is_answered(record)
    try:
        told = plain_ending(record["messages"], tools_of(record), answered=answered)
    except Rejected:
        return None
    last = told.messages[-1]
    if last["role"] != "assistant" or not isinstance(last["content"], str):
        return None
    return split_inline_reasoning(last["content"]).rest.strip() or None


def _with_answer_as_text(
    messages: Sequence[Mapping[str, Any]], call: Mapping[str, Any]
) -> list[Mapping[str, Any]]:
    """The messages with `call` and its result replaced by a last message that holds the answer.

    Where the turn had no other calls, that message stands next to it and goes on with it, as a
    continuation does.
    """
    start = max(n for n, message in enumerate(messages) if message["role"] == "assistant")
    turn, *results = messages[start:]
    others = [other for other in turn["tool_calls"] if other is not call]
    kept = [result for result in results if result["tool_call_id"] != call["id"]]
    answer = _answer(call)
    for result in results:
        if result not in kept:
            if result.get("is_error"):
                raise Rejected(Reason.UNFINISHED, "completed, but the final answer was refused")
            # As the runtime took it: references in it stand for what they name.
            answer = (result.get("details") or {}).get("text", answer)
    last = {"role": "assistant", "content": answer}
    return [*messages[:start], {**turn, "tool_calls": others}, *kept, last]


def _answer(call: Mapping[str, Any]) -> str:
    _, arguments = read_arguments(call, where="last turn")
    answer = arguments.get("answer", "")
    if not isinstance(answer, str):
        raise Rejected(Reason.NOT_TEXT, f"last turn: the answer is a {type(answer).__name__}")
    if not answer.strip():
        raise Rejected(Reason.EMPTY_VALUE, "last turn: the final answer says nothing")
    return answer.strip()
