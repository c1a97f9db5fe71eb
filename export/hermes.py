"""Turns one trajectory record into one row of ShareGPT training data in the Hermes dialect.

Pure: nothing is read but the record, and the row holds no times and no places, so the same
conversation gives the same bytes wherever and whenever it ran. A record converts whole or raises
Rejected; no turn is repaired, shortened or invented.

The system preamble, `hermes_system_prompt.txt`, is word for word the function-calling prompt
that Nous Research published for its Hermes models, as hermes-agent writes it into trajectories.
Models were trained on this wording: it belongs to the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from agent.reasoning import split_inline_reasoning
from export.row_rules import Reason, Rejected, check_conversation, check_finished

_NO_REASONING = "<think>\n</think>\n"
"""Stands in front of a turn without reasoning, so that every turn opens with a think block."""

_MARKER_IN_JSON = re.compile(r"<(?=/?(?:tool_call|tool_response|think|tools)>)")
"""The `<` of a tag of the format. In JSON it can only stand inside a string."""

_MARKER_IN_TEXT = re.compile(
    r"</?(?:tool_call|tool_response|think|(?i:reasoning_scratchpad))>",
)
"""A tag that in a model's own words would be read as structure, or as a thought."""

_OPENS_REASONING = re.compile(r"\s*<(?:think|thinking|reasoning|REASONING_SCRATCHPAD)>")
"""A tag that is still there once the closed blocks are lifted out was never closed."""

_MAX_DEPTH = 100
"""Deepest JSON that is written as JSON: widely used readers refuse more than 128 levels."""

_MAX_COLUMN_CHARS = 1000

_TOO_DEEP = f"nested deeper than {_MAX_DEPTH} levels"

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))

_write_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def to_row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a record; raises Rejected where it breaks a rule of the format.

    A record that ended early converts too, with `completed` false: the caller decides which
    file it belongs to.
    """
    turns = record["turns"]
    if not turns:
        raise Rejected(Reason.NO_REPLY, f"status {record['status']}: the model never replied")
    messages = record["messages"]
    tools = record["tools"] or []
    conversations = to_conversations(messages, tools)
    completed = record["status"] == "completed"
    if completed:
        check_finished(messages)
    said = [entry["value"] for entry in conversations if entry["from"] == "gpt"][-len(turns) :]
    with_reasoning = sum(not value.startswith(_NO_REASONING.rstrip()) for value in said)
    tool_stats = _tool_stats(messages, turns=len(turns))
    metadata = {
        "model": record["model"],
        "model_returned": record["model_returned"],
        "api": record["api"],
        "status": record["status"],
        "finish_reason": turns[-1]["finish_reason"],
        "prompt_id": record["prompt_id"],
        "sample": record["sample"],
        "toolsets": record["toolsets"],
        "tool_stats": tool_stats,
        "reasoning": {"assistant_turns": len(said), "with_reasoning": with_reasoning},
        "usage": record["usage"],
        "interrupted_calls": sum(len(resume["interrupted"]) for resume in record["resumes"]),
        "columns": _small_columns(record["row"]),
        "sandbox": record["sandbox"],
        "seed": record["seed"],
        "config_digest": record["config_digest"],
    }
    return {
        "id": record["id"],
        "conversations": conversations,
        "tools": _write_json(tools),
        "completed": completed,
        "partial": not completed,
        "api_calls": len(turns),
        "num_turns": len(turns),
        "num_tool_calls": sum(stats["count"] for stats in tool_stats),
        "has_reasoning": with_reasoning > 0,
        "metadata": _write_json(metadata),
    }


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
    line = _write_json(row) + "\n"
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
    All results of a turn share one tool entry, in the order of the calls they answer.
    """
    check_conversation(messages, {tool["function"]["name"] for tool in tools})
    conversations = [{"from": "system", "value": _system_value(tools)}]
    spoken = (message for message in messages if message["role"] != "system")
    turn = 0
    calls: Sequence[Mapping[str, Any]] = ()
    for role, group in groupby(spoken, key=lambda message: message["role"]):
        if role == "user":
            (message,) = group
            entry = {"from": "human", "value": _human_value(message, turn=turn + 1)}
        elif role == "assistant":
            (message,) = group
            turn += 1
            calls = message.get("tool_calls") or ()
            entry = {"from": "gpt", "value": _gpt_value(message, calls, turn=turn)}
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
    return _template().replace("{tools}", _escape_markers(_write_json(signatures)))


@cache
def _template() -> str:
    path = Path(__file__).with_name("hermes_system_prompt.txt")
    return path.read_text(encoding="utf-8").removesuffix("\n")


def _human_value(message: Mapping[str, Any], *, turn: int) -> str:
    text = _content(message, where=f"user message before turn {turn}")
    if not text.strip():
        raise Rejected(Reason.EMPTY_VALUE, f"user message before turn {turn}: blank")
    return text


def _gpt_value(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], *, turn: int) -> str:
    inline, text = split_inline_reasoning(_content(message, where=f"turn {turn}"))
    if _OPENS_REASONING.match(text):
        raise Rejected(Reason.UNCLOSED_THINK, f"turn {turn}: begins {text.lstrip()[:40]!r}")
    reasoning = _joined_reasoning(message.get("reasoning") or "", inline or "")
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
        arguments = _arguments_json(call, where=f"turn {turn}, call {number}")
        name = _write_json(call["function"]["name"])
        body = _escape_markers(f'{{"name": {name}, "arguments": {arguments}}}')
        parts.append(f"<tool_call>\n{body}\n</tool_call>\n")
    return "".join(parts).rstrip()


def _joined_reasoning(apart: str, inline: str) -> str:
    """The reasoning that came apart from the text and that which stood in it, each once."""
    if not apart.strip() or apart.strip() == inline:
        return inline
    return f"{apart}\n\n{inline}" if inline else apart


def _arguments_json(call: Mapping[str, Any], *, where: str) -> str:
    sent = call["function"]["arguments"]
    if not sent.strip():
        return "{}"
    place = f"{where} ({call['function']['name']})"
    try:
        arguments = _respaced_json(sent)
    except ValueError as e:
        raise Rejected(Reason.ARGUMENTS_NOT_JSON, f"{place}: {e}") from e
    if not arguments.startswith("{"):
        raise Rejected(Reason.ARGUMENTS_NOT_OBJECT, f"{place}: {arguments[:40]!r}")
    return arguments


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
        body = _escape_markers(
            f'{{"tool_call_id": {_write_json(call["id"])},'
            f' "name": {_write_json(call["function"]["name"])},'
            f' "content": {_content_json(contents[call["id"]])}}}'
        )
        blocks.append(f"<tool_response>\n{body}\n</tool_response>")
    return "\n".join(blocks)


def _content_json(text: str) -> str:
    """A result that is a JSON object or list as that value, any other as a JSON string."""
    if text.lstrip().startswith(("{", "[")):
        try:
            return _respaced_json(text)
        except ValueError:
            pass
    return _write_json(text)


def _escape_markers(json_text: str) -> str:
    return _MARKER_IN_JSON.sub(r"\\u003c", json_text) if "<" in json_text else json_text


def _content(message: Mapping[str, Any], *, where: str) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        raise Rejected(Reason.NOT_TEXT, f"{where}: content is a {type(content).__name__}")
    return content


def _tool_stats(messages: Sequence[Mapping[str, Any]], *, turns: int) -> list[dict[str, Any]]:
    """How often each tool was called and how it went, in the last `turns` assistant turns."""
    starts = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    stats: dict[str, dict[str, Any]] = {}
    names: dict[str, str] = {}
    for message in messages[starts[-turns:][0] :]:
        for call in message.get("tool_calls") or ():
            name = names[call["id"]] = call["function"]["name"]
            zero = {"tool": name, "count": 0, "success": 0, "failure": 0}
            stats.setdefault(name, zero)["count"] += 1
        if message["role"] == "tool":
            outcome = "failure" if message.get("is_error") else "success"
            stats[names[message["tool_call_id"]]][outcome] += 1
    return [stats[name] for name in sorted(stats)]


def _respaced_json(text: str) -> str:
    """JSON `text` with the separators of the format, every number in the digits it came in.

    Raises ValueError for all that a strict reader refuses or reads differently: NaN, numbers out
    of range, repeated keys, too deep nesting.
    """
    try:
        _strict_decoder.decode(text)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    pieces = _pieces(text)
    structure = '"'.join(pieces[::2])
    if _is_too_deep(structure):
        raise ValueError(_TOO_DEEP)
    for white in " \t\n\r":
        structure = structure.replace(white, "")
    pieces[::2] = structure.replace(",", ", ").replace(":", ": ").split('"')
    if "\\u" in text or "\\/" in text:  # every other escape is written as it came
        strings = '","'.join(pieces[1::2])
        pieces[1::2] = _pieces(_write_json(json.loads(f'["{_reveal(strings)}"]')))[1::2]
    return _reveal('"'.join(pieces))


def _pieces(json_text: str) -> list[str]:
    """Valid JSON cut at its quotes: strings at the odd places, what is between them at the even.

    Escaped backslashes and quotes are hidden behind control characters, which JSON cannot hold.
    """
    return json_text.replace("\\\\", "\0").replace('\\"', "\1").split('"')


def _reveal(hidden: str) -> str:
    return hidden.replace("\1", '\\"').replace("\0", "\\\\")


def _is_too_deep(structure: str) -> bool:
    brackets = structure.encode().translate(_SQUARE, _NO_BRACKETS)
    for _ in range(_MAX_DEPTH):
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"")  # the innermost level, everywhere at once
    return bool(brackets)


def _finite(digits: str) -> float:
    if math.isinf(number := float(digits)):
        raise ValueError(f"number out of range: {digits[:40]}")
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object repeats a key")
    return members


_strict_decoder = json.JSONDecoder(
    parse_float=_finite, parse_constant=_refuse_constant, object_pairs_hook=_object
)
