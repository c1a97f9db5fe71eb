"""The texts of a record, wherever they stand, with words for the place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def texts_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Place and text of all that a row can hold: messages, reasoning, arguments, columns."""
    for number, message in enumerate(record["messages"], start=1):
        where = f"message {number} ({message['role']})"
        if isinstance(content := message.get("content"), str):
            yield where, content
        if reasoning := message.get("reasoning"):
            yield f"{where}, reasoning", reasoning
        for call in message.get("tool_calls") or ():
            yield f"{where}, arguments", call["function"]["arguments"]
    for name, value in record["row"].items():
        if isinstance(value, str):
            yield f"column {name}", value
