"""Views that shorten older turns, and that add messages which are not recorded.

A view is a model that wraps a model: it changes the messages of a request, never the record. The
record says that a view was used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import orjson
from msgspec.structs import replace

from agent.messages.message import Message
from agent.models.model import Completion, Model, Request
from agent.options import AgentOptions

COMPACT_CHARS = 120
"""Maximum characters of reasoning and of arguments that are shown of older turns."""

View = Callable[[Sequence[Message]], Sequence[Message]]
"""Changes the messages that a model is shown."""


class ViewingModel:
    """A model that is shown `view(messages)`."""

    def __init__(self, model: Model, view: View) -> None:
        self._model = model
        self._view = view

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`."""
        shown = self._view(request.messages)
        return await self._model.complete(replace(request, messages=shown))


def add_views(model: Model, options: AgentOptions) -> Model:
    """Wrap `model` in the views that `options` ask for."""
    if options.ephemeral_system_prompt or options.prefill_messages:
        unrecorded = _unrecorded_messages(options)
        model = ViewingModel(model, lambda messages: _insert(messages, unrecorded))
    if options.compact_after:
        model = ViewingModel(model, lambda messages: compact(messages, options.compact_after))
    return model


def compact(messages: Sequence[Message], after: int) -> list[Message]:
    """Shorten reasoning and call arguments of replies that `after` replies with text follow."""
    shown = list(messages)
    later_texts = 0
    for n in range(len(shown) - 1, -1, -1):
        message = shown[n]
        if message["role"] == "assistant":
            if later_texts >= after:
                shown[n] = _shorten(message)
            later_texts += bool(message["content"].strip())
    return shown


def first_compacted_reply(messages: Sequence[Message], after: int) -> int:
    """The index of the first reply whose request had shortened replies, as all later ones had.

    The number of messages if there is no such reply.
    """
    if not after:
        return len(messages)
    texts = 0
    texts_at_first_cut: int | None = None
    for n, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if texts_at_first_cut is not None and texts >= texts_at_first_cut:
            return n
        texts += bool(message["content"].strip())
        # The first long reply is shortened once `after` replies with text follow it.
        if texts_at_first_cut is None and _shorten(message) is not message:
            texts_at_first_cut = texts + after
    return len(messages)


def _shorten(message: Message) -> Message:
    reasoning = message.get("reasoning", "")
    calls = message.get("tool_calls", [])
    long_calls = [call for call in calls if len(call["function"]["arguments"]) > COMPACT_CHARS]
    if len(reasoning) <= COMPACT_CHARS and not long_calls:
        return message
    shown = message.copy()
    shown.pop("provider_blocks", None)  # a provider refuses a signed block that was changed
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


def _unrecorded_messages(options: AgentOptions) -> list[Message]:
    system = options.ephemeral_system_prompt
    messages = [Message(role="system", content=system)] if system else []
    messages += [
        Message(role=message.role, content=message.content) for message in options.prefill_messages
    ]
    return messages


def _insert(messages: Sequence[Message], unrecorded: Sequence[Message]) -> list[Message]:
    """Insert the messages that are not recorded.

    The conversation's own system message replaces the ephemeral one; a system message that the
    runtime made is appended to it.
    """
    if not messages or messages[0]["role"] != "system":
        return [*unrecorded, *messages]
    if messages[0].get("notes") and unrecorded[0]["role"] == "system":
        both = messages[0].copy()
        both["content"] = f"{unrecorded[0]['content']}\n\n{both['content']}"
        return [both, *unrecorded[1:], *messages[1:]]
    others = [message for message in unrecorded if message["role"] != "system"]
    return [messages[0], *others, *messages[1:]]


# The preparation: a conversation before the main one that gathers context for it.
#
# It may use the same tools, but must not do the task itself. It writes its findings as lines
# `@name := value`; these are added to the prompts of the main conversation, numbered.

_INSTRUCTION = (
    "You prepare context for another agent. Do not do the request itself: only find out what the "
    "preparation asks for. End with one line for each thing found, in the form\n"
    "@name := value\n"
    "and nothing else."
)

_FINDING = re.compile(r"^\s*@(?P<name>[A-Za-z0-9_-]+)\s*(?::=|:|=)\s*(?P<value>.*\S)\s*$", re.M)


def preparation_opening(task: str, prompt: Sequence[Message]) -> list[Message]:
    """The opening of a preparation; `prompt` is the opening of the main conversation."""
    request = "\n\n".join(m["content"] for m in prompt if m["role"] == "user")
    text = f"Preparation:\n{task}\n\nThe request that is being prepared:\n{request}"
    return [Message(role="system", content=_INSTRUCTION), Message(role="user", content=text)]


def findings_in(text: str) -> list[str]:
    """The values that a preparation found, in order, without quotes around them."""
    return [_strip_quotes(match["value"]) for match in _FINDING.finditer(text)]


def add_findings(prompt: Sequence[Message], findings: Sequence[str]) -> list[Message]:
    """Append the findings to the system message and the last message of `prompt`.

    The system message of a conversation that has already begun does not change.
    """
    if not findings:
        return list(prompt)
    pieces = "\n".join(
        '@context-piece-{} := "{}"'.format(n, value.replace('"', '\\"'))
        for n, value in enumerate(findings, start=1)
    )
    last = len(prompt) - 1
    is_new = all(message["role"] != "assistant" for message in prompt)
    messages = []
    for n, message in enumerate(prompt):
        if n == last or (is_new and message["role"] == "system"):
            message = message.copy()
            message["content"] += f"\n\n{pieces}"
        messages.append(message)
    return messages


def _strip_quotes(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'`":
        return value[1:-1]
    return value
