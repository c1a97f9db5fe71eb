"""A trajectory as a row of the report's table, without its messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from agent.messages.message import USER_TURN, split_inline_reasoning
from batch_trajectories.export.conversation.leaks import find_leaks
from batch_trajectories.export.conversation.own_work import AuthoredWork
from batch_trajectories.export.conversation.turns import tool_names
from batch_trajectories.export.statistics.cache_use import (
    compute_cached_share,
    count_cached_tokens,
    missed_turns,
)
from batch_trajectories.records.checks import MAIN, expected_text, judge_record, record_rewards
from batch_trajectories.records.record_types import (
    CutCall,
    Record,
    StoredConversation,
    StoredMessage,
    StoredTurn,
)

_SNIPPET_CHARS = 140

NOT_OFFERED = "(not offered)"
"""Stands for all tools that models invented: their number has no limit."""


def make_table_row(record: Record, own: AuthoredWork | None = None) -> dict[str, Any]:
    """One row of the table, JSON-ready and small; `own` is `Own(record)`, if it is known.

    `tools` is {name: [calls, failed calls]}, `failures` {kind: calls} with kind `reported` for
    failures that a tool reported itself; `duration_s` is that of `seconds_at_work`; `flags` name
    unusual properties of the conversation. `missed_turns` missed the prompt cache.
    """
    own = own or AuthoredWork(record)
    turns, replies = own.turns, own.messages
    question = _last_content(record.messages[: own.start], "user")
    usage = record.usage or {}
    judgement = judge_record(record)
    tools = _tools(record, own)
    missed = missed_turns(record)
    leaks = find_leaks(record)
    return {
        "id": record.id,
        "status": record.status,
        "reason": record.status_reason,
        "error": None if record.error is None else record.error.error_class,
        "prompt": _snippet(question or _prompt(record.row)),
        "answer": _snippet(_last_content(replies, "assistant")),
        "expected": None if (expected := expected_text(record.row)) is None else _snippet(expected),
        "prompt_id": record.prompt_id,
        "sample": record.sample,
        "model": record.model,
        "turns": len(turns),
        "calls": sum([calls for calls, _ in tools.values()]),
        "failed_calls": sum([failed for _, failed in tools.values()]),
        "input_tokens": usage.get("input_tokens"),
        "output_tokens": usage.get("output_tokens"),
        "cached_tokens": count_cached_tokens(record),
        "cached_share": compute_cached_share(record),
        "cache_misses": len(missed),
        "missed_turns": missed,
        "cost_usd": record.cost_usd,
        "duration_s": round(seconds_at_work(record), 3),
        "finished_at": record.finished_at,
        "passed": judgement.passed,
        "reward": judgement.reward,
        "rewards": _named_rewards(record),
        "reasoned": own.counts.with_reasoning,
        "leaks": len(leaks),
        "leak_calls": [f"turn {leak.turn}: {leak.evidence}" for leak in leaks],
        "tools": tools,
        "failures": _failures(own),
        "flags": find_flags(record),
    }


def seconds_at_work(record: Record) -> float:
    """The time of all model and tool calls, as `--max_conversation_s` counts it.

    Without the parent's turns of a branch, and without waits as far as the record says them.
    """
    seconds, latest = 0.0, -math.inf
    for began, ended in sorted(_spans(record)):
        if ended > latest:  # calls that overlap count once
            seconds += ended - (began if began > latest else latest)
            latest = ended
    return seconds


def _spans(part: StoredConversation) -> list[tuple[float, float]]:
    calls: list[StoredTurn | CutCall] = [*part.own_turns, *part.cut_calls]
    calls += [reply for reply in part.discarded if reply.inherited is None]
    spans = [
        (call.started_at + (call.waited_s or 0.0), call.started_at + call.duration_s)
        for call in calls
    ]
    spans += [
        (tool.started_at, tool.started_at + (tool.duration_s or 0.0))
        for tool in part.own_tool_calls
    ]
    for inner in part.inner:
        spans += _spans(inner)
    return spans


def find_flags(record: Record) -> list[str]:
    """Unusual properties of a conversation, which the report can filter by.

    Without those that a branch has from its parent.
    """
    flags = []
    if record.inner:
        flags.append("inner conversations")
    # A note on the last shared turn was added after the fork.
    parents = 0 if record.fork is None else record.fork.turn
    if any(note.turn >= parents and note.reason != USER_TURN for note in record.notes):
        flags.append("notes")
    if any(reply.inherited is None for reply in record.discarded):
        flags.append("discarded replies")
    if record.resumes:
        flags.append("resumed")
    if record.set_aside:
        flags.append("calls set aside")
    if record.view_compacted:
        flags.append("compacted")
    judgement = judge_record(record)
    if (passed := judgement.passed) is not None:
        flags.append("passed" if passed else "not passed")
    if judgement.error is not None:
        flags.append("check without result")
    return flags


def _named_rewards(record: Record) -> dict[str, float] | None:
    """All rewards by name; None if there is only the one that is shown anyway."""
    named = record_rewards(record).by_name
    return dict(named) if named and named.keys() != {MAIN} else None


def _tools(record: Record, own: AuthoredWork) -> dict[str, tuple[int, int]]:
    offered = tool_names(record.tools)
    counts: dict[str, tuple[int, int]] = {}
    for stats in own.counts.tools:
        name = stats["tool"] if stats["tool"] in offered else NOT_OFFERED
        calls, failed = counts.get(name, (0, 0))
        counts[name] = (calls + stats["count"], failed + stats["failure"])
    return counts


def _failures(own: AuthoredWork) -> dict[str, int]:
    kinds = own.counts.failures
    return {kind: kinds.count(kind) for kind in kinds}


def _last_content(messages: Sequence[StoredMessage], role: str) -> str:
    for message in reversed(messages):
        if message.role == role:
            text = message.content
            return split_inline_reasoning(text).rest if "<" in text else text
    return ""


def _prompt(row: Mapping[str, Any]) -> str:
    """The prompt of a row without a conversation."""
    prompt = row.get("prompt")
    return prompt if isinstance(prompt, str) else ""


def _snippet(text: str) -> str:
    head = " ".join(text[: 4 * _SNIPPET_CHARS].split())
    return head if len(head) <= _SNIPPET_CHARS else head[: _SNIPPET_CHARS - 1] + "…"
