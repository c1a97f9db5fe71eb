"""All texts of a record with a description of their place, and the words of a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Scripts that put no spaces between words."""

_WORD = re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]")


def texts_of(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Place and text of everything in a record that any format can hold.

    That includes inner conversations, discarded replies and the outputs of the check and an agent.
    """
    yield from _said(record, "")
    for name, value in record["row"].items():
        for text in strings_in(value):
            yield f"column {name}", text
    for text in strings_in(record.get("check")):
        yield "check", text
    for text in strings_in(record.get("agent")):
        yield "agent", text


def words_of(text: str) -> list[str]:
    """The words of a text, casefolded; in scripts without spaces, each character."""
    return _WORD.findall(text.casefold())


def strings_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, at any depth, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def _said(part: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    for number, message in enumerate(part["messages"], start=1):
        yield from _in_message(message, f"{place}message {number}")
    for number, reply in enumerate(part.get("discarded") or (), start=1):
        yield from _in_message(reply["message"], f"{place}message {number} set aside")
    for call in part.get("set_aside") or ():
        for message in (*call["added"], call["message"]):
            yield from _in_message(message, f"{place}call {call['number']} set aside")
    for change in part.get("rewritten") or ():
        for message in change["messages"]:
            yield from _in_message(message, f"{place}rewritten message {change['start'] + 1}")
    for inner in part.get("inner") or ():
        yield from _said(inner, f"{place}conversation of {inner['name']}, ")


def _in_message(message: Mapping[str, Any], place: str) -> Iterator[tuple[str, str]]:
    where = f"{place} ({message['role']})"
    if isinstance(content := message.get("content"), str):
        yield where, content
    if reasoning := message.get("reasoning"):
        yield f"{where}, reasoning", reasoning
    for call in message.get("tool_calls") or ():
        yield f"{where}, arguments", call["function"]["arguments"]
    for text in strings_in(message.get("details")):
        yield f"{where}, details", text
