"""Conversations cut into one for each turn of the model, for templates that strip old reasoning.

Such templates (Qwen3 and others) show the reasoning of turns since the last user message only. In a
row of the whole conversation earlier turns would be learnt without their reasoning.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import msgspec

from batch_trajectories.export.conversation.style import Style, styled
from batch_trajectories.export.conversation.tools import names_of
from batch_trajectories.export.conversation.turns import Conversation, Entry, Said, Turn


def cut_by_turn(conversation: Conversation, style: Style) -> Iterator[Conversation]:
    """For each turn with loss, the conversation up to it, without its results.

    Turns before the last user message lose their reasoning. With the style `field` they keep it, so
    that the template decides; with `last` all turns of the context lose it, with `none` all turns.
    The record's id gets the number of the turn: `#t3`, and `#t3.2` for the second part of a turn
    whose calls are split. Replies that the model later saw without the newlines around their text
    stand so in the context.
    """
    whole = styled(conversation, style.with_reasoning(None))
    seen = _trimmed if conversation.record.view_trimmed else _as_it_is
    replies = conversation.replies_by_turn
    entries = list(whole.entries)
    last_user = 0
    before, part = 0, 1
    for place, entry in enumerate(entries):
        if isinstance(entry, Said):
            if style.reasoning != "field":
                entries[last_user:place] = map(_without_reasoning, entries[last_user:place])
            last_user = place
            continue
        part = part + 1 if entry.number == before else 1
        before = entry.number
        if not entry.has_loss:
            continue
        name = f"{entry.number}.{part}" if part > 1 else f"{entry.number}"
        metadata: dict[str, Any] = {**whole.metadata, "turn": entry.number}
        if made := replies.get(entry.number):
            metadata["finish_reason"] = made[-1].finish_reason
        cut = msgspec.structs.replace(
            whole,
            entries=[*map(seen, entries[:place]), msgspec.structs.replace(entry, results=())],
            record=msgspec.structs.replace(whole.record, id=f"{whole.record.id}#t{name}"),
            metadata=metadata,
            num_tool_calls=len(entry.calls),
            is_for_turn=True,
        )
        yield styled(cut, style)


def content_of(conversation: Conversation) -> Hashable:
    """What a row teaches: equal for rows that differ only in ids and metadata."""
    said = tuple(map(_content, conversation.entries))
    return conversation.system, names_of(conversation.tools), said


def _content(entry: Entry) -> Hashable:
    if isinstance(entry, Said):
        return entry.text
    calls = tuple((call.name, call.arguments) for call in entry.calls)
    results = tuple(result.content for result in entry.results)
    return entry.reasoning, entry.text, calls, results


def _as_it_is(entry: Entry) -> Entry:
    return entry


def _trimmed(entry: Entry) -> Entry:
    if isinstance(entry, Turn):
        return msgspec.structs.replace(entry, text=entry.text.strip("\n"))
    return entry


def _without_reasoning(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, reasoning="") if isinstance(entry, Turn) else entry
