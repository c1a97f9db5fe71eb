"""Rows of `messages`, as trainers take them and `openai` writes them; see `chat_rows`.

Also documents of SWE-agent, whose messages are their `history`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.importing.chat_rows import read_row
from batch_trajectories.importing.conversation import Reader, SourceConversation

_API = "openai_chat"


def _read(row: Mapping[str, Any]) -> SourceConversation:
    return read_row(row, "history" if _is_of_swe_agent(row) else "messages", _API)


def _is_of_swe_agent(row: Mapping[str, Any]) -> bool:
    """Whether it is a document of SWE-agent, which has the steps beside the messages."""
    has_both = all(isinstance(row.get(key), list) for key in ("history", "trajectory"))
    return has_both and "messages" not in row


def _is_row(row: Mapping[str, Any]) -> bool:
    return row.get("messages") is not None or _is_of_swe_agent(row)


READER = Reader(_is_row, row=_read)
