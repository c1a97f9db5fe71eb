"""Reads ordinary conversations in one pass, several times as fast as `reading`.

Most records are ordinary. What is not is left to `read_conversation`, which has all the rules; for
ordinary records both give the same. msgspec parses only what rows need, and checks all types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import orjson

from agent.reasoning import hides_reasoning
from agent.state.final_answer import RESERVED
from export.conversation.own_work import Counts, Own, kind_of_failure
from export.conversation.reading import (
    holds_flaw,
    metadata_for,
    read_conversation,
    split_reasoning,
)
from export.conversation.row_json import parse_arguments
from export.conversation.tools import Tools, names_of, once, tools_of
from export.conversation.turns import Call, Conversation, Entry, Result, Said, Turn
from export.conversation.validity import Rejected
from runs.store.record_types import CheckResult, OfferedTool, Resume, Score
from toolsets import exact_json

_ABSENT = msgspec.Raw(b"null")


class _Function(msgspec.Struct, gc=False):
    name: str
    arguments: str


class _Call(msgspec.Struct, gc=False):
    id: str
    function: _Function
    extra_content: msgspec.Raw = _ABSENT


class _Message(msgspec.Struct, gc=False):
    role: str
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    provider_blocks: msgspec.Raw = _ABSENT
    tool_call_id: str | None = None
    is_error: bool | None = None
    details: msgspec.Raw = _ABSENT
    notes: None = None
    repairs: None = None


class _Usage(msgspec.Struct, gc=False):
    reasoning_tokens: int | None = None


class _Tokens(msgspec.Struct, gc=False):
    prompt: msgspec.Raw = _ABSENT
    completion: msgspec.Raw = _ABSENT


class _Turn(msgspec.Struct, gc=False):
    finish_reason: str | None
    started_at: int | float
    duration_s: int | float
    usage: _Usage | None = None
    tokens: _Tokens | None = None
    inherited: msgspec.Raw = _ABSENT


class OrdinaryRecord(TypedDict):
    """The parts of a record that rows and statistics need, if it may be ordinary."""

    id: str
    status: Literal["completed"]
    prompt_id: str
    sample: int
    row: dict[str, Any]
    messages: list[_Message]
    turns: list[_Turn]
    tools: NotRequired[msgspec.Raw]  # msgspec has no required ones
    resumes: list[Resume]
    api_calls: int
    usage: dict[str, int | None] | None
    model: str
    model_returned: str | None
    api: str
    toolsets: list[str]
    sandbox: str | None
    seed: int | None
    config_digest: str
    status_reason: NotRequired[str | None]
    input_digest: NotRequired[str]
    check: NotRequired[CheckResult | None]
    scores: NotRequired[list[Score] | None]
    options: NotRequired[dict[str, Any] | None]
    view_compacted: NotRequired[bool]
    view_trimmed: NotRequired[bool]
    fork: NotRequired[None]
    agent: NotRequired[None]
    rewritten: NotRequired[None]
    finished_at: NotRequired[Any]


_parse = msgspec.json.Decoder(OrdinaryRecord).decode


def parse_ordinary(line: bytes) -> dict[str, Any] | None:
    """The parts of a record that may be ordinary; None if it cannot be.

    The line must be intact, because msgspec checks only the parts that it reads. Integers of any
    size are exact.
    """
    try:
        record: Any = _parse(line)
        record["tools"] = _shared_tools(bytes(record["tools"]))
    except (msgspec.MsgspecError, ValueError, KeyError, RecursionError):
        return None  # the general reader describes what is wrong
    parts: dict[str, Any] = record
    return parts


def conversation_of(record: Mapping[str, Any], line: bytes) -> Conversation:
    """Parse a record, as `read_conversation` does; raises Rejected."""
    if (parts := parse_ordinary(line)) is not None:
        parts["scores"] = record.get("scores")
        if (conversation := read_ordinary(parts)) is not None:
            return msgspec.structs.replace(conversation, record=record)
    return read_conversation(record)


def read_ordinary(record: dict[str, Any]) -> Conversation | None:
    """The conversation of what `parse_ordinary` gave, with `said`; None if it is not ordinary.

    Ordinary are records of completed conversations that begin with the user's message, perhaps
    after a system message. Then the model takes its turns, each with calls of offered tools and
    their results in the same order, and in its last turn answers with text. All content is text
    without flaws. Nothing was noted, repaired, inherited or shortened, and no tool gives the final
    answer.
    """
    tools = tools_of(record)
    options = record.get("options")
    is_seen_otherwise = record.get("view_compacted") or record.get("view_trimmed")
    if is_seen_otherwise or (options and options.get("observation_chars")):
        return None
    offered = once(tools, _ordinary_names)
    try:
        return None if offered is None else _read(record, tools, offered)
    except (Rejected, ValueError):  # `read_conversation` finds and describes what is wrong
        return None


@lru_cache(maxsize=64)
def _shared_tools(json: bytes) -> Tools:
    """The tools of a record, the same list for equal JSON."""
    tools: Tools = exact_json.loads(json)
    msgspec.convert(tools, list[OfferedTool])
    return tools


def _ordinary_names(tools: Tools) -> frozenset[str] | None:
    """The names of tools; None if one of them ends a conversation."""
    names = names_of(tools)
    return names if RESERVED.isdisjoint(names) else None


def _hides_reasoning(message: _Message, turn: _Turn) -> bool:
    calls = [
        {"extra_content": orjson.loads(bytes(call.extra_content))}
        for call in message.tool_calls or ()
    ]
    blocks = orjson.loads(bytes(message.provider_blocks))
    usage = None if turn.usage is None else {"reasoning_tokens": turn.usage.reasoning_tokens}
    return hides_reasoning({"provider_blocks": blocks, "tool_calls": calls}, usage)


def _read(record: dict[str, Any], tools: Tools, offered: frozenset[str]) -> Conversation | None:
    """Raises Rejected and ValueError for some records that are not ordinary."""
    messages: list[_Message] = record["messages"]
    turns: list[_Turn] = record["turns"]
    system = ""
    place = 0
    if messages and messages[0].role == "system":
        system, place = messages[0].content or "", 1
    last = len(turns)
    if len(messages) == place or not last:
        return None
    message = messages[place]
    asked = message.content
    if message.role != "user" or message.reasoning or message.tool_calls:
        return None
    if not system or system.isspace():
        system = ""
    if not asked or asked.isspace():
        return None
    place += 1
    start = place
    entries: list[Entry] = [Said(asked)]
    said = ["user", asked, ""]
    searched = [asked]
    stats: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    num_calls = with_reasoning = hidden = with_token_ids = 0
    started_at, ended_at = math.inf, -math.inf
    for number, turn in enumerate(turns, start=1):
        if place == len(messages):
            return None
        message = messages[place]
        place += 1
        content = message.content or ""
        own_reasoning = message.reasoning or ""
        if message.role != "assistant" or turn.inherited is not _ABSENT:
            return None
        if turn.started_at < started_at:
            started_at = turn.started_at
        if (end := turn.started_at + turn.duration_s) > ended_at:
            ended_at = end
        if (tokens := turn.tokens) is not None:
            with_token_ids += tokens.prompt is not _ABSENT and tokens.completion is not _ABSENT
        said += ("assistant", content, own_reasoning)
        reasoning, text = split_reasoning(own_reasoning, content, number)
        searched += reasoning, text
        hides = False
        if reasoning:
            with_reasoning += 1
        elif _hides_reasoning(message, turn):
            hides = True
            hidden += 1
        asked_calls = message.tool_calls
        if (number == last) == bool(asked_calls):
            return None
        if not text or text.isspace():
            if not asked_calls:
                return None
            text = ""
        if not asked_calls:
            entries.append(Turn(number, reasoning, text, [], [], 1, "model", hides))
            break
        calls: list[Call] = []
        results: list[Result] = []
        ids = set()
        found = messages[place : place + len(asked_calls)]
        if len(found) < len(asked_calls):
            return None
        place += len(found)
        for call, result in zip(asked_calls, found, strict=True):
            function = call.function
            call_id, name, sent = call.id, function.name, function.arguments
            observed = result.content
            if (
                name not in offered
                or result.role != "tool"
                or result.tool_call_id != call_id
                or observed is None
                or result.reasoning
                or result.tool_calls
            ):
                return None
            ids.add(call_id)
            arguments, value = parse_arguments(sent)
            calls.append(Call(call_id, name, arguments, value))
            is_error = bool(result.is_error)
            results.append(Result(call_id, name, observed, is_error))
            said += (name, sent)
            if (stat := stats.get(name)) is None:
                stat = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
            stat["count"] += 1
            if is_error:
                stat["failure"] += 1
                details = orjson.loads(bytes(result.details))
                if not isinstance(details, dict | None):
                    return None
                failures.append(kind_of_failure(details))
            else:
                stat["success"] += 1
        if len(ids) < len(calls):
            return None
        for answer in results:
            said += ("tool", answer.content, "")
        num_calls += len(calls)
        entries.append(Turn(number, reasoning, text, calls, results, 1, "model", hides))
    if place != len(messages) or holds_flaw("\n".join(searched)):
        return None
    tool_stats = [stats[name] for name in sorted(stats)]
    counts = Counts(
        tool_stats, last, with_reasoning, hidden, failures, with_token_ids, started_at, ended_at
    )
    own = Own(turns, start, messages[start:], counts)
    return Conversation(
        system,
        entries,
        tools,
        True,
        record,
        own,
        metadata_for(record, "text", tool_stats, (), turns[-1].finish_reason),
        num_calls,
        [],
        tuple(said),
    )
