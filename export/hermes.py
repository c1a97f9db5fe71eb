"""Turns one trajectory record into one row of ShareGPT training data in the Hermes dialect.

Pure: nothing is read but the record, and the row holds no times and no places, so the same
conversation gives the same bytes wherever and whenever it ran. A record converts whole or raises
Rejected; no turn is repaired, shortened or invented. Keys of a record that are not named here are
not read.

The system preamble, `hermes_system_prompt.txt`, is word for word the function-calling prompt
that Nous Research published for its Hermes models, as hermes-agent writes it into trajectories.
Models were trained on this wording: it belongs to the format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from agent.reasoning import opens_reasoning, split_inline_reasoning
from export.completion import plain_ending
from export.replies import first_reply, tool_stats
from export.row_json import arguments_json, content_json, escape_markers, write_json
from export.row_rules import Reason, Rejected, check_conversation, check_finished

_NO_REASONING = "<think>\n</think>\n"
"""Stands in front of a turn without reasoning, so that every turn opens with a think block."""

_MARKER_IN_TEXT = re.compile(
    r"</?(?:tool_call|tool_response|think|(?i:reasoning_scratchpad))>",
)
"""A tag that in a model's own words would be read as structure, or as a thought."""

_MAX_COLUMN_CHARS = 1000


def to_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record; raises Rejected where it breaks a rule of the format.

    A record that ended early converts too, with `completed` false: the caller decides which
    file it belongs to.
    """
    turns = record["turns"]
    if not turns:
        raise Rejected(Reason.NO_REPLY, f"status {record['status']}: the model never replied")
    completed = record["status"] == "completed"
    messages, tools, completion = plain_ending(
        record["messages"], record["tools"] or [], completed=completed
    )
    conversations = to_conversations(messages, tools)
    if completed:
        check_finished(messages)
    start = first_reply(record["messages"], turns=len(turns))
    # A reply may go on in the turn that the messages before it end with, so that one counts.
    given = _gpt_turns(messages[: start + 1]) - 1
    said = [entry["value"] for entry in conversations if entry["from"] == "gpt"][given:]
    with_reasoning = sum(not value.startswith(_NO_REASONING.rstrip()) for value in said)
    stats = tool_stats(messages[start:])
    metadata = {
        "model": record["model"],
        "model_returned": record["model_returned"],
        "api": record["api"],
        "status": record["status"],
        **_if_any("status_reason", record.get("status_reason")),
        **_if_any("completion", completion),
        "finish_reason": turns[-1]["finish_reason"],
        "prompt_id": record["prompt_id"],
        "sample": record["sample"],
        "toolsets": record["toolsets"],
        "tool_stats": stats,
        "reasoning": {"assistant_turns": len(said), "with_reasoning": with_reasoning},
        "usage": record["usage"],
        "interrupted_calls": sum(len(resume["interrupted"]) for resume in record["resumes"]),
        **_if_any("notes", _notes_by_name(record["messages"])),
        **_if_any("repairs", sum(len(m.get("repairs") or ()) for m in record["messages"])),
        "columns": _small_columns(record["row"]),
        "sandbox": record["sandbox"],
        "seed": record["seed"],
        "config_digest": record["config_digest"],
    }
    return {
        "id": record["id"],
        "conversations": conversations,
        "tools": write_json(tools),
        "completed": completed,
        "partial": not completed,
        "api_calls": record["api_calls"],
        "num_turns": len(turns),
        "num_tool_calls": sum(tool["count"] for tool in stats),
        "has_reasoning": with_reasoning > 0,
        "metadata": write_json(metadata),
    }


def _if_any(key: str, value: Any) -> dict[str, Any]:
    """A member for what most rows do not have, so that it costs them nothing."""
    return {key: value} if value else {}


def _notes_by_name(messages: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How often each rule of the runtime spoke to the model, in a message or in a result."""
    names: Counter[str] = Counter()
    for message in messages:
        if message["role"] in ("user", "tool"):
            names.update(message.get("notes") or ())
    return dict(sorted(names.items()))


def _gpt_turns(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(role == "assistant" for role, _ in groupby(messages, key=_role))


def _role(message: Mapping[str, Any]) -> Any:
    return message["role"]


def _small_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset's own columns that one can filter by; long ones stay in the record."""
    return {
        name: value
        for name, value in row.items()
        if name not in ("prompt", "script")
        and (value is None or isinstance(value, bool | int | float | str))
        and (not isinstance(value, str) or len(value) <= _MAX_COLUMN_CHARS)
    }


def dumps_row(row: Mapping[str, Any]) -> bytes:
    """The row as one line of UTF-8 JSON; halves of surrogate pairs become U+FFFD."""
    line = write_json(row) + "\n"
    try:
        return line.encode()
    except UnicodeEncodeError:
        units = line.encode("utf-16-le", "surrogatepass")
        return units.decode("utf-16-le", "replace").encode()


def to_conversations(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, str]]:
    """The messages as system, human, gpt and tool entries; raises Rejected.

    The system entry is generated from `tools`; the system messages of the record are left out.
    All results of a turn share one tool entry, in the order of the calls they answer, and a turn
    that the provider paused is one gpt entry with its continuation.
    """
    check_conversation(messages, {tool["function"]["name"] for tool in tools})
    conversations = [{"from": "system", "value": _system_value(tools)}]
    spoken = (message for message in messages if message["role"] != "system")
    turn = 0
    calls: Sequence[Mapping[str, Any]] = ()
    for role, group in groupby(spoken, key=_role):
        if role == "user":
            (message,) = group
            entry = {"from": "human", "value": _human_value(message, turn=turn + 1)}
        elif role == "assistant":
            parts = list(group)
            turn += 1
            calls = parts[-1].get("tool_calls") or ()
            entry = {"from": "gpt", "value": _gpt_value(parts, calls, turn=turn)}
        else:
            entry = {"from": "tool", "value": _tool_value(list(group), calls, turn=turn)}
        conversations.append(entry)
    return conversations


def _system_value(tools: Sequence[Mapping[str, Any]]) -> str:
    signatures = [
        {
            "name": tool["function"]["name"],
            "description": tool["function"].get("description") or "",
            "parameters": tool["function"].get("parameters") or {},
            "required": None,
        }
        for tool in tools
    ]
    # One replacement in the template alone: what a tool's description says is never a marker.
    return _template().replace("{tools}", escape_markers(write_json(signatures)))


@cache
def _template() -> str:
    path = Path(__file__).with_name("hermes_system_prompt.txt")
    return path.read_text(encoding="utf-8").removesuffix("\n")


def _human_value(message: Mapping[str, Any], *, turn: int) -> str:
    text = _content(message, where=f"user message before turn {turn}")
    if not text.strip():
        raise Rejected(Reason.EMPTY_VALUE, f"user message before turn {turn}: blank")
    return text


def _gpt_value(
    messages: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], *, turn: int
) -> str:
    """One turn out of its messages: one, or several where the provider paused; `calls` end it."""
    thoughts, texts = [], []
    for message in messages:
        inline, rest = split_inline_reasoning(_content(message, where=f"turn {turn}"))
        if opens_reasoning(rest):
            raise Rejected(Reason.UNCLOSED_THINK, f"turn {turn}: begins {rest.lstrip()[:40]!r}")
        thoughts.append(_joined_reasoning(message.get("reasoning") or "", inline or ""))
        texts.append(rest)
    reasoning, text = _joined(thoughts), _joined(texts)
    if marker := _MARKER_IN_TEXT.search(reasoning) or _MARKER_IN_TEXT.search(text):
        place = "reasoning" if marker.string is reasoning else "text"
        raise Rejected(Reason.MARKER_IN_TEXT, f"turn {turn}: {marker[0]} in its {place}")
    parts = [f"<think>\n{reasoning}\n</think>\n" if reasoning else _NO_REASONING]
    if text.strip():
        parts.append(f"{text}\n")
    elif not calls:
        reason = Reason.REASONING_ONLY if reasoning else Reason.EMPTY_VALUE
        raise Rejected(reason, f"turn {turn}: neither text nor calls")
    for number, call in enumerate(calls, start=1):
        arguments = arguments_json(call, where=f"turn {turn}, call {number}")
        name = write_json(call["function"]["name"])
        body = escape_markers(f'{{"name": {name}, "arguments": {arguments}}}')
        parts.append(f"<tool_call>\n{body}\n</tool_call>\n")
    return "".join(parts).rstrip()


def _joined(parts: Sequence[str]) -> str:
    """What is not blank of `parts`, with a blank line between one and the next."""
    *earlier, last = [part for part in parts if part.strip()] or [""]
    return "\n\n".join([*(part.rstrip() for part in earlier), last])


def _joined_reasoning(apart: str, inline: str) -> str:
    """The reasoning that came apart from the text and that which stood in it, each once."""
    if not apart.strip() or apart.strip() == inline:
        return inline
    return f"{apart}\n\n{inline}" if inline else apart


def _tool_value(
    results: Sequence[Mapping[str, Any]], calls: Sequence[Mapping[str, Any]], *, turn: int
) -> str:
    contents = {
        result["tool_call_id"]: _content(result, where=f"result of turn {turn}")
        for result in results
    }
    blocks = []
    for call in calls:
        if call["id"] not in contents:
            continue
        body = escape_markers(
            f'{{"tool_call_id": {write_json(call["id"])},'
            f' "name": {write_json(call["function"]["name"])},'
            f' "content": {content_json(contents[call["id"]])}}}'
        )
        blocks.append(f"<tool_response>\n{body}\n</tool_response>")
    return "\n".join(blocks)


def _content(message: Mapping[str, Any], *, where: str) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise Rejected(Reason.NOT_TEXT, f"{where}: content is a {type(content).__name__}")
    return content
