"""Reads conversations of the usual shape in one pass, twice as fast as `reading`.

The prompt, then turns of this run's model, each with calls of offered tools and their results in
the same order, and an answer in text. Nothing was inherited, attached or said twice, and no text
may be read as structure.
Whatever differs is left to `read_conversation`, which has all the rules: both give the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from agent.messages.leaked_calls import holds_thought, leaked_call, may_leak
from agent.messages.parts import parts_of
from agent.state.final_answer import RESERVED
from batch_trajectories.export.conversation.own_work import (
    Counts,
    Own,
    is_reasoning_hidden,
    kind_of_failure,
)
from batch_trajectories.export.conversation.row_json import holds_marker, parse_arguments
from batch_trajectories.export.conversation.tools import names_of, once
from batch_trajectories.export.conversation.turns import Call, Entry, Result, Said, Turn
from batch_trajectories.runs.store.record_types import Record, Tools


def usual_entries(record: Record, own: Own) -> list[Entry] | None:
    """The entries of a completed conversation, None if it is not of the usual shape.

    Start and counts of `own` are made on the way.
    """
    offered = once(record.tools, _names_of_usual)
    messages, turns = record.messages, own.turns
    place = 1 if messages and messages[0].role == "system" else 0
    last = len(turns)
    if (
        offered is None
        or record.agent is not None
        or last != len(record.turns)
        or len(messages) == place
    ):
        return None
    opening = messages[place]
    text = opening.content
    if opening.role != "user" or opening.provider_blocks is not None or not text or text.isspace():
        return None
    place += 1
    first = place
    entries: list[Entry] = [Said(text)]
    texts = [text]
    stats: dict[str, dict[str, Any]] = {}
    failures: list[str] = []
    with_reasoning = hidden = with_token_ids = 0
    started_at, ended_at = math.inf, -math.inf
    for number, turn in enumerate(turns, start=1):
        if place == len(messages):
            return None
        message = messages[place]
        place += 1
        text, reasoning = message.content, message.reasoning or ""
        blocks = message.provider_blocks
        if message.role != "assistant" or "<" in text:
            return None
        texts += (text, reasoning)
        if blocks is not None and parts_of("assistant", blocks.blocks):
            return None
        if turn.started_at < started_at:
            started_at = turn.started_at
        if (end := turn.started_at + turn.duration_s) > ended_at:
            ended_at = end
        if turn.tokens is not None:
            with_token_ids += turn.has_ids
        hides = False
        if reasoning and not reasoning.isspace():
            with_reasoning += 1
        else:
            reasoning = ""
            hides = is_reasoning_hidden(message, turn.reasoning_tokens)
            hidden += hides
        wanted = message.tool_calls
        if (number == last) == bool(wanted):
            return None
        if not text or text.isspace():
            if not wanted:
                return None
            text = ""
        if not wanted:
            entries.append(Turn(number, reasoning, text, [], [], 1, "model", hides))
            break
        following = messages[place : place + len(wanted)]
        if len(following) < len(wanted):
            return None
        place += len(following)
        calls: list[Call] = []
        results: list[Result] = []
        for call, result in zip(wanted, following, strict=True):
            function = call.function
            name = function.name
            if (
                name not in offered
                or result.role != "tool"
                or result.tool_call_id != call.id
                or result.provider_blocks is not None
            ):
                return None
            try:
                calls.append(Call(call.id, name, *parse_arguments(function.arguments)))
            except ValueError:  # no JSON object
                return None
            is_error = bool(result.is_error)
            results.append(Result(call.id, name, result.content, is_error))
            if (stat := stats.get(name)) is None:
                stat = stats[name] = {"tool": name, "count": 0, "success": 0, "failure": 0}
            stat["count"] += 1
            stat["failure" if is_error else "success"] += 1
            if is_error:
                failures.append(kind_of_failure(result.details))
        if len(calls) > 1 and len({call.id for call in calls}) < len(calls):
            return None
        entries.append(Turn(number, reasoning, text, calls, results, 1, "model", hides))
    said = "\n".join(texts)
    if place != len(messages) or holds_marker(said):
        return None
    if (may_leak(said) or "[/THINK]" in said) and _holds_what_servers_read(entries, offered):
        return None
    counts = Counts(
        [stats[name] for name in sorted(stats)],
        last,
        with_reasoning,
        hidden,
        failures,
        0,
        len(messages) - first - last,
        with_token_ids,
        started_at,
        ended_at,
    )
    own.know(first, counts)
    return entries


def _holds_what_servers_read(entries: list[Entry], tools: Collection[str]) -> bool:
    for entry in entries:
        if type(entry) is Turn:
            has_calls = bool(entry.calls)
            if holds_thought(entry.text):
                return True
            if leaked_call(entry.text, entry.reasoning, has_calls=has_calls, tools=tools):
                return True
    return False


def _names_of_usual(tools: Tools) -> frozenset[str] | None:
    """The names of tools; None if one of them ends a conversation."""
    names = names_of(tools)
    return names if RESERVED.isdisjoint(names) else None
