"""The metadata of a row: facts of its record, and counts of what the model saw differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agent.messages.message import SUMMARY
from agent.messages.tokens import trimmed_replies
from batch_trajectories.export.conversation.own_work import interrupted_calls
from batch_trajectories.export.conversation.rewards import reward_facts
from batch_trajectories.export.conversation.row_json import compact_json
from batch_trajectories.export.conversation.texts import read_patch
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.conversation.validity import Rejected
from batch_trajectories.records.record_types import Record, StoredMessage

VIEW_COUNTS = (
    "interrupted_calls",
    "workspace_lost",
    "rewritten_calls",
    "view_compacted",
    "summaries",
    "cut_results",
    "cut_by_export",
    "trimmed_replies",
)
"""Keys of counts of what the model saw in another form than the row shows."""

COMMON_COLUMNS: Mapping[str, str] = {
    "tools": "string",
    "completed": "bool",
    "num_turns": "int64",
    "num_tool_calls": "int64",
    "has_reasoning": "bool",
    "metadata": "string",
}
"""The types of columns that rows of one conversation have, in order."""

_MAX_COLUMN_CHARS = 1000
_SCALARS = (bool, int, float)
_PROMPT_COLUMNS = frozenset(("prompt", "script"))
_CHECK_COLUMNS = _PROMPT_COLUMNS | {"setup", "check"}


def view_counts(record: Record) -> dict[str, int]:
    """Counts of what the model saw in another form than the row shows; zeros are left out.

    - `view_compacted`: replies for which the model saw older messages shortened or summarized
    - `summaries`: the summaries that it saw
    - `cut_results`: results that the model saw cut; rows hold them cut, too
    - `workspace_lost`: resumes without the files of the conversation
    - `rewritten_calls`: calls of an agent whose request had earlier messages in another form than
      the last request has
    - `trimmed_replies`: replies that the model later saw without the newlines around them
    """
    counts = {"workspace_lost": sum(r.workspace_kept is False for r in record.resumes)}
    if changed := record.rewritten:
        main = record.threads[0].key
        calls = [one.exchanges for one in changed if one.thread == main]
        counts["rewritten_calls"] = len({number for numbers in calls for number in numbers})
    if record.view_compacted:
        counts |= _count_compactions(record)
    if (record.options or {}).get("observation_chars"):
        counts["cut_results"] = sum("whole_content" in m.details for m in record.messages)
    if record.view_trimmed:
        replies = [m.content for m in record.messages if m.role == "assistant"]
        counts["trimmed_replies"] = trimmed_replies(replies)
    return {key: count for key, count in counts.items() if count}


def _count_compactions(record: Record) -> dict[str, int]:
    turns, messages = record.turns, record.messages
    after = (record.options or {}).get("compact_after") or 0
    replies = 0
    if after:
        from agent.views.views import first_compacted_reply

        later = messages[first_compacted_reply(msgspec.to_builtins(messages), after) :]
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


def record_metadata(
    record: Record,
    *,
    completion: str | None,
    stats: Sequence[Mapping[str, Any]],
    noted: Iterable[StoredMessage],
    finish_reason: str | None,
) -> dict[str, Any]:
    """The metadata of a row without the counts of reasoning, which depend on the style.

    `completion` is the way in which the answer was given, `stats` are counts of tool calls, `noted`
    are the messages whose notes and repairs count. Keys that most rows do not need are present only
    with a value.
    """
    metadata: dict[str, Any] = {
        "model": record.model,
        "model_returned": record.model_returned,
        "api": record.api,
        "status": record.status,
    }
    if record.status_reason:
        metadata["status_reason"] = record.status_reason
    if record.fork is not None:
        metadata["fork"] = model_lineage(record)
    if completion:
        metadata["completion"] = completion
    if (agent := record.agent) is not None:
        metadata["agent"] = {"name": agent.name, "version": agent.version}
    metadata["finish_reason"] = finish_reason
    metadata["prompt_id"] = record.prompt_id
    metadata["sample"] = record.sample
    metadata["toolsets"] = record.toolsets
    metadata["tool_stats"] = stats
    metadata["reasoning"] = None  # see `row_metadata`
    metadata["usage"] = record.usage
    resumes = record.resumes
    metadata["interrupted_calls"] = len(interrupted_calls(record))
    is_seen_otherwise = record.view_compacted or record.view_trimmed or record.rewritten
    if resumes or is_seen_otherwise or record.options:
        metadata.update(view_counts(record))
    if noted:
        notes, repairs = _notes_and_repairs(noted)
        if notes:
            metadata["notes"] = notes
        if repairs:
            metadata["repairs"] = repairs
    if record.check is not None or record.scores or record.options:
        metadata |= reward_facts(record)
    if record.check is not None:
        from batch_trajectories.export.conversation.leaks import find_leaks

        if leaks := find_leaks(record):
            metadata["leak_suspected"] = [leak._asdict() for leak in leaks]
    if record.diff is not None:
        with suppress(Rejected):
            metadata["patch"] = read_patch(record)
    if record.imported is not None:
        known = ("format", "file", "line", "tools_called")
        metadata["imported"] = {key: record.imported.get(key) for key in known}
    metadata["columns"] = _small_columns(record)
    metadata["sandbox"] = record.sandbox
    metadata["seed"] = record.seed
    metadata["config_digest"] = record.config_digest
    return metadata


def common_columns(conversation: Conversation) -> dict[str, Any]:
    """The last columns of a row of one conversation; see `COMMON_COLUMNS`."""
    metadata = row_metadata(conversation)
    return {
        "num_turns": conversation.num_turns,
        "num_tool_calls": conversation.num_tool_calls,
        "has_reasoning": metadata["reasoning"]["with_reasoning"] > 0,
        "metadata": compact_json(metadata),
    }


def row_metadata(conversation: Conversation) -> dict[str, Any]:
    """The metadata of a row, with counts of the reasoning that the row still has."""
    turns = conversation.own_turns
    with_reasoning = len([None for turn in turns if turn.reasoning])
    reasoning = {"assistant_turns": len(turns), "with_reasoning": with_reasoning}
    if with_reasoning < len(turns) and (hidden := sum(turn.hides_reasoning for turn in turns)):
        reasoning["hidden"] = hidden
    return {**conversation.metadata, "reasoning": reasoning}


def model_lineage(record: Record) -> dict[str, Any]:
    """The origin of a branch: `run`, `record`, its last shared `turn`, and the number `branch`.

    Empty if the record is no branch.
    """
    if (fork := record.fork) is None:
        return {}
    known = {"run": fork.run, "record": fork.record, "turn": fork.turn, "branch": fork.branch}
    return {key: value for key, value in known.items() if value is not None}


def _notes_and_repairs(messages: Iterable[StoredMessage]) -> tuple[dict[str, int], int]:
    """Counts of the runtime's notes to the model by rule, and of repaired tool names."""
    notes: list[str] = []
    repairs = 0
    for message in [message for message in messages if message.notes or message.repairs]:
        if message.notes and message.role in ("user", "tool"):
            notes += message.notes
        repairs += len(message.repairs or ())
    return dict(sorted(Counter(notes).items())) if notes else {}, repairs


def _small_columns(record: Record) -> dict[str, Any]:
    """Short columns of the dataset, to filter rows by; long values stay only in the record."""
    # A model must not learn what the check looks for, so `setup` and `check` are no metadata.
    hidden = _PROMPT_COLUMNS if record.check is None else _CHECK_COLUMNS
    return {
        name: value
        for name, value in record.row.items()
        if name not in hidden
        and (
            len(value) <= _MAX_COLUMN_CHARS
            if isinstance(value, str)
            else value is None or isinstance(value, _SCALARS)
        )
    }
