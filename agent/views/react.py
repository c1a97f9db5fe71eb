"""The text protocol for models without tool calling: Thought, Action, Observation, Final Answer.

The record has tool calls as with any model. The text that the model wrote is stored in
`provider_blocks`, so that it can be sent back.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from agent.messages.message import (
    FunctionCall,
    Message,
    Role,
    opens_reasoning,
    split_inline_reasoning,
)
from agent.models.model import Completion, Model, Request, StreamEvent
from batch_trajectories.basics import exact_json

API = "react"
_RULES = """\
You solve the task step by step, with these tools (name, description, JSON Schema of the input):
{tools}
Write exactly one step per reply, in this form:
Thought: what you know, what you still need to find out, and what to do next
Action: the name of one of the tools
Action Input: the tool's input, a JSON object
Then stop; the next message brings the result as "Observation: ...".
As soon as you know enough to answer completely, reply in this form instead:
Thought: why this is enough
Final Answer: your complete answer

Never write an Observation yourself. Never call the same tool twice with the same input. If a tool
returns an error, try another approach rather than the same call again."""
_TURN_LIMIT = "\nYou have at most {} replies; where you are stuck, answer with what you have found."
_ANSWER_NOW = "Call no more tools: reply with a Final Answer: only."
_ENDS_ACTION = ("action", "observation", "final answer")
# Possessive repeats: a reply of only blanks or marks must not take hours. A fence may also follow
# a label on its line.
_LABEL = (
    r"[ \t]*+(?P<bold>\*\*)?+[ \t]*+"
    r"(?P<label>thought|action[ \t]+input|action|observation|final[ \t]+answer)[ \t]*+"
    r"(?(bold)(?:\*\*[ \t]*+[::]|[::][ \t]*+(?:\*\*)?+)|[::])"
)
_FENCE = r"[ \t]*+(?P<fence>`{3,}+|~{3,}+)[^`\n]*+"
_MARK = re.compile(rf"^{_LABEL}|(?:^|(?<=[::*])){_FENCE}$", re.MULTILINE | re.IGNORECASE | re.ASCII)
_LABEL_NEXT = re.compile(rf"\s*+{_LABEL}", re.IGNORECASE | re.ASCII)
_BLOCK = re.compile(rf"{_FENCE}\n(?s:.*?)^[ \t]*+(?P=fence)[`~]*+[ \t\r]*+$", re.MULTILINE)
_FENCED = re.compile(r"(`{3,}+|~{3,}+)(?:[\w+-]*+[ \t\r]*+\n|(?:json\b)?)(.*)\1", re.DOTALL)


class ReActModel:
    """Asks `inner` in the text protocol; a request without tools is passed on unchanged."""

    def __init__(self, inner: Model, *, max_turns: int | None = None) -> None:
        self._inner = inner
        self._max_turns = max_turns

    async def complete(self, request: Request) -> Completion:
        """See `Model.complete`. Only text is streamed, since calls are known only at its end."""
        handler = request.on_delta

        def forward(event: StreamEvent) -> None:
            if handler is not None and event["type"] in ("text_delta", "thinking_delta"):
                handler(event)

        view = to_view(request, max_turns=self._max_turns)
        reply = await self._inner.complete(
            Request(
                view,
                on_delta=handler and forward,
                deadline=request.deadline,
                on_unreadable=request.on_unreadable,
                conversation=request.conversation,
            )
        )
        return read_completion(reply, request)


def to_view(request: Request, *, max_turns: int | None = None) -> list[Message]:
    """Convert the messages of a request for the wrapped model; the recorded ones do not change."""
    messages = list(request.messages)
    if request.tools:
        place = 1 if messages and messages[0]["role"] == "system" else 0
        messages.insert(place, Message(role="system", content=_rules(request.tools, max_turns)))
        if request.tool_choice == "none":
            messages.append(Message(role="user", content=_ANSWER_NOW))
    view: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", f"Observation: {content}"
        elif role == "assistant":
            # An earlier demand to answer stays, so that each request begins like the one before.
            if (demand := _protocol_block(message).get("after")) is not None:
                _append(view, "user", demand)
            content = _protocol_text(message)
        _append(view, role, content)
    return view


def _append(view: list[Message], role: Role, content: str) -> None:
    # Chat templates of small models refuse two messages of one role in a row.
    if view and view[-1]["role"] == role != "assistant":
        view[-1]["content"] += "\n\n" + content
    else:
        view.append(Message(role=role, content=content))


def _rules(tools: Sequence[Mapping[str, Any]], max_turns: int | None) -> str:
    lines = []
    for function in (tool["function"] for tool in tools):
        description = " ".join(function.get("description", "").split())
        schema = exact_json.dumps(function.get("parameters", {})).decode()
        lines.append(f"- {function['name']}: {description} {schema}")
    limit = "" if max_turns is None else _TURN_LIMIT.format(max_turns)
    return _RULES.format(tools="\n".join(lines)) + limit


def _protocol_block(message: Message) -> Mapping[str, Any]:
    """The block that `read_completion` stored with a reply; empty for other messages."""
    blocks = message.get("provider_blocks")
    return blocks["blocks"][0] if blocks is not None and blocks["api"] == API else {}


def _protocol_text(message: Message) -> str:
    """The text of an assistant message as it was written; other messages in protocol form."""
    if block := _protocol_block(message):
        return str(block["text"])
    content, calls = message["content"], message.get("tool_calls", ())
    if not calls and (not content.strip() or _LABEL_NEXT.match(content)):
        return content
    lines = [message.get("reasoning", ""), content if calls else ""]
    lines = [f"Thought: {thought}" for thought in lines if thought.strip()]
    for function in (call["function"] for call in calls):
        lines += [f"Action: {function['name']}", f"Action Input: {function['arguments'] or '{}'}"]
    return "\n".join(lines if calls else [*lines, f"Final Answer: {content}"])


def read_completion(completion: Completion, request: Request) -> Completion:
    """Convert a reply of the wrapped model to the recorded form; native calls do not change."""
    written, message = completion.message["content"], completion.message.copy()
    if not request.tools or message.get("tool_calls") or not written.strip():
        return completion
    inline, text = split_inline_reasoning(written)
    step = parse_step(text)
    thoughts = map(str.strip, (message.get("reasoning", ""), inline or "", *step.thoughts))
    if reasoning := "\n\n".join(dict.fromkeys(filter(None, thoughts))):
        message["reasoning"] = reasoning
    message["content"] = step.content
    extra = dict(completion.extra or {})
    if unknown := _unknown_fields(message):
        extra["message"] = unknown
    block = {"text": written.removesuffix(step.cut)}
    if request.tool_choice == "none":
        block["after"] = _ANSWER_NOW
    message["provider_blocks"] = {"api": API, "blocks": [block]}
    if step.cut:
        message["repairs"] = [*message.get("repairs", ()), {"call": "", "cut": step.cut}]
    finish_reason = completion.finish_reason
    is_whole = finish_reason in ("stop", "tool_calls")
    if step.action:
        arguments = _arguments(step.action_input, step.action, request.tools)
        function = FunctionCall(name=step.action, arguments=arguments)
        message["tool_calls"] = [{"id": "", "type": "function", "function": function}]
    elif is_whole and step.content == text and text.strip() and request.tool_choice == "auto":
        # Plain text is no mistake if calls were not allowed or the end is missing.
        message["unusable"] = "no_action"
    if is_whole:
        finish_reason = "tool_calls" if step.action else "stop"
    return dataclasses.replace(
        completion, message=message, finish_reason=finish_reason, extra=extra or None
    )


def _unknown_fields(message: Message) -> list[dict[str, Any]]:
    """The unknown fields of the wrapped model's reply, which are recorded but not sent back."""
    blocks = message.get("provider_blocks", {"blocks": []})["blocks"]
    texts = ("content", "reasoning", "reasoning_content", "text")
    unknown = [{key: block[key] for key in block if key not in texts} for block in blocks]
    return [block for block in unknown if block.keys() - {"type"}]


class Step(NamedTuple):
    """One parsed reply; `content` is the answer, or the whole reply if it has no step."""

    thoughts: Sequence[str]
    content: str
    action: str = ""
    """The name of a tool; "" if the reply has no action."""
    action_input: str = ""
    cut: str = ""
    """Text after the step, which is cut off: the model wrote it without a result."""


def parse_step(text: str) -> Step:
    """Parse a reply. The first action that names a tool wins over any answer."""
    thoughts: list[str] = []
    answers: list[str] = []
    action, action_input, cut = "", None, ""
    for label, start, value in () if opens_reasoning(text) else _sections(text):
        # Text after an action with its input was written without the result of the action.
        if action and label and (action_input is not None or label in _ENDS_ACTION):
            cut = text[start:]
            break
        if label == "final answer":
            answers.append(value)
        elif label == "action":
            name, _, below = value.partition("\n")
            # The input may have no label.
            action, action_input = name.strip(" \t\r*`\"'"), below.strip() or None
        elif label == "action input" and action:
            action_input = value
        else:
            thoughts.append(value)
    if not action and not answers:
        return Step((), text)
    content = "" if action else "\n\n".join(dict.fromkeys(answers))
    return Step(
        thoughts=thoughts, content=content, action=action, action_input=action_input or "", cut=cut
    )


class _Head(NamedTuple):
    """The beginning of a section: its label or "", and the indices of its start and its body."""

    label: str
    start: int
    body: int


class _Section(NamedTuple):
    """A section of a reply; `label` is "" for a text without one."""

    label: str
    start: int
    text: str


def _sections(text: str) -> Iterator[_Section]:
    """Split a reply into its sections, but not within fenced blocks.

    A fence around labels or around the whole reply is no block, nor is one that is never closed.
    An observation before any action is part of the text around it.
    """
    heads = [_Head("", 0, 0)]
    position, has_action, is_wrapped, has_unclosed = 0, False, False, False
    while mark := _MARK.search(text, position):
        start, position = mark.span()
        label, fence, body = heads[-1]
        has_text = bool(text[body:start].strip())
        if mark["label"]:
            heading = " ".join(mark["label"].lower().split())
            has_action |= heading == "action"
            if has_action or heading != "observation":
                is_fenced = is_wrapped and not label and not has_text
                heads.append(_Head(heading, fence if is_fenced else start, position))
            continue
        # If one fence has no end, no later one has one: do not search again.
        block = None if has_unclosed else _BLOCK.match(text, start)
        has_unclosed |= block is None
        is_whole = block is not None and block[0].strip() == text.strip()
        opens = is_whole or _LABEL_NEXT.match(text, position)
        # An input is at most one block; in an answer only the last fence can be the outer one.
        is_over = block is None if label == "final answer" else has_text
        closes = is_wrapped and is_over and mark[0].strip() == mark["fence"]
        if closes or (opens and label != "final answer" and (has_text or label != "action input")):
            is_wrapped = not closes
            heads.append(_Head("", start, position))
        elif block:
            position = block.end()
    heads.append(_Head("", len(text), 0))
    for head, following in pairwise(heads):
        value = text[head.body : following.start].strip()
        # Bold text that begins before the label and does not end with it ends with its line.
        if text.count("**", head.start, head.body) == 1:
            value = re.sub(r"(?m)\*\*[ \t\r]*$", "", value, count=1)
        yield _Section(head.label, head.start, value)


def _arguments(given: str, name: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """Convert the input of an action to the text of a JSON object, if it is or means one.

    A plain text means the only text parameter of the tool. Any other input does not change.
    """
    text = fenced[2].strip() if (fenced := _FENCED.fullmatch(given)) else given
    # A broken object is a mistake that the model must see, not a plain string.
    if not text or text.startswith("{"):
        return text or "{}"
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    schema = schemas.get(name, {})
    strings = []
    for key, kind in schema.get("properties", {}).items():
        if any("string" in option.get("type", ()) for option in (kind, *kind.get("anyOf", ()))):
            strings.append(key)
    if len(strings) > 1:
        strings = [key for key in strings if key in schema.get("required", ())]
    if len(strings) != 1:
        return text
    try:
        loaded = exact_json.loads(text)
    except exact_json.JSONDecodeError:
        loaded = None
    return exact_json.dumps({strings[0]: loaded if isinstance(loaded, str) else text}).decode()
