"""Conversations as OpenAI chat messages with tool calls.

Keys without a value are left out, content is always a string, and arguments are objects, as chat
templates expect, unless `Style.arguments` says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from batch_trajectories.basics.exact_json import stringify_large_integers
from batch_trajectories.export.conversation.reading import refuse_control_tokens
from batch_trajectories.export.conversation.row_json import (
    TOOL_CALL,
    TOOL_RESPONSE,
    SharedText,
    Token,
    control_token,
    holds_structure,
    is_object,
    write_json,
)
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Flaw, Tolerance
from batch_trajectories.export.conversation.turns import (
    Call,
    Conversation,
    Entry,
    Turn,
    UserMessage,
    compute_once,
)
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.records.record_types import Tools

EMPTY_THINK = "<think>\n</think>"
"""An empty think block, as it follows a generation prompt that opens a think block."""
NO_LOSS: Mapping[str, Any] = {"weight": 0, "loss": False}
"""Marks an assistant message without loss: `weight` for OpenAI and Axolotl, `loss` for
ms-swift. Messages without these keys are learnt."""


def render_messages(
    conversation: Conversation, style: Style, *, marks_loss: bool = False
) -> list[dict[str, Any]]:
    """Render a conversation as messages. Raises Rejected if text would be read as structure.

    With `marks_loss`, turns without loss get the keys of `NO_LOSS`.
    """
    style.tolerance.refuse(conversation.flaws)
    inline = style.is_inline(by_default=False)
    messages = []
    if conversation.system and style.has_system(by_default=True):
        refuse_control_tokens(conversation.system, style.tolerance, where="system message")
        messages.append({"role": "system", "content": conversation.system})
    last = conversation.entries[-1]
    for entry in conversation.entries:
        parts = _messages(entry, style, inline=inline)
        if marks_loss and isinstance(entry, Turn):
            is_context = conversation.is_for_turn and entry is not last
            if is_context or not entry.has_loss:
                parts[0].update(NO_LOSS)
        messages.extend(parts)
    return messages


def tools_column(conversation: Conversation, style: Style) -> str | Tools:
    """The tools on offer, as JSON text or as a list; raises Rejected."""
    text = tools_json(conversation, style.tolerance)
    return (
        compute_once(conversation.tools, stringify_large_integers)
        if style.tools == "list"
        else text
    )


def tools_json(conversation: Conversation, tolerance: Tolerance) -> str:
    """The tools on offer as a JSON list in a string; raises Rejected."""
    text, token = compute_once(conversation.tools, _tools_and_token)
    if token and tolerance.refuses_token(token):
        raise Rejected(Reason.CONTROL_TOKEN, f"tools: {token.text!r}")
    return text


def _tools_and_token(tools: Tools) -> tuple[str, Token | None]:
    text = write_json(tools)
    return SharedText(text), control_token(text)


def refuse_structure_in_results(turn: Turn, tolerance: Tolerance) -> None:
    """Raise Rejected if a result holds the tags of results or a control token."""
    for result in turn.results:
        if holds_structure(result.content):
            where = f"result of turn {turn.number}"
            refuse_control_tokens(result.content, tolerance, where=where)
            if match := TOOL_RESPONSE.search(result.content):
                tolerance.refuse([Flaw(Reason.MARKER_IN_RESULT, f"{where}: {match[0]}")])


def refuse_structure_in_arguments(turn: Turn, tolerance: Tolerance) -> None:
    """Raise Rejected if arguments hold the tags of calls or a control token."""
    for call in turn.calls:
        if holds_structure(call.arguments):
            where = f"arguments of turn {turn.number}"
            refuse_control_tokens(call.arguments, tolerance, where=where)
            if match := TOOL_CALL.search(call.arguments):
                tolerance.refuse([Flaw(Reason.MARKER_IN_ARGUMENTS, f"{where}: {match[0]}")])


def stringify_arguments(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write the arguments of calls as JSON strings, so that all rows fit one Parquet schema.

    Arguments that are no object become a JSON string, so that all can be read as JSON.
    """
    return [
        {
            **message,
            "tool_calls": [
                {
                    **call,
                    "function": {
                        **call["function"],
                        "arguments": _as_json(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ],
        }
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _as_json(arguments: Any) -> str:
    if isinstance(arguments, str) and is_object(arguments):
        return arguments
    return write_json(arguments)


def _arguments_text(call: Call) -> str:
    """The arguments of a call as text: the JSON of an object, else the text of the model."""
    return call.arguments if call.arguments.startswith("{") else json.loads(call.arguments)


def _messages(entry: Entry, style: Style, *, inline: bool) -> Sequence[dict[str, Any]]:
    if isinstance(entry, UserMessage):
        return [{"role": "user", "content": entry.text}]
    text, reasoning = entry.text, entry.reasoning
    if entry.calls and style.call_text == "reasoning":
        text, reasoning = "", "\n\n".join(filter(None, (reasoning, text)))
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning and inline:
        message["content"] = f"<think>\n{reasoning}\n</think>" + (f"\n\n{text}" if text else "")
    elif reasoning:
        message[style.reasoning_key] = reasoning
    elif style.empty_think == "text":
        message["content"] = EMPTY_THINK + text
    tolerance = style.tolerance
    refuse_structure_in_arguments(entry, tolerance)
    refuse_structure_in_results(entry, tolerance)
    for call in entry.calls:  # some templates render the ids of calls
        refuse_control_tokens(call.id, tolerance, where=f"call id of turn {entry.number}")
    if entry.calls:
        is_text = style.arguments == "text"
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": _arguments_text(call) if is_text else call.value,
                },
            }
            for call in entry.calls
        ]
    results = [
        {"role": "tool", "tool_call_id": result.id, "name": result.name, "content": result.content}
        for result in entry.results
    ]
    return [message, *results]
