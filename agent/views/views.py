"""What the model is shown of a conversation, where that is not the record itself.

A view is a model around a model: it changes the messages of the request on their way, and nothing
of what is recorded. The record says that a view was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import orjson

from agent.messages import Message
from agent.models.model import Completion, Model, Request
from agent.options import AgentOptions

COMPACT_CHARS = 120
"""Reasoning and arguments that are longer are shown by their first characters."""

View = Callable[[Sequence[Message]], Sequence[Message]]


class ViewingModel:
    """A model that is shown `view(messages)`."""

    def __init__(self, model: Model, view: View) -> None:
        self._model = model
        self._view = view

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        shown = self._view(request.messages)
        return await self._model.complete(replace(request, messages=shown))

    async def close(self) -> None:
        """See `Model.close`."""
        await self._model.close()


def with_views(model: Model, options: AgentOptions) -> Model:
    """Put the views that `options` ask for around `model`; none where they ask for none."""
    if options.ephemeral_system_prompt or options.prefill_messages:
        unrecorded = _unrecorded(options)
        model = ViewingModel(model, lambda messages: _insert(messages, unrecorded))
    if options.compact_after:
        model = ViewingModel(model, lambda messages: compact(messages, options.compact_after))
    return model


def compact(messages: Sequence[Message], after: int) -> list[Message]:
    """Show reasoning and call arguments in short where `after` later replies had text.

    Signed blocks are left out whole, never shortened: a provider refuses an altered one.
    """
    shown = list(messages)
    later_texts = 0
    for n in range(len(shown) - 1, -1, -1):
        message = shown[n]
        if message["role"] == "assistant":
            if later_texts >= after:
                shown[n] = _in_short(message)
            later_texts += bool(message["content"].strip())
    return shown


def compacted_from(messages: Sequence[Message], after: int) -> int:
    """The place of the first reply that was asked for with older ones in short, as all later ones.

    The number of messages where there is none.
    """
    texts = 0
    enough: int | None = None
    for n, message in enumerate(messages if after else ()):
        if message["role"] != "assistant":
            continue
        if enough is not None and texts >= enough:
            return n
        texts += bool(message["content"].strip())
        if enough is None and _in_short(message) is not message:
            enough = texts + after
    return len(messages)


def _in_short(message: Message) -> Message:
    reasoning = message.get("reasoning", "")
    calls = message.get("tool_calls", [])
    long_calls = [call for call in calls if len(call["function"]["arguments"]) > COMPACT_CHARS]
    if len(reasoning) <= COMPACT_CHARS and not long_calls:
        return message
    shown = message.copy()
    shown.pop("provider_blocks", None)
    if reasoning:
        shown["reasoning"] = _cut(reasoning)
    if calls:
        shown["tool_calls"] = [
            {
                **call,
                "function": {
                    **call["function"],
                    "arguments": _short_arguments(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return shown


def _short_arguments(arguments: str) -> str:
    if len(arguments) <= COMPACT_CHARS:
        return arguments
    return orjson.dumps({"_compacted": _cut(arguments)}).decode()


def _cut(text: str) -> str:
    return text if len(text) <= COMPACT_CHARS else text[:COMPACT_CHARS] + "..."


def _unrecorded(options: AgentOptions) -> list[Message]:
    system = options.ephemeral_system_prompt
    messages = [Message(role="system", content=system)] if system else []
    messages += [
        Message(role=message.role, content=message.content) for message in options.prefill_messages
    ]
    return messages


def _insert(messages: Sequence[Message], unrecorded: Sequence[Message]) -> list[Message]:
    """A system message of the conversation's own wins over the ephemeral one.

    One in which only the runtime speaks is no such message, and is added to the ephemeral one.
    """
    if not messages or messages[0]["role"] != "system":
        return [*unrecorded, *messages]
    if messages[0].get("notes") and unrecorded[0]["role"] == "system":
        both = messages[0].copy()
        both["content"] = f"{unrecorded[0]['content']}\n\n{both['content']}"
        return [both, *unrecorded[1:], *messages[1:]]
    own = [message for message in unrecorded if message["role"] != "system"]
    return [messages[0], *own, *messages[1:]]
