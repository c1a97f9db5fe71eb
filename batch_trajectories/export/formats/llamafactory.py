"""Turns and calls as LLaMA-Factory reads them (its formatting `sharegpt`).

Turns alternate between human or observation and gpt or function_call; the last one is the model's.
A turn with calls is JSON after its reasoning, in the form of the templates. If there is also text,
the calls are one block with a list: other forms would lose the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batch_trajectories.export.conversation.metadata import COMMON_COLUMNS, common_columns
from batch_trajectories.export.conversation.reading import refuse_control_tokens
from batch_trajectories.export.conversation.row_json import escape_markers, write_json
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import Tolerance
from batch_trajectories.export.conversation.turns import Conversation, Turn, UserMessage
from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.export.rows.format import RowFormat
from batch_trajectories.export.rows.messages import (
    refuse_structure_in_arguments,
    refuse_structure_in_results,
    tools_json,
)

_BETWEEN_RESULTS = "\n</tool_response>\n<tool_response>\n"
"""Tags between results. Templates like Qwen's add the outer tags; others show the tags as text."""

_TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}


def make_row(conversation: Conversation, style: Style) -> dict[str, Any]:
    """One row of `conversations`, `tools` (blank without any) and the common columns.

    Raises Rejected, also for a conversation that does not end with the model's words.
    """
    style.tolerance.refuse(conversation.flaws)
    last = conversation.entries[-1]
    may_end_by_call = conversation.completed or conversation.is_for_turn
    is_ended_by_call = may_end_by_call and isinstance(last, Turn) and not last.results
    if isinstance(last, UserMessage) or (last.calls and not is_ended_by_call):
        raise Rejected(Reason.UNFINISHED, "the conversation does not end with an answer")
    conversations = []
    if conversation.system and style.has_system(by_default=True):
        refuse_control_tokens(conversation.system, style.tolerance, where="system message")
        conversations.append({"from": "system", "value": conversation.system})
    for entry in conversation.entries:
        if isinstance(entry, UserMessage):
            conversations.append({"from": "human", "value": entry.text})
            continue
        kind = "function_call" if entry.calls else "gpt"
        conversations.append({"from": kind, "value": _turn_text(entry, style.tolerance)})
        if entry.results:
            value = _observation(entry, style.tolerance)
            conversations.append({"from": "observation", "value": value})
    return {
        "id": conversation.record.id,
        "conversations": conversations,
        "tools": tools_json(conversation, style.tolerance) if conversation.tools else "",
        "completed": conversation.completed,
        **common_columns(conversation),
    }


def _turn_text(turn: Turn, tolerance: Tolerance) -> str:
    thoughts = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    text = turn.text
    if not turn.calls:
        return thoughts + text
    refuse_structure_in_arguments(turn, tolerance)
    calls = [
        f'{{"name": {write_json(call.name)}, "arguments": {call.arguments}}}' for call in turn.calls
    ]
    if text:
        body = escape_markers(f"[{', '.join(calls)}]")
        return f"{thoughts}{text}\n<tool_call>{body}</tool_call>"
    return thoughts + escape_markers(calls[0] if len(calls) == 1 else f"[{', '.join(calls)}]")


def _observation(turn: Turn, tolerance: Tolerance) -> str:
    refuse_structure_in_results(turn, tolerance)
    # Loaders of other trainers refuse blank values.
    contents = (result.content if result.content.strip() else '""' for result in turn.results)
    return _BETWEEN_RESULTS.join(contents)


def dataset_info(part: Mapping[str, Any], run_name: str) -> dict[str, Any]:
    """The file `dataset_info.json`, with a dataset for each split: a file or a folder of files."""
    # The loader sets omitted tags to None, so all tags are named.
    info = {}
    for file in part["files"]:
        folder, _, rest = file["path"].partition("/")
        if folder == FORMAT.name:
            info[f"{run_name}_{file['split']}"] = {
                "file_name": rest.partition("/")[0],
                "formatting": "sharegpt",
                "columns": {"messages": "conversations", "tools": "tools"},
                "tags": _TAGS,
            }
    return {"dataset_info.json": info}


FORMAT = RowFormat(
    name="llamafactory",
    card="Point `dataset_dir` at the folder `llamafactory`; its `dataset_info.json` "
    "names one dataset per split.",
    trainers={"LLaMA-Factory": ("llamafactory",)},
    columns={"id": "string", "conversations": "turns", **COMMON_COLUMNS},
    row_of=make_row,
    reasoning=frozenset(("inline",)),
    # Its loader finds calls and results in the text by their tags, so it cannot hold any.
    has_turns=True,
    side_files=dataset_info,
)
