"""What of a conversation its model did not see as a row shows it, found in its record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent.messages import SUMMARY
from agent.views.views import compacted_from

COUNTS = (
    *("interrupted_calls", "workspace_lost"),
    *("view_compacted", "summaries", "cut_results", "cut_by_export"),
)
"""Keys of the metadata of a row that say so."""


def views_of(record: Mapping[str, Any]) -> dict[str, int]:
    """Counts by their keys, of those that there are.

    `view_compacted` are the replies that were asked for with older messages in short or as one of
    the `summaries`; `cut_results` those results that the model saw cut, as they are in a row too;
    `workspace_lost` how often the conversation went on without the files that it had made.
    """
    counts = {"workspace_lost": sum(r.get("workspace_kept") is False for r in record["resumes"])}
    if record.get("view_compacted"):
        counts |= _compacted(record)
    if (record.get("options") or {}).get("observation_chars"):
        messages = record["messages"]
        counts["cut_results"] = sum("whole_content" in (m.get("details") or ()) for m in messages)
    return {key: count for key, count in counts.items() if count}


def _compacted(record: Mapping[str, Any]) -> dict[str, int]:
    turns, messages = record["turns"], record["messages"]
    after = (record.get("options") or {}).get("compact_after") or 0
    later = messages[compacted_from(messages, after) :]
    replies = sum(message["role"] == "assistant" for message in later)
    # One that was empty or cut was not used, and is no turn of its conversation.
    begun = [
        inner["turns"][0]["started_at"]
        for inner in record.get("inner") or ()
        if inner["name"] == SUMMARY and inner["turns"]
    ]
    summarized = [turn for turn in turns if begun and turn["started_at"] > min(begun)]
    return {
        "view_compacted": max(min(replies, len(turns)), len(summarized)),
        "summaries": len(begun),
    }
