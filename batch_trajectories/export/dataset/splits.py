"""Splits by prompt: all samples of a prompt, and rows with the same text, are in one split.

The split depends only on prompt, seed and shares, so added rows do not move others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import orjson

from batch_trajectories.runs.dataset.row import opening_messages
from batch_trajectories.runs.store.record_types import Record


class Splits:
    """Draws the split of each prompt."""

    def __init__(self, shares: Mapping[str, float], *, seed: int) -> None:
        """`shares` sum to 1."""
        self._seed = seed
        self._ends: list[tuple[str, float]] = []
        end = 0.0
        for name, share in shares.items():
            end += share
            self._ends.append((name, end))

    def of(self, record: Record) -> str:
        """The name of the split that a record belongs to."""
        if len(self._ends) == 1:
            return self._ends[0][0]
        content = f"{self._seed}\n".encode() + _prompt(record)
        drawn = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / 2**64
        return next((name for name, end in self._ends if drawn < end), self._ends[-1][0])


def _prompt(record: Record) -> bytes:
    """The user's text in the row; the id of the prompt if the row has none."""
    try:
        opening = opening_messages(record.row, None)
    except ValueError:
        return record.prompt_id.encode()
    return orjson.dumps([m["content"] for m in opening if m["role"] == "user"])
