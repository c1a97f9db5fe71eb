"""Messages with tool calls, for trainers with chat templates: TRL, Axolotl."""

from __future__ import annotations

from typing import Any

from batch_trajectories.export.conversation.metadata import COMMON_COLUMNS, common_columns
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import COMMON_FLAWS, TAG_FLAWS
from batch_trajectories.export.conversation.turns import Conversation
from batch_trajectories.export.rows.format import RowFormat
from batch_trajectories.export.rows.messages import render_messages, tools_column


def make_row(conversation: Conversation, style: Style) -> dict[str, Any]:
    """One row of `messages`, `tools` and the common columns; raises Rejected."""
    return {
        "id": conversation.record.id,
        "messages": render_messages(conversation, style, marks_loss=True),
        "tools": tools_column(conversation, style),
        "completed": conversation.completed,
        **common_columns(conversation),
    }


FORMAT = RowFormat(
    name="openai",
    card="TRL and Axolotl (`type: chat_template`) read it directly. Arguments are objects, "
    "so the JSON lines need datasets 4.7 or newer; the Parquet files hold them as JSON text and "
    "open everywhere.",
    trainers={
        "TRL SFTTrainer": ("openai_hf", "openai"),
        "Axolotl": ("openai_parquet", "openai"),
        "verl, fine-tuning": ("openai_parquet",),
        "ms-swift, OpenRLHF, Unsloth, NeMo AutoModel": ("openai",),
    },
    columns={"id": "string", "messages": "messages", **COMMON_COLUMNS},
    row_of=make_row,
    reasoning=frozenset(("field", "inline")),
    holds=COMMON_FLAWS | TAG_FLAWS,
    marks_loss=True,
    has_turns=True,
)
