"""Draws the split of each conversation by its prompt, so that samples stay together.

With `split_by`, conversations that share a value of a column stay together, too. Prompts and values
that occur together are one group, however long the chain.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from batch_trajectories.dataset.row_conversation import opening_messages
from batch_trajectories.export.filters.contamination import text_value
from batch_trajectories.export.rows.files import Candidate
from batch_trajectories.records.record_types import Record

# The values of columns and metadata, by which conversations are counted and split.

RUN = "run"
"""The key that stands for the run of a conversation."""

_ID = "id"
_RECORD_FIELDS = (
    "model",
    "model_returned",
    "api",
    "status",
    "status_reason",
    "prompt_id",
    "sample",
    "toolsets",
    "sandbox",
    "seed",
)
"""Metadata of rows that are fields of records."""


def value_in(loaded: Candidate, key: str) -> str | None:
    """The value of a column of the row, else of the metadata, as text; None without one.

    Names of repositories are normalized as for benchmarks. The key `id` stands for the id of the
    prompt, `run` for the run.
    """
    record = loaded.record
    if key == _ID:
        return record.prompt_id
    if (text := text_value(record.row, key)) is not None:
        return text
    value: Any = record.row.get(key)
    if value is None and key == RUN:
        return loaded.run
    if value is None and loaded.conversation is not None:
        value = loaded.conversation.metadata.get(key)
    if value is None and key in _RECORD_FIELDS:
        value = getattr(record, key)
    return None if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()


class Splits:
    """Draws the split of each prompt.

    All samples of a prompt, and rows with the same text, are in one split. It depends only on
    prompt, seed and shares, so added rows do not move others.
    """

    def __init__(self, shares: Mapping[str, float], *, seed: int) -> None:
        """`shares` are by the name of the split and sum to 1."""
        self._seed = f"{seed}\n".encode()
        self._upper_bounds: list[tuple[str, float]] = []
        end = 0.0
        for name, share in shares.items():
            end += share
            self._upper_bounds.append((name, end))

    def choose(self, loaded: Candidate) -> str:
        """The name of the split of a conversation."""
        if len(self._upper_bounds) == 1:
            return self._upper_bounds[0][0]
        drawn = self._position(loaded)
        for name, bound in self._upper_bounds:
            if drawn < bound:
                return name
        return self._upper_bounds[-1][0]  # by rounding, the shares may sum to less than 1

    def _position(self, loaded: Candidate) -> float:
        return self._draw(_prompt_text(loaded.record)) / 2**64

    def _draw(self, content: bytes) -> int:
        return draw_bits(self._seed + content)


class JoinedSplits(Splits):
    """Draws the split of groups of conversations that share a prompt or a value of a column.

    The draw of a group with values depends on these values alone. Takes about 200 bytes per prompt.
    """

    def __init__(self, shares: Mapping[str, float], columns: Sequence[str], *, seed: int) -> None:
        """The caller must `join` all conversations before it calls `choose`."""
        super().__init__(shares, seed=seed)
        self._columns = columns
        self._parents: dict[int, int] = {}
        """A forest over the draws of prompts (odd) and values (even); each tree is a group."""

    def join(self, loaded: Candidate) -> None:
        """Put prompt and values of a conversation into one group."""
        first, *others = self._keys(loaded)
        root = self._find_root(first)
        for key in others:
            other = self._find_root(key)
            if root == other:
                continue
            top, below = sorted((root, other), key=_rank)
            self._parents[below] = top
            root = top

    def _position(self, loaded: Candidate) -> float:
        return self._find_root(self._keys(loaded)[0]) / 2**64

    def _keys(self, loaded: Candidate) -> list[int]:
        keys = [self._draw(_prompt_text(loaded.record)) | 1]
        for column in self._columns:
            if (value := value_in(loaded, column)) is not None:
                keys.append(self._draw(f"{column}\n{value}".encode()) & ~1)
        return keys

    def _find_root(self, key: int) -> int:
        parents = self._parents
        root = parents.setdefault(key, key)
        while (above := parents[root]) != root:
            root = above
        while (above := parents[key]) != root:
            parents[key], key = root, above
        return root


def _rank(draw: int) -> tuple[bool, int]:
    """The order by which one of two draws becomes the root: values first, then the smaller one."""
    is_prompt = draw & 1 == 1
    return is_prompt, draw


def draw_bits(content: bytes) -> int:
    """A number of 64 bits that depends on the content alone."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _prompt_text(record: Record) -> bytes:
    """The user's text in the row, as bytes; the id of the prompt if the row has no text."""
    try:
        opening = opening_messages(record.row, None)
    except ValueError:
        return record.prompt_id.encode()
    return orjson.dumps([m["content"] for m in opening if m["role"] == "user"])
