"""Reads ordinary conversations in one pass, several times as fast as `reading`.

Most records are ordinary. What is not is left to `read_conversation`, which has all the rules; for
ordinary records both give the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agent.reasoning import hides_reasoning
from agent.state.final_answer import RESERVED
from export.conversation.own_work import Own
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

_RARE = frozenset(("notes", "repairs", "reasoning", "tool_calls"))
"""Keys that the user's messages and ordinary results do not have."""

_SHOWN = (
    *("id", "prompt_id", "sample", "model", "model_returned", "api", "status", "status_reason"),
    *("api_calls", "sandbox", "seed", "config_digest"),
)
_EXACT = frozenset((str, int, bool, type(None)))


def conversation_of(record: Mapping[str, Any]) -> Conversation:
    """Parse a record, as `read_conversation` does; raises Rejected."""
    return read_ordinary(record) or read_conversation(record)


def read_ordinary(record: Mapping[str, Any]) -> Conversation | None:
    """The `read_conversation` of an ordinary record, with `said`; None for any other.

    Ordinary are records of completed conversations that begin with the user's message, perhaps
    after a system message. Then the model takes its turns, each with calls of offered tools and
    their results in the same order, and in its last turn answers with text. All content is text
    without flaws. Nothing was noted, repaired or inherited, and no tool gives the final answer.
    """
    tools = tools_of(record)
    if record["status"] != "completed" or once(tools, _has_reserved) or record.get("fork"):
        return None
    try:
        return _read(record, tools, names_of(tools))
    except (Rejected, ValueError):  # `read_conversation` finds and describes what is wrong
        return None


def shows_exact_numbers(record: Mapping[str, Any]) -> bool:
    """Whether the rows of an ordinary record hold only numbers that any JSON reader keeps exact.

    If not, there may be integers beyond 64 bits. Texts and arguments are read from text.
    """
    usage = record["usage"] or {}
    return _EXACT.issuperset(
        map(type, (*map(record.get, _SHOWN), *usage.values(), *record["row"].values()))
    )


def _has_reserved(tools: Tools) -> bool:
    return not RESERVED.isdisjoint(names_of(tools))


def _read(record: Mapping[str, Any], tools: Tools, offered: frozenset[str]) -> Conversation | None:
    """Raises Rejected and ValueError for some records that are not ordinary."""
    messages: Sequence[Mapping[str, Any]] = record["messages"]
    system: Any = ""
    place = 0
    if messages and messages[0]["role"] == "system":
        if "repairs" in messages[0]:
            return None
        system, place = messages[0].get("content"), 1
    turns = record["turns"]
    last = len(turns)
    if len(messages) == place or not last:
        return None
    message = messages[place]
    asked = message.get("content")
    is_plain = message["role"] == "user" and _RARE.isdisjoint(message)
    if not is_plain or type(system) is not str or type(asked) is not str:
        return None
    if not system or system.isspace():
        system = ""
    if not asked or asked.isspace() or holds_flaw(asked):
        return None
    place += 1
    start = place
    entries: list[Entry] = [Said(asked)]
    said = ["user", asked, ""]
    stats: dict[str, dict[str, Any]] = {}
    failed: list[Mapping[str, Any]] = []
    num_calls = with_reasoning = 0
    for number, turn in enumerate(turns, start=1):
        if place == len(messages):
            return None
        message = messages[place]
        place += 1
        content = message.get("content") or ""
        if message["role"] != "assistant" or "repairs" in message or "inherited" in turn:
            return None
        if type(content) is not str:
            return None
        own_reasoning = message.get("reasoning") or ""
        said += ("assistant", content, own_reasoning)
        reasoning, text = split_reasoning(message, number)
        if (reasoning and holds_flaw(reasoning)) or (text and holds_flaw(text)):
            return None
        hides = False
        if reasoning:
            with_reasoning += 1
        else:
            hides = hides_reasoning(message, turn.get("usage"))
        asked_calls = message.get("tool_calls")
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
            function = call["function"]
            call_id, name, sent = call["id"], function["name"], function["arguments"]
            content = result.get("content")
            if (
                name not in offered
                or result["role"] != "tool"
                or result["tool_call_id"] != call_id
                or type(content) is not str
                or not _RARE.isdisjoint(result)
            ):
                return None
            ids.add(call_id)
            arguments, value = parse_arguments(sent)
            calls.append(Call(call_id, name, arguments, value))
            is_error = bool(result.get("is_error"))
            results.append(Result(call_id, name, content, is_error))
            said += (name, sent)
            if (stat := stats.get(name)) is None:
                stat = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
            stat["count"] += 1
            if is_error:
                stat["failure"] += 1
                failed.append(result)
            else:
                stat["success"] += 1
        if len(ids) < len(calls):
            return None
        for answer in results:
            said += ("tool", answer.content, "")
        num_calls += len(calls)
        entries.append(Turn(number, reasoning, text, calls, results, 1, "model", hides))
    if place != len(messages):
        return None
    tool_stats = [stats[name] for name in sorted(stats)]
    own = Own(turns, start, messages[start:], tool_stats, last, with_reasoning, failed)
    return Conversation(
        system,
        entries,
        tools,
        True,
        record,
        own,
        metadata_for(record, "text", tool_stats, ()),
        num_calls,
        [],
        tuple(said),
    )
