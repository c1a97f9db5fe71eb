"""Rows of `conversations`: ShareGPT, LLaMA-Factory and the dialect of the Hermes models.

See `chat_rows`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.importing.chat_rows import read_row
from batch_trajectories.importing.conversation import Reader, SourceConversation


def _read(row: Mapping[str, Any]) -> SourceConversation:
    return read_row(row, "conversations", "sharegpt")


def _is_row(row: Mapping[str, Any]) -> bool:
    return row.get("conversations") is not None


READER = Reader(_is_row, row=_read)
