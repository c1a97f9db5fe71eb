"""Texts of a record: all of them with their places, those of the user, and its diff."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec

from batch_trajectories.export.conversation.validity import Reason, Rejected
from batch_trajectories.records.record_types import Record, StoredConversation, StoredMessage

_UNSPACED = (
    "\u0e00-\u0eff"  # Thai, Lao
    "\u1000-\u109f"  # Myanmar
    "\u1780-\u17ff"  # Khmer
    "\u3040-\u30ff"  # Hiragana, Katakana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
)
"""Scripts that put no spaces between words."""


def conversation_texts(record: Record) -> Iterator[tuple[str, str]]:
    """All texts of a record that any format can hold, each after a description of its place.

    Inner conversations, discarded replies and the outputs of the check and an agent are included.
    """
    yield from _conversation_texts(record, "")
    for name, value in record.row.items():
        for text in strings_in(value):
            yield f"column {name}", text
    for text in strings_in(msgspec.to_builtins(record.check)):
        yield "check", text
    for text in strings_in(msgspec.to_builtins(record.agent)):
        yield "agent", text


def user_texts(record: Record) -> list[str]:
    """The texts of the user."""
    return [message.content for message in record.messages if message.role == "user"]


def split_words(text: str) -> list[str]:
    """The words of a text, casefolded; in scripts without spaces, each character."""
    return _word().findall(text.casefold())


@cache  # compiled at the first use, because it takes 2 ms and few commands need it
def _word() -> re.Pattern[str]:
    return re.compile(rf"[^\W{_UNSPACED}]+|[{_UNSPACED}]")


def strings_in(value: Any) -> Iterator[str]:
    """Strings in a JSON value, at any depth, without keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings_in(inner)


def _conversation_texts(part: StoredConversation, prefix: str) -> Iterator[tuple[str, str]]:
    for number, message in enumerate(part.messages, start=1):
        yield from _message_texts(message, f"{prefix}message {number}")
    for number, reply in enumerate(part.discarded, start=1):
        yield from _message_texts(reply.message, f"{prefix}message {number} set aside")
    if isinstance(part, Record):
        yield from _hidden_texts(part)
    for inner in part.inner:
        yield from _conversation_texts(inner, f"{prefix}conversation of {inner.name}, ")


def _hidden_texts(record: Record) -> Iterator[tuple[str, str]]:
    for call in record.set_aside:
        for message in (*call.added, call.message):
            yield from _message_texts(message, f"call {call.number} set aside")
    for change in record.rewritten or ():
        for message in change.messages:
            yield from _message_texts(message, f"rewritten message {change.start + 1}")


def _message_texts(message: StoredMessage, prefix: str) -> Iterator[tuple[str, str]]:
    where = f"{prefix} ({message.role})"
    yield where, message.content
    if message.reasoning:
        yield f"{where}, reasoning", message.reasoning
    for call in message.tool_calls:
        yield f"{where}, arguments", call.function.arguments
    for text in strings_in(message.details):
        yield f"{where}, details", text


def read_patch(record: Record) -> str:
    """The conversation's changes to its repository, in the form of `git apply`.

    Raises `Rejected` if the record does not hold all of them.
    """
    diff = record.diff
    if diff is None or not isinstance(diff.get("patch"), str):
        raise Rejected(
            Reason.NO_PATCH,
            "it has no diff, which only conversations in an image with a repository have",
        )
    if error := diff.get("error"):
        raise Rejected(Reason.NO_PATCH, str(error))
    if diff.get("truncated"):
        length = len(diff["patch"])
        raise Rejected(Reason.CUT_PATCH, f"the record holds only the first {length:,} characters")
    if "base64" in diff:
        raise Rejected(Reason.NO_PATCH, "its diff is not UTF-8; `diff.base64` of the record has it")
    return str(diff["patch"])
