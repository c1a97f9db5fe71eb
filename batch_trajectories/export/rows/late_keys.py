"""Splits that `datasets` refuses as JSON lines, because their messages get further keys late.

It fixes the columns by what it reads first of a file. Messages that all have the same keys there
become structs, into which no further key fits; those with different keys become JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

_READ_FIRST = 10 << 20
"""Bytes that `datasets` reads at first (`chunksize` of its reader of JSON, 5.2)."""


@dataclass
class _Split:
    size: int = 0
    """Bytes of the rows so far."""
    keys: dict[str, set[frozenset[str]]] = field(default_factory=dict)
    """The keys that messages have, by column, of columns in which all have the same."""
    is_late: bool = False


class LateKeys:
    """Watches the rows of one format."""

    def __init__(self, columns: Mapping[str, str], *, shard_bytes: int | None) -> None:
        """`columns` are names and kinds, of which `messages` is watched."""
        self._columns = [name for name, kind in columns.items() if kind == "messages"]
        self._first = min(_READ_FIRST, shard_bytes or _READ_FIRST)
        self._splits: dict[str, _Split] = {}

    def add(self, split: str, line: bytes) -> None:
        """Look at a row that is written next."""
        if (seen := self._splits.get(split)) is None:
            seen = self._splits[split] = _Split(keys={name: set() for name in self._columns})
        if seen.keys:
            row = orjson.loads(line)
            for name, keys in list(seen.keys.items()):
                keys.update(map(frozenset, row[name]))
                if len(keys) > 1:
                    seen.is_late |= seen.size >= self._first
                    del seen.keys[name]
        seen.size += len(line)

    def splits(self) -> list[str]:
        """The splits that are refused."""
        return sorted(split for split, seen in self._splits.items() if seen.is_late)
