"""The columns of each format and their types, in order."""

from __future__ import annotations

from collections.abc import Mapping

_HEAD = {"id": "string"}
_PAIR_END = {"tools": "string", "metadata": "string"}
_END = {
    "num_turns": "int64",
    "num_tool_calls": "int64",
    "has_reasoning": "bool",
    "metadata": "string",
}
_ROW = {"tools": "string", "completed": "bool"}
_HERMES = {"partial": "bool", "api_calls": "int64"}

COLUMNS: Mapping[str, Mapping[str, str]] = {
    "hermes": {**_HEAD, "conversations": "turns", **_ROW, **_HERMES, **_END},
    "llamafactory": {**_HEAD, "conversations": "turns", **_ROW, **_END},
    "openai": {**_HEAD, "messages": "messages", **_ROW, **_END},
    "dpo": {**_HEAD, **dict.fromkeys(("prompt", "chosen", "rejected"), "messages"), **_PAIR_END},
    "kto": {
        **_HEAD,
        **dict.fromkeys(("prompt", "completion"), "messages"),
        "label": "bool",
        **_PAIR_END,
    },
}
"""`turns` are objects of `from` and `value`, `messages` objects of any form; `tools` are JSON text,
or in formats with messages a list of objects where the recipe says so."""


def columns_of(format_name: str, *, lists_tools: bool) -> dict[str, str]:
    """The columns of a format; `tools` are messages too where they are listed."""
    columns = dict(COLUMNS[format_name])
    if lists_tools and "messages" in columns.values():
        columns["tools"] = "messages"
    return columns
