"""Reads rows as the command `import` does."""

from __future__ import annotations

from typing import Any

from batch_trajectories.importing.conversation import SourceConversation
from batch_trajectories.importing.readers import openai, sharegpt


def read_chat_row(**row: Any) -> SourceConversation:
    """Read a row with `messages` or `conversations`."""
    reader = openai.READER if "messages" in row else sharegpt.READER
    assert reader.row is not None
    return reader.row(row)
