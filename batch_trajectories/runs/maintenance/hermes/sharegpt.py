"""Convert a row of a hermes-agent trajectory file to the events of a conversation.

The format is lossy: the prompt's own system message, times and tokens are unknown, and whether a
call failed is guessed from the text of its result, as in hermes-agent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent.messages.message import Event, Message, NoteEvent, ReplyEvent, ResultEvent, ToolCall
from agent.messages.reasoning import split_inline_reasoning
from agent.models.parsing import object_of
from agent.state.trajectory import Trajectory

_TOOLS = re.compile(r"<tools>\s*(\[.*\])\s*</tools>", re.DOTALL)
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ImportedConversation:
    """The conversation of a row."""

    prompt: str
    trajectory: Trajectory
    tools: list[dict[str, Any]]
    """Schemas as they were offered."""

    @property
    def is_answered(self) -> bool:
        """Whether it ends with a message of the model without tool calls."""
        last = self.trajectory.messages[-1]
        return last["role"] == "assistant" and not last.get("tool_calls")


def read_conversation(
    entries: Sequence[Mapping[str, Any]], *, model: str | None, at: float
) -> ImportedConversation:
    """Read the `conversations` of a row; `at` (epoch seconds) is when it was saved.

    Raises `ValueError` with the reason if it is not in this format.
    """
    kinds = [entry.get("from") for entry in entries if isinstance(entry, dict)]
    if kinds[:2] != ["system", "human"] or len(kinds) != len(entries):
        raise ValueError(f"it begins with {kinds[:2]} instead of system and human")
    values = [_text(entry.get("value"), entry["from"]) for entry in entries]
    prompt = values[1]
    events: list[Event] = []
    ids: set[str] = set()
    turn = 0
    calls: list[ToolCall] = []
    for kind, value in zip(kinds[2:], values[2:], strict=True):
        if kind == "gpt":
            turn += 1
            reply = _reply(value, turn, model, at)
            calls = reply["message"].get("tool_calls", [])
            events.append(reply)
        elif kind == "tool":
            events += _results(value, calls, turn, at, ids)
        elif kind == "human":
            events.append(NoteEvent(kind="note", turn=turn, reason="human", text=value, at=at))
        else:
            raise ValueError(f"an entry is from {kind!r}")
    if not turn:
        raise ValueError("it has no message of the model")
    opening = [Message(role="user", content=prompt)]
    return ImportedConversation(prompt, Trajectory(opening, events), _tools(values[0]))


def _text(value: Any, who: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"the value of a {who} entry is not text")
    return value


def _tools(system: str) -> list[dict[str, Any]]:
    found = _TOOLS.search(system)
    if found is None:
        raise ValueError("its system entry has no list of tools")
    return [
        {
            "type": "function",
            "function": {
                "name": str(tool["name"]),
                "description": str(tool.get("description") or ""),
                "parameters": object_of(tool, "parameters"),
            },
        }
        for tool in _DECODER.decode(found[1])
    ]


def _reply(value: str, turn: int, model: str | None, at: float) -> ReplyEvent:
    reasoning, rest = split_inline_reasoning(value)
    text, _, tail = rest.partition("<tool_call>")
    calls = [
        ToolCall(
            id=f"call_{turn}_{number}",
            type="function",
            function={
                "name": str(call["name"]),
                "arguments": json.dumps(call.get("arguments") or {}, ensure_ascii=False),
            },
        )
        for number, call in enumerate(_blocks("<tool_call>" + tail if tail else "", "tool_call"))
    ]
    message = Message(role="assistant", content=text.strip())
    if reasoning:
        message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return ReplyEvent(
        kind="reply",
        turn=turn,
        message=message,
        finish_reason="tool_calls" if calls else "stop",
        usage=None,
        cost_usd=None,
        model=model,
        response_id=None,
        started_at=at,
        duration_s=0.0,
    )


def _results(
    value: str, calls: list[ToolCall], turn: int, at: float, ids: set[str]
) -> Iterator[ResultEvent]:
    """The results of a tool entry, in call order; calls get the ids in their results."""
    responses = list(_blocks(value, "tool_response"))
    if len(responses) > len(calls):
        raise ValueError(f"turn {turn}: {len(responses)} results for {len(calls)} calls")
    for number, (call, response) in enumerate(zip(calls, responses, strict=False)):
        own = response.get("tool_call_id")
        if isinstance(own, str) and own and own not in ids:
            call["id"] = own
        ids.add(call["id"])
        content = response.get("content")
        text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        message = Message(
            role="tool",
            content=text,
            tool_call_id=call["id"],
            name=call["function"]["name"],
            is_error=_reads_like_an_error(content),
        )
        yield ResultEvent(
            kind="result", turn=turn, call=number, message=message, started_at=at, duration_s=0.0
        )


def _blocks(text: str, tag: str) -> Iterator[dict[str, Any]]:
    """The JSON objects between tags; their texts may contain the tags, too."""
    rest = text.strip()
    while rest:
        if not rest.startswith(f"<{tag}>"):
            raise ValueError(f"text between <{tag}> blocks: {rest[:40]!r}")
        rest = rest.removeprefix(f"<{tag}>").lstrip()
        block, end = _DECODER.raw_decode(rest)
        rest = rest[end:].lstrip()
        if not isinstance(block, dict) or not rest.startswith(f"</{tag}>"):
            raise ValueError(f"a <{tag}> block without an object, or not closed")
        yield block
        rest = rest.removeprefix(f"</{tag}>").lstrip()


def _reads_like_an_error(content: Any) -> bool:
    if isinstance(content, dict):
        inner = content.get("content")
        nested = isinstance(inner, dict) and inner.get("error") is not None
        return content.get("error") is not None or nested or content.get("success") is False
    if isinstance(content, str):
        return not content.strip() or content.lstrip().lower().startswith("error")
    return False
