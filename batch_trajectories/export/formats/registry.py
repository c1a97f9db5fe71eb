"""The formats of rows by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.formats import atif, hermes, llamafactory
from batch_trajectories.export.formats import openai_chat as chat
from batch_trajectories.export.formats.columns import COLUMNS


@dataclass(frozen=True, slots=True)
class Format:
    """One format of rows."""

    name: str
    row_of: Callable[[Conversation, Style], dict[str, Any]]
    """Raises Rejected."""
    has_reasoning_field: bool
    has_inline_reasoning: bool
    splits_calls: bool = True
    marks_loss: bool = False
    """Whether rows say which turns are not to be learnt."""
    has_argument_objects: bool = False
    """Whether arguments of calls are objects in the JSON lines."""
    has_turns: bool = False
    """Whether a row can be for one turn, which alone is learnt."""


ROW_FORMATS: Mapping[str, Format] = {
    one.name: one
    for one in (
        Format("hermes", hermes.row_of, has_reasoning_field=False, has_inline_reasoning=True),
        Format(
            "llamafactory",
            llamafactory.row_of,
            has_reasoning_field=False,
            has_inline_reasoning=True,
            has_turns=True,
        ),
        Format(
            "openai",
            chat.row_of,
            has_reasoning_field=True,
            has_inline_reasoning=True,
            has_argument_objects=True,
            marks_loss=True,
            has_turns=True,
        ),
        Format(
            "atif",
            atif.row_of,
            has_reasoning_field=True,
            has_inline_reasoning=False,
            splits_calls=False,
            marks_loss=True,
        ),
    )
}
"""Formats with one row per conversation."""

GROUP_FORMATS = ("dpo", "kto")
"""Formats whose rows compare the samples of one prompt."""

TURN_FORMATS = tuple(one.name for one in ROW_FORMATS.values() if one.has_turns)
"""Formats that can have one row per turn."""

COPIED = frozenset(COLUMNS)
"""Formats whose rows can be copied to other files."""

COPIES = frozenset({"parquet", "hf"})
"""Names for such copies."""

OF_RECORDS = ("rl", "prompts", "predictions", "raw")
"""Formats made of what records hold beside their messages."""

KNOWN = (*ROW_FORMATS, *sorted(COPIES, reverse=True), *GROUP_FORMATS, *OF_RECORDS)
"""All names, as a user may give them."""
