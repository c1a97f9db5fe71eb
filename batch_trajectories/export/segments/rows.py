"""Segments as conversations that formats can render."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from batch_trajectories.export.conversation.authors import is_agents, merged
from batch_trajectories.export.conversation.own_work import Own, first_reply, tool_stats
from batch_trajectories.export.conversation.reading import (
    read_entries,
    system_of,
    with_hidden_reasoning,
)
from batch_trajectories.export.conversation.tolerance import Flaw
from batch_trajectories.export.conversation.turns import Conversation, Entry, Turn
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.masking.masks import Masked, Masks, in_metadata
from batch_trajectories.export.segments.segments import Segment, segments_of
from batch_trajectories.export.segments.views import ShownPart, parts_of
from batch_trajectories.runs.store.record_types import Record, StoredTurn

Row = dict[str, Any]

_NOT_OF_SEGMENTS = ("view_compacted", "summaries", "rewritten_calls", "trimmed_replies", "masked")
"""What is told of a row of the whole conversation, and is not so for its segments."""


@dataclass(slots=True)
class SegmentCounts:
    """What the manifest says of segments."""

    begun: Counter[str] = field(default_factory=Counter)
    """Segments by why they begin."""
    conversations: Counter[str] = field(default_factory=Counter)
    """Segments by the name of their conversation."""
    turns: int = 0
    """Turns that are learnt, each in one row."""
    unknown_turns: int = 0
    """Turns of which the record does not say what the model was shown."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Segments that are no rows, by reason."""


class SegmentRows:
    """Makes the rows of segments, and counts them."""

    def __init__(
        self,
        render: Callable[[Conversation], tuple[Conversation, Row]],
        *,
        masks: Masks | None,
        since_user: bool,
        by_turn: bool,
    ) -> None:
        """`render` may raise Rejected; `masks` are counted here; for `since_user` see `parts_of`.

        With `by_turn` there is a row for each turn that is learnt, which it ends with.
        """
        self._render = render
        self._masks = masks
        self._since_user = since_user
        self._by_turn = by_turn
        self._counts = SegmentCounts()

    def of(self, whole: Conversation, record: Record) -> list[tuple[Conversation, Row]]:
        """The rows of a conversation, and of those inside its record, with what they show.

        `record` is as it was stored: that of `whole` can have its messages in another order.

        Ids are `ID#s2` for the second segment, with `by_turn` `ID#s2.t3` for its third turn. Raises
        Rejected if no segment keeps the rules of rows.
        """
        rows: list[tuple[Conversation, Row]] = []
        counts = self._counts
        number = 0
        why = Rejected(Reason.NO_REPLY, "the record does not say what its calls were shown")
        for part in parts_of(record, since_user=self._since_user):
            counts.unknown_turns += part.unknown
            masked = self._masks.of(part.conversation) if self._masks and part.views else {}
            for segment in segments_of(part):
                number += 1
                try:
                    found = _conversation(whole, part, segment, number, masked)
                    made = _by_turn(found) if self._by_turn else (found,)
                    rows += [*map(self._render, made)]
                except Rejected as rejected:
                    counts.rejected[rejected.reason.value] += 1
                    why = rejected if not rows else why
                    continue
                if self._masks is not None:
                    self._masks.count(turn.masked for turn in found.own_turns)
                counts.begun[segment.why] += 1
                counts.conversations[part.name] += 1
                counts.turns += len(segment.learnt)
        if not rows:
            raise why
        return rows

    def to_json(self) -> dict[str, Any]:
        """The counts, for the manifest."""
        counts = self._counts
        return {
            "begun": dict(sorted(counts.begun.items())),
            "conversations": dict(sorted(counts.conversations.items())),
            "turns": counts.turns,
            "unknown_turns": counts.unknown_turns,
            "rejected": dict(sorted(counts.rejected.items())),
        }


def _conversation(
    whole: Conversation, part: ShownPart, segment: Segment, number: int, masked: Masked
) -> Conversation:
    """A segment; `masked` are the masked turns of its conversation. Raises Rejected."""
    messages = merged(segment.messages) if is_agents(part.conversation) else segment.messages
    positions = [n for n, m in enumerate(segment.messages) if m.role == "assistant"]
    learnt = [segment.learnt.get(place) for place in positions]
    flaws: list[Flaw] = []
    entries = read_entries(messages, segment.tools, flaws, as_sent=True)
    tokens = [None if turn is None else turn.reasoning_tokens for turn in learnt]
    entries = with_hidden_reasoning(entries, messages, tokens)
    marked = [*_with_authors(entries, learnt, masked)]
    if not any(isinstance(entry, Turn) and entry.has_loss for entry in marked):
        raise Rejected(Reason.ALL_MASKED, "none of its turns carries loss")
    turns = [replace(turn, inherited=None) for turn in segment.learnt.values()]
    own = messages[first_reply(messages, turns=len(turns)) :]
    stats = tool_stats(own)
    record = replace(
        whole.record, id=f"{whole.record.id}#s{number}", messages=[*messages], turns=turns
    )
    kept = {k: value for k, value in whole.metadata.items() if k not in _NOT_OF_SEGMENTS}
    reasons = {
        turn.turn: masked[turn.turn] for turn in segment.learnt.values() if turn.turn in masked
    }
    if reasons:
        kept["masked"] = in_metadata(reasons)
    told = {"of": part.name, "number": number, "why": segment.why}
    return replace(
        whole,
        system=system_of(messages),
        entries=marked,
        tools=segment.tools,
        record=record,
        own=Own(record),
        metadata={
            **kept,
            "finish_reason": turns[-1].finish_reason,
            "tool_stats": stats,
            "segment": told,
        },
        num_tool_calls=sum(tool["count"] for tool in stats),
        flaws=flaws,
        has_others=True,
    )


def _with_authors(
    entries: Sequence[Entry], learnt: Sequence[StoredTurn | None], masked: Masked
) -> Iterator[Entry]:
    """Turns that are learnt in another row, or in none, are this row's context."""
    place = 0
    for entry in entries:
        if isinstance(entry, Turn):
            made = [turn for turn in learnt[place : place + entry.replies] if turn is not None]
            place += entry.replies
            if made:
                reasons = (name for turn in made for name in masked.get(turn.turn, ()))
                entry = replace(entry, masked=tuple(dict.fromkeys(reasons)))
            else:
                entry = replace(entry, author="context")
        yield entry


def _by_turn(segment: Conversation) -> Iterator[Conversation]:
    """For each turn that is learnt, the segment up to it."""
    for place, entry in enumerate(segment.entries):
        if not isinstance(entry, Turn) or not entry.has_loss:
            continue
        yield replace(
            segment,
            entries=[*segment.entries[:place], replace(entry, results=())],
            record=replace(segment.record, id=f"{segment.record.id}.t{entry.number}"),
            num_tool_calls=len(entry.calls),
            is_for_turn=True,
        )
