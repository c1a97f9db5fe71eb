"""The values of columns and metadata, by which conversations are counted and split."""

from __future__ import annotations

from typing import Any

import orjson

from batch_trajectories.export.filters.contamination import value_of
from batch_trajectories.export.rows.files import Loaded

RUN = "run"
"""Stands for the run of a conversation."""

_ID = "id"
_OF_RECORDS = (
    *("model", "model_returned", "api", "status", "status_reason", "prompt_id", "sample"),
    *("toolsets", "sandbox", "seed"),
)
"""Metadata of rows that are fields of records."""


def value_in(loaded: Loaded, key: str) -> str | None:
    """The value of a column of its row, else of its metadata, as text; None without one.

    Repositories are compared as benchmarks are. `id` is the id of the prompt, `run` its run.
    """
    record = loaded.record
    if key == _ID:
        return record.prompt_id
    if (text := value_of(record.row, key)) is not None:
        return text
    value: Any = record.row.get(key)
    if value is None and key == RUN:
        return loaded.run
    if value is None and loaded.conversation is not None:
        value = loaded.conversation.metadata.get(key)
    if value is None and key in _OF_RECORDS:
        value = getattr(record, key)
    return None if value is None else orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
