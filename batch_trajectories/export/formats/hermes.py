"""ShareGPT (from, value) in the dialect of the Hermes models; also named sharegpt.

A row depends only on its record and holds no times or paths, so the same conversation gives the
same bytes wherever and whenever it ran. A record that breaks a rule raises Rejected; no turn is
repaired, shortened or invented.

The system preamble, `hermes_system_prompt.txt`, is word for word the function-calling prompt
that Nous Research published for its Hermes models, as hermes-agent writes it into trajectories.
Models were trained on this wording: it belongs to the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from batch_trajectories.export.conversation.metadata import COMMON_COLUMNS, common_columns
from batch_trajectories.export.conversation.reading import (
    mark_hidden_reasoning,
    read_entries,
    refuse_control_tokens,
)
from batch_trajectories.export.conversation.row_json import (
    TOOL_RESPONSE,
    SharedText,
    content_json,
    escape_markers,
    name_json,
    write_json,
)
from batch_trajectories.export.conversation.style import Style
from batch_trajectories.export.conversation.tolerance import (
    COMMON_FLAWS,
    NON_OBJECT_ARGUMENTS,
    Flaw,
    Tolerance,
)
from batch_trajectories.export.conversation.turns import (
    Conversation,
    Entry,
    Turn,
    UserMessage,
    compute_once,
)
from batch_trajectories.export.conversation.validity import Reason
from batch_trajectories.export.rows.format import RowFormat
from batch_trajectories.records.record_types import StoredMessage, Tools

_NO_REASONING = "<think>\n</think>\n"
"""Begins a turn without reasoning, so that every turn begins with a think block."""


def make_row(conversation: Conversation, style: Style) -> dict[str, Any]:
    """The row of a conversation, with a system prompt if the style wants it. Raises Rejected."""
    record = conversation.record
    columns = common_columns(conversation)
    tools, _ = compute_once(conversation.tools, _tools_and_preamble)
    return {
        "id": record.id,
        "conversations": make_turns(conversation, style),
        "tools": tools,
        "completed": conversation.completed,
        "partial": not conversation.completed,
        "api_calls": record.api_calls,
        **columns,
    }


def make_turns(conversation: Conversation, style: Style) -> list[dict[str, str]]:
    """The turns of a row; the system turn is the first. Raises Rejected."""
    system = conversation.system if style.has_system(by_default=False) else ""
    style.tolerance.refuse(conversation.flaws)
    if system:
        refuse_control_tokens(system, style.tolerance, where="system message")
    _, preamble = compute_once(conversation.tools, _tools_and_preamble)
    return _conversations(conversation.entries, preamble, style, system=system)


def to_conversations(
    messages: Sequence[StoredMessage],
    tools: Tools,
    reasoning_tokens: Sequence[int | None] = (),
) -> list[dict[str, str]]:
    """Render messages as system, human, gpt and tool entries. Raises Rejected.

    The system entry is made from `tools`; the system messages of the record are left out. The
    results of a turn share one tool entry, in the order of the calls, and a turn that the provider
    paused is one gpt entry with its continuation. `reasoning_tokens` belong to the last replies.
    """
    _, preamble = compute_once(tools, _tools_and_preamble)
    flaws: list[Flaw] = []
    entries = read_entries(messages, tools, flaws)
    Tolerance().refuse(flaws)
    entries = mark_hidden_reasoning(entries, messages, reasoning_tokens)
    return _conversations(entries, preamble, Style(), system="")


def _conversations(
    entries: Sequence[Entry], preamble: str, style: Style, *, system: str
) -> list[dict[str, str]]:
    no_reasoning = "" if style.empty_think == "omit" else _NO_REASONING
    value = f"{preamble}\n\n{system}" if system else preamble
    conversations = [{"from": "system", "value": value}]
    for entry in entries:
        if isinstance(entry, UserMessage):
            conversations.append({"from": "human", "value": entry.text})
            continue
        conversations.append({"from": "gpt", "value": _gpt_value(entry, no_reasoning)})
        if entry.results:
            conversations.append({"from": "tool", "value": _tool_value(entry, style.tolerance)})
    return conversations


def _tools_and_preamble(tools: Tools) -> tuple[str, str]:
    """The tools on offer as a JSON list, and the system message that offers them."""
    signatures = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description") or "",
            "parameters": tool["function"].get("parameters") or {},
            "required": None,
        }
        for tool in tools
    ]
    # Only the template is searched for the placeholder, not the descriptions of tools.
    preamble = _template().replace("{tools}", escape_markers(write_json(signatures)))
    return SharedText(write_json(tools)), SharedText(preamble)


@cache
def _template() -> str:
    path = Path(__file__).with_name("hermes_system_prompt.txt")
    return path.read_text(encoding="utf-8").removesuffix("\n")


def _gpt_value(turn: Turn, no_reasoning: str) -> str:
    if turn.reasoning:
        parts = [f"<think>\n{turn.reasoning}\n</think>\n"]
    else:
        # A turn with hidden reasoning must not teach the model not to think.
        parts = ["" if turn.hides_reasoning else no_reasoning]
    if not turn.calls:
        return "".join([*parts, turn.text])
    if turn.text:
        parts.append(f"{turn.text}\n")
    for call in turn.calls:
        body = escape_markers(f'{{"name": {name_json(call.name)}, "arguments": {call.arguments}}}')
        parts.append(f"<tool_call>\n{body}\n</tool_call>\n")
    return "".join(parts).rstrip()


def _tool_value(turn: Turn, tolerance: Tolerance) -> str:
    blocks, added = [], []
    for result in turn.results:
        # No marker spans the space before "content", so one search finds those of both parts.
        body = escape_markers(
            f'{{"tool_call_id": {write_json(result.id)}, "name": {name_json(result.name)},'
            f' "content": {content_json(result.content[: result.own_chars])}}}'
        )
        if result.own_chars is not None:
            where = f"what follows the results of turn {turn.number}"
            added.append(result.content[result.own_chars :].strip())
            refuse_control_tokens(added[-1], tolerance, where=where)
            if match := TOOL_RESPONSE.search(added[-1]):
                tolerance.refuse([Flaw(Reason.MARKER_IN_RESULT, f"{where}: {match[0]}")])
        blocks.append(f"<tool_response>\n{body}\n</tool_response>")
    return "\n".join([*blocks, *added])


FORMAT = RowFormat(
    name="hermes",
    card="Turns as text. TRL wants role names of its own (system, user, assistant, tool); "
    "LLaMA-Factory a `dataset_info.json` with all seven tags.",
    columns={
        "id": "string",
        "conversations": "turns",
        "tools": "string",
        "completed": "bool",
        "partial": "bool",
        "api_calls": "int64",
        **COMMON_COLUMNS,
    },
    row_of=make_row,
    reasoning=frozenset(("inline",)),
    # Calls are text, so arguments that are not an object become a string.
    holds=COMMON_FLAWS | NON_OBJECT_ARGUMENTS,
)
