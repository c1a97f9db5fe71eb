"""Exact and near duplicates of earlier conversations."""

from __future__ import annotations

from typing import Any

from batch_trajectories.basics.errors import missing
from batch_trajectories.export.conversation.texts import words_of
from batch_trajectories.runs.store.record_types import Record

_PERMUTATIONS = 128
_SEED = 1


def said_in(record: Record) -> tuple[str, ...]:
    """All texts of a conversation, without ids and times."""
    return tuple(_said(record, with_results=True))


class NearDuplicates:
    """Finds conversations with nearly the same words as an earlier one.

    The word triples of user and model texts are compared, without tool results.
    Memory grows with the conversations, by about a kilobyte each.
    """

    def __init__(self, threshold: float) -> None:
        """`threshold` is the least Jaccard similarity. Raises `ConfigError` without rensa."""
        try:
            import rensa
        except ImportError as error:
            raise missing("filters.near_duplicates", "quality") from error
        self._rensa = rensa
        self._threshold = threshold
        # The index proposes candidates, from well below the threshold on.
        bands = next(
            (b for b in (8, 16, 32, 64) if (1 / b) ** (b / _PERMUTATIONS) <= threshold - 0.1), 64
        )
        self._index = rensa.RMinHashLSH(threshold, _PERMUTATIONS, bands)
        self._kept: list[tuple[Any, str]] = []
        """Sketch and id."""

    def earlier(self, record: Record) -> str | None:
        """The id of an earlier near duplicate; without one this record is remembered."""
        words = words_of(" ".join(_said(record, with_results=False)))
        triples = {" ".join(words[n : n + 3]) for n in range(max(1, len(words) - 2))}
        sketch = self._rensa.RMinHash(_PERMUTATIONS, _SEED)
        sketch.update(sorted(triples))
        proposed: list[int] = sorted(self._index.query(sketch))
        for key in proposed:
            other, name = self._kept[key]
            if sketch.jaccard(other) >= self._threshold:
                return name
        self._index.insert(len(self._kept), sketch)
        self._kept.append((sketch, record.id))
        return None


def _said(record: Record, *, with_results: bool) -> list[str]:
    said: list[str] = []
    for message in record.messages:
        role = message.role
        if role == "system" or (role == "tool" and not with_results):
            continue
        said += (role, message.content, message.reasoning or "")
        for call in message.tool_calls:
            said += (call.function.name, call.function.arguments)
    return said
