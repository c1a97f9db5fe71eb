"""Rows of `messages`, as trainers take them and `openai` writes them; see `chat_rows`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.runs.importing.chat_rows import read_row
from batch_trajectories.runs.importing.conversation import Foreign, Reader

_API = "openai_chat"


def _read(row: Mapping[str, Any]) -> Foreign:
    return read_row(row, "messages", _API)


def _is_row(row: Mapping[str, Any]) -> bool:
    return "messages" in row


READER = Reader(_is_row, row=_read)
