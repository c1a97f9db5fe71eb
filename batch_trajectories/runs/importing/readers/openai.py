"""Rows of `messages`, as trainers take them and `openai` writes them; see `chat_rows`.

Also documents of SWE-agent, whose messages are their `history`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.runs.importing.chat_rows import read_row
from batch_trajectories.runs.importing.conversation import Foreign, Reader

_API = "openai_chat"


def _read(row: Mapping[str, Any]) -> Foreign:
    return read_row(row, "messages" if "messages" in row else "history", _API)


def _is_row(row: Mapping[str, Any]) -> bool:
    # SWE-agent's own files have the messages of their steps beside these.
    is_of_swe_agent = all(isinstance(row.get(key), list) for key in ("history", "trajectory"))
    return "messages" in row or is_of_swe_agent


READER = Reader(_is_row, row=_read)
