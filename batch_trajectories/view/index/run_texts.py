"""The text index of one run: made when somebody searches, extended while somebody does."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from batch_trajectories.view.index.filters import BadFilter, Choice, in_offsets
from batch_trajectories.view.index.parts import cache_of, missing_in, origin_of, parts_in, ranges_of
from batch_trajectories.view.index.run_index import Maker
from batch_trajectories.view.index.texts import (
    RANGE_BYTES,
    NothingToFind,
    offsets_of,
    question_of,
)

_KEPT = 4


class FoundTexts(NamedTuple):
    """The answer to a search."""

    choice: Choice
    version: str
    """Changes with what the index has."""


class RunTexts:
    """The words of one run's conversations; thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._lock = threading.Lock()
        self._maker: Maker | None = None
        self._found: OrderedDict[Any, pa.Array] = OrderedDict()
        self._failed_at: int | None = None
        self.state: dict[str, Any] | None = None
        """See the API's `Text`; None until somebody searches."""

    def find(self, words: str) -> FoundTexts | None:
        """The records with these words, as far as they are indexed; None without records.

        Raises `BadFilter`.
        """
        try:
            question = question_of(words)
        except NothingToFind as error:
            raise BadFilter(str(error)) from error
        with self._lock:
            parts = self._look()
            if parts is None:
                return None
            version = "-".join(f"{part.begin:x}.{part.end:x}" for part in parts)
            key = (question, version)
            if key not in self._found:
                self._found[key] = offsets_of(parts, question)
                while len(self._found) > _KEPT:
                    self._found.popitem(last=False)
            return FoundTexts(in_offsets(self._found[key]), version)

    def look(self) -> dict[str, Any] | None:
        """The state now, if somebody has searched."""
        with self._lock:
            if self.state is not None:
                self._look()
            return self.state

    def _look(self) -> Any:
        origin = origin_of(self._run_dir)
        if origin is None:
            return None
        records = self._run_dir / "records.jsonl"
        size = records.stat().st_size
        parts = parts_in(cache_of(self._run_dir) / origin.name_of_texts, "text")
        ranges = ranges_of(records, missing_in(parts, size), RANGE_BYTES)
        error = None if self.state is None else self.state["error"]
        if self._maker is not None and self._maker.is_over():
            error = self._maker.problem()
            self._failed_at = None if error is None else size
            self._maker.stop()
            self._maker = None
        if ranges and self._maker is None and self._failed_at != size:
            self._maker = Maker("texts", self._run_dir)
        self.state = {
            "bytes": sum(part.end - part.begin for part in parts),
            "of_bytes": size,
            "is_complete": not ranges,
            "error": error,
        }
        return parts

    def close(self) -> None:
        """End the process that makes it."""
        with self._lock:
            if self._maker is not None:
                self._maker.stop()
                self._maker = None
