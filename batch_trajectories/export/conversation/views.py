"""Counts of what the model saw differently from what a row shows."""

from __future__ import annotations

import msgspec

from agent.messages import SUMMARY
from agent.tokens import trimmed_replies
from agent.views.views import compacted_from
from batch_trajectories.runs.store.record_types import Record

COUNTS = (
    *("interrupted_calls", "workspace_lost", "rewritten_calls"),
    *("view_compacted", "summaries", "cut_results", "cut_by_export", "trimmed_replies"),
)
"""Keys of these counts in the metadata of a row."""


def views_of(record: Record) -> dict[str, int]:
    """The counts that are not zero, by key.

    `view_compacted` counts replies for which the model saw older messages shortened or as one of
    the `summaries`; `cut_results` counts results that it saw cut, which rows hold cut too;
    `workspace_lost` counts resumes without the files of the conversation, and `rewritten_calls`
    those of an agent that saw earlier messages in another form than the last call;
    `trimmed_replies` counts replies that the model later saw without the newlines around them.
    """
    counts = {"workspace_lost": sum(r.workspace_kept is False for r in record.resumes)}
    if changed := record.rewritten:
        main = record.threads[0].key
        calls = [one.exchanges for one in changed if one.thread == main]
        counts["rewritten_calls"] = len({number for numbers in calls for number in numbers})
    if record.view_compacted:
        counts |= _compacted(record)
    if (record.options or {}).get("observation_chars"):
        counts["cut_results"] = sum("whole_content" in m.details for m in record.messages)
    if record.view_trimmed:
        replies = [m.content for m in record.messages if m.role == "assistant"]
        counts["trimmed_replies"] = trimmed_replies(replies)
    return {key: count for key, count in counts.items() if count}


def _compacted(record: Record) -> dict[str, int]:
    turns, messages = record.turns, record.messages
    after = (record.options or {}).get("compact_after") or 0
    later = messages[compacted_from(msgspec.to_builtins(messages), after) :]
    replies = sum(message.role == "assistant" for message in later)
    # An empty or cut summary was not used and has no turn.
    begun = [
        inner.turns[0].started_at for inner in record.inner if inner.name == SUMMARY and inner.turns
    ]
    summarized = [turn for turn in turns if begun and turn.started_at > min(begun)]
    return {
        "view_compacted": max(min(replies, len(turns)), len(summarized)),
        "summaries": len(begun),
    }
